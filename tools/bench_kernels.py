"""Throughput of the kernels, in GB/s of BF16, beside memcpy on the same pages in the same minute.

    python tools/bench_kernels.py [--threads 1 2] [--mib 512] [--passes 9] [--reference] [--json FILE]

A buffer much larger than any cache of one core is worked through in stripes of 4 MiB, as the converter does, with the
result written to buffers of its own size. Each stripe is timed by itself; its time is the best of all passes, and the
throughput that of the sum. So a neighbour that takes the processor for some milliseconds does not count, memory does.
memcpy runs once in every pass, between the kernels. NVFP4 with `outer = tensor` counts both its passes over memory.
"""

from __future__ import annotations

import argparse
import importlib
import json
import platform
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from lowprec import backends
from lowprec.formats import get_format
from lowprec.formats.base import Array, Options, Quantized

COLUMNS = 4096
STRIPE_ROWS = 512  # 4 MiB of BF16
VARIANTS: list[tuple[str, dict[str, Any]]] = [
    ("fp8_block", {}),
    ("fp8_block", {"scale": "pow2"}),
    ("fp8_block", {"rule": "deepseek"}),
    ("fp8_block", {"block": (1, 128)}),
    ("mxfp8", {}),
    ("mxfp4", {}),
    ("nvfp4", {}),
    ("nvfp4", {"outer": "row"}),
    ("nvfp4", {"block": (16, 16)}),
    ("nvfp4", {"four_over_six": "mse", "e4m3_max": 256}),
    ("int4_group", {}),
    ("int4_group", {"group": 128}),
]

Work = Callable[[int], None]  # one stripe


@dataclass(frozen=True, kw_only=True)
class Job:
    """What is timed: one or more passes over all stripes."""

    name: str
    passes: tuple[Work, ...]


@dataclass(frozen=True, kw_only=True)
class Buffers:
    """Stripes of BF16 weights and where results go."""

    x: list[Array]
    y: list[Array]

    @property
    def nbytes(self) -> int:
        """Bytes of BF16."""
        return sum(int(stripe.nbytes) for stripe in self.x)


def make_buffers(mib: int) -> Buffers:
    """Weights as in spec/performance.md 1: normal * 0.02 with a spread over rows and a few outliers."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((STRIPE_ROWS, COLUMNS), np.float32) * np.float32(0.02)
    x *= np.exp(rng.standard_normal((STRIPE_ROWS, 1), np.float32) * np.float32(0.25))
    x[rng.random(x.shape) < 1 / 5000] *= 15
    stripe = x.astype(ml_dtypes.bfloat16)
    count = max(mib // 4, 2)
    return Buffers(x=[stripe.copy() for _ in range(count)], y=[np.ones_like(stripe) for _ in range(count)])


def empty(options: Options) -> Quantized:
    """Results of one stripe, their pages touched."""
    layout = get_format(options.format).layout((STRIPE_ROWS, COLUMNS), options)
    arrays = [None if spec is None else np.ones(spec.shape, np.uint8).astype(spec.dtype) for spec in layout]
    return Quantized(*arrays)


def jobs_of(name: str, values: dict[str, Any], buffers: Buffers, backend: str) -> Iterator[Job]:
    """quantize, fake_quantize and dequantize of one variant."""
    options = get_format(name).options.parse(values)
    kernel: Any = importlib.import_module(f"lowprec.kernels.{backend}.{name}")
    label = " ".join([name, *(str(value).replace(" ", "") for value in values.values())])
    results = [empty(options) for _ in buffers.x]
    amax: Array | None = None
    if get_format(name).global_amax is not None:
        amax = np.asarray(kernel.global_amax(buffers.x[0], options))

    def find_amax(i: int) -> None:
        kernel.global_amax(buffers.x[i], options)

    def quantize(i: int) -> None:
        kernel.quantize_into(buffers.x[i], options, results[i], amax)

    def fake(i: int) -> None:
        kernel.fake_quantize_into(buffers.x[i], options, buffers.y[i], amax)

    def dequantize(i: int) -> None:
        kernel.dequantize_into(results[i], options, buffers.y[i])

    first = () if amax is None else (find_amax,)
    yield Job(name=f"{label}: quantize", passes=(*first, quantize))
    yield Job(name=f"{label}: fake_quantize", passes=(*first, fake))
    yield Job(name=f"{label}: dequantize", passes=(dequantize,))


def timed(job: Job, stripes: int, threads: int, best: Array) -> None:
    """One run of a job; best[pass, stripe] is lowered."""

    def run(number: int, which: int, work: Work) -> None:
        for i in range(number, stripes, threads):
            begin = time.perf_counter()
            work(i)
            best[which, i] = min(best[which, i], time.perf_counter() - begin)

    for which, work in enumerate(job.passes):
        others = [threading.Thread(target=run, args=(n, which, work)) for n in range(1, threads)]
        for thread in others:
            thread.start()
        run(0, which, work)
        for thread in others:
            thread.join()


def measure(jobs: list[Job], buffers: Buffers, threads: int, passes: int) -> dict[str, float]:
    """GB/s of each job, memcpy first."""
    stripes = len(buffers.x)

    def copy(i: int) -> None:
        np.copyto(buffers.y[i], buffers.x[i])

    memcpy = Job(name="memcpy", passes=(copy,))
    best = {job.name: np.full((len(job.passes), stripes), np.inf) for job in (memcpy, *jobs)}
    for _ in range(passes):
        for job in jobs:
            timed(job, stripes, threads, best[job.name])
        for _ in range(2):
            timed(memcpy, stripes, threads, best["memcpy"])
    out = {}
    for name, times in best.items():
        slowest = max(float(times[:, n::threads].sum()) for n in range(threads))
        out[name] = buffers.nbytes / slowest / 1e9
    return out


def reference_speed(name: str, values: dict[str, Any], x: Array) -> float:
    """GB/s of the reference's fake quantization, tile by tile as lowprec.backends runs it."""
    options = get_format(name).options.parse(values)
    times = []
    for _ in range(3):
        begin = time.perf_counter()
        backends.fake_quantize(x, options, backend="reference")
        times.append(time.perf_counter() - begin)
    return float(x.nbytes / min(times) / 1e9)


