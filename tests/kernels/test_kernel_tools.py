"""The maintainers' scripts for kernels run and say what they measured."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def run(script: str, *arguments: str) -> str:
    command = [sys.executable, str(ROOT / "tools" / script), *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout


def test_bench_kernels(tmp_path) -> None:
    file = tmp_path / "speeds.json"
    small = ("--mib", "8", "--passes", "1", "--threads", "1", "2", "--formats", "nvfp4", "--reference")
    text = run("bench_kernels.py", *small, "--json", str(file))
    record = json.loads(file.read_text(encoding="utf-8"))
    assert set(record["gb_per_s"]) == {"1", "2"}
    for speeds in record["gb_per_s"].values():
        assert {"memcpy", "nvfp4: quantize", "nvfp4: fake_quantize", "nvfp4: dequantize"} <= set(speeds)
        assert all(speed > 0 for speed in speeds.values())
    assert record["backend"] in text
    assert record["reference_fake_quantize"]["nvfp4"] < record["gb_per_s"]["1"]["nvfp4: fake_quantize"]


def test_fuzz_kernels() -> None:
    text = run("fuzz_kernels.py", "--elements", "1", "--formats", "mxfp8")
    assert text.splitlines()[-1].endswith(" bytes equal")
    assert "mxfp8" in text
