"""The command where its output cannot go: a full disk, a stream that the caller has closed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from folders import QWEN3_MOE

from lowprec import verify

COMMAND = Path(sys.executable).with_name("lowprec")


def shell(line: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["bash", "-c", f"{COMMAND} {line}"], capture_output=True, text=True, check=False)


@pytest.mark.parametrize("words", ["recipes", "--help", "explain {} -r mxfp8", "explain {} -r mxfp8 --json"])
def test_standard_output_that_cannot_be_written(words: str) -> None:
    line = words.format(QWEN3_MOE)
    full = shell(f"{line} > /dev/full")
    assert full.returncode == 1
    assert full.stderr == "lowprec: error: the output cannot be written: No space left on device\n"
    for redirection in (">&-", ">&- 2>&-"):
        closed = shell(f"{line} {redirection}")
        assert (closed.returncode, closed.stdout, closed.stderr) == (0, "", "")


def test_a_conversion_without_any_stream(tmp_path: Path) -> None:
    assert shell(f"convert {QWEN3_MOE} {tmp_path / 'out'} -r mxfp8 <&- >&- 2>&-").returncode == 0
    assert verify(tmp_path / "out", against=QWEN3_MOE).ok
