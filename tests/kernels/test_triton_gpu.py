"""The tests of test_triton_interpreter.py once more, on a GPU, and what only a GPU can show."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from bitwise import BF16, assert_same_bits
from hostile import weights

from lowprec.formats import get_format
from lowprec.qtensor import to_numpy

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

import torch_formulas  # noqa: E402
from test_triton_interpreter import *  # noqa: E402, F403

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def run():
    """Call a function of interpreted.py in this process, which does not interpret."""
    if not torch.cuda.is_available():
        pytest.skip("torch finds no NVIDIA GPU")
    return lambda function, *args: function(*args)


@pytest.mark.parametrize("name", torch_formulas.FORMULAS)
def test_formulas_that_kernels_are_measured_against(name) -> None:
    """In torch as it is written, on the CPU: no compiler is involved."""
    x = weights(np.random.default_rng(0), (2, 256, 384), BF16)
    x[0, :128, :128] = 0
    fmt = get_format(name)
    want = fmt.quantize(x, fmt.options(), None)
    got = torch_formulas.FORMULAS[name](torch.from_numpy(x.view(np.int16)).view(torch.bfloat16))
    for ours, theirs, what in zip(got, want, want._fields, strict=False):
        assert_same_bits(to_numpy(ours), np.asarray(theirs), None, what)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_gpu_check_without_a_gpu_says_so_in_one_line() -> None:
    done = subprocess.run([sys.executable, ROOT / "tools" / "gpu_check.py"], capture_output=True, text=True)
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
    assert "no NVIDIA GPU" in done.stderr
    assert done.stdout == ""
