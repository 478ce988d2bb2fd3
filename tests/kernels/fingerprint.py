"""Prints whether the compiled kernels run, and one hash of what they make of every variant. Run as a script."""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path

import numpy as np


def fingerprint(load) -> str:
    """Of quantized arrays, decoded and fake-quantized values; `load(format name)` gives the functions."""
    from hostile import DTYPES, finite_patterns, ties, weights
    from variants import VARIANTS

    from lowprec.formats import get_format

    out = hashlib.sha256()
    for name, values in VARIANTS:
        functions, options = load(name), get_format(name).options.parse(values)
        random = np.random.default_rng(11)
        for dtype in DTYPES:
            for kind in (finite_patterns, weights, ties):
                quantized = functions.quantize(kind(random, (32, 2304), dtype), options, None)
                values_ = functions.dequantize(quantized, options, dtype)
                for array in (*quantized, values_):
                    if array is not None:
                        out.update(np.asarray(array, order="C").tobytes())
    return out.hexdigest()


if __name__ == "__main__":
    import importlib

    here = Path(__file__).parent
    sys.path[1:1] = [str(here.parent / "formats"), str(here)]
    backends = importlib.import_module("lowprec.backends")
    (cpu,) = (status for status in backends.status() if status.name == "cpu")
    print(cpu)
    subnormal = np.array([1e-40], np.float32) * np.float32(0.5)
    print("subnormals are kept" if subnormal[0] else "subnormals are flushed")
    if cpu.active:
        print(fingerprint(lambda name: importlib.import_module(f"lowprec.kernels.cpu.{name}")))
