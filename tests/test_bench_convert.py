"""The benchmark of conversion: its inputs are the same everywhere, and its figures are of runs that happened."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from bench_convert import TINY, TINY_MOE
from bench_inputs import DENSE, MOE, Model, dense_of, make_input
from folders import load_folder, tree

from lowprec import explain

TOOLS = Path(__file__).parent.parent / "tools"


def size(model: Model) -> int:
    return sum(2 * hidden * (rest[0] if rest else 1) for hidden, *rest in model.shapes().values())


def test_the_inputs_have_the_stated_sizes() -> None:
    """spec/performance.md 1."""
    assert (len(DENSE.shapes()), size(DENSE), DENSE.shards) == (310, 1_192_099_840, 3)
    assert (len(MOE.shapes()), size(MOE), MOE.shards) == (423, 1_627_953_152, 4)
    for gigabytes in (0.5, 1, 2, 4):
        assert abs(size(dense_of(gigabytes)) / 1e9 - gigabytes) < 0.02


def test_inputs_are_deterministic_and_can_be_converted(tmp_path: Path) -> None:
    for model, name in ((TINY, "dense"), (TINY_MOE, "moe")):
        assert make_input(model, tmp_path / name) == size(model)
        tensors = load_folder(tmp_path / name)
        assert {name: array.shape for name, array in tensors.items()} == model.shapes()
        assert len(list((tmp_path / name).glob("*.safetensors"))) == model.shards
        for recipe in ("fp8_block", "mxfp8", "nvfp4", "mxfp4_dense"):
            assert explain(tmp_path / name, recipe, overrides=["policy.last=0"]).loads
        make_input(model, tmp_path / "again" / name)
        assert tree(tmp_path / "again" / name) == tree(tmp_path / name)
    stamp = (tmp_path / "dense" / "config.json").stat().st_mtime_ns
    make_input(TINY, tmp_path / "dense")
    assert (tmp_path / "dense" / "config.json").stat().st_mtime_ns == stamp


def test_it_measures(tmp_path: Path) -> None:
    command = [sys.executable, str(TOOLS / "bench_convert.py"), "--tiny", "--runs", "1", "--inputs", "moe"]
    command += ["--recipes", "fp8_block", "nvfp4", "--peers", sys.executable, "--folder", str(tmp_path / "inputs")]
    command += ["--json", str(tmp_path / "out.json")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    record = json.loads((tmp_path / "out.json").read_text())
    assert [row["recipe"] for row in record["rows"]] == ["fp8_block", "nvfp4"]
    for row in record["rows"]:
        assert 0 < row["cp"] < row["wall"]
        assert row["goal"] == (1.2 if row["recipe"] == "nvfp4" else 1) * row["cp"] + 0.7
        assert row["met"] == (row["wall"] <= row["goal"])
        assert 20 << 20 < row["peak_rss"] < 400 << 20
        assert f"{row['recipe']} policy.last=0" in done.stdout
    assert [path.name for path in (tmp_path / "inputs").iterdir()] == ["moe"]