def processor() -> str:
    """Model name where Linux tells it."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return f"{names[0]}, {len(names)} cores" if names else platform.machine()


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--mib", type=int, default=256, help="size of the BF16 buffer")
    parser.add_argument("--passes", type=int, default=9)
    parser.add_argument("--backend", default="cpu")
    parser.add_argument("--formats", nargs="+", help="only these")
    parser.add_argument("--reference", action="store_true", help="also the reference's fake_quantize, and the ratio")
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    buffers = make_buffers(args.mib)
    chosen = [variant for variant in VARIANTS if not args.formats or variant[0] in args.formats]
    jobs = [job for name, values in chosen for job in jobs_of(name, values, buffers, args.backend)]
    speeds = {threads: measure(jobs, buffers, threads, args.passes) for threads in args.threads}
    (detail,) = (status.detail for status in backends.status() if status.name == args.backend)
    print(f"{processor()}, {detail}, numpy {np.__version__}, {args.mib} MiB, best of {args.passes}")
    print(f"{'GB/s of BF16 (% of memcpy)':48s}" + "".join(f"{f'{t} thread' + 's' * (t > 1):>18s}" for t in speeds))
    for name in ("memcpy", *(job.name for job in jobs)):
        cells = [f"{s[name]:.2f} ({100 * s[name] / s['memcpy']:.0f} %)" for s in speeds.values()]
        print(f"{name:48s}" + "".join(f"{cell:>18s}" for cell in cells))
    slow = {}
    if args.reference:
        for name, values in chosen:
            label = " ".join([name, *(str(value).replace(" ", "") for value in values.values())])
            slow[label] = reference_speed(name, values, buffers.x[0])
            ratio = speeds[args.threads[0]][f"{label}: fake_quantize"] / slow[label]
            print(f"{label + ': fake_quantize, reference':48s}{f'{slow[label]:.3f} (1/{ratio:.0f})':>18s}")
    if args.json:
        record = {"processor": processor(), "backend": detail, "mib": args.mib, "passes": args.passes}
        record |= {"gb_per_s": {str(t): s for t, s in speeds.items()}, "reference_fake_quantize": slow}
        args.json.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
