"""Compares every byte of a backend's kernels with the reference on many random inputs; the tests run a smaller share.

    python tools/fuzz_kernels.py [--backend cpu] [--elements 10000000] [--seed 0] [--formats nvfp4 ...]

So many elements of random float32 bit patterns, and of every other kind of input in tests/kernels/hostile.py and every
dtype a tenth of that, for every variant of every format. Prints what was compared; stops at the first difference.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import numpy as np

TESTS = Path(__file__).parents[1] / "tests"
sys.path[1:1] = [str(TESTS / "formats"), str(TESTS / "kernels")]

from bitwise import F32  # noqa: E402
from hostile import DTYPES, KINDS, Kernel, assert_same_as_reference, load, patterns  # noqa: E402
from variants import VARIANTS, name_of  # noqa: E402

PIECE = (256, 3840)  # about a million elements, and a multiple of every block


def compare(kernel: Kernel, options: object, elements: int, seed: int) -> int:
    """Bytes compared for one variant."""
    random = np.random.default_rng(seed)
    pieces = -(-elements // (PIECE[0] * PIECE[1]))
    compared = sum(assert_same_as_reference(kernel, patterns(random, PIECE, F32), options) for _ in range(pieces))
    for dtype in DTYPES:
        for kind in KINDS:
            for _ in range(-(-pieces // 10)):
                compared += assert_same_as_reference(kernel, kind(random, PIECE, dtype), options)
    return compared


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", default="cpu")
    parser.add_argument("--elements", type=int, default=10_000_000, metavar="N")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--formats", nargs="+", metavar="NAME")
    args = parser.parse_args()
    total = 0
    for variant in VARIANTS:
        if args.formats and variant[0] not in args.formats:
            continue
        begin = time.perf_counter()
        kernel = load(args.backend, variant[0])
        compared = compare(kernel, kernel.format.options.parse(variant[1]), args.elements, args.seed)
        total += compared
        print(f"{name_of(variant):40s} {compared:14,d} bytes equal, {time.perf_counter() - begin:.0f} s", flush=True)
    print(f"{total:,d} bytes equal")


if __name__ == "__main__":
    main()
