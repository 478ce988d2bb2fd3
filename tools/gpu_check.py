"""On a machine with an NVIDIA GPU: are the Triton kernels right there, and how fast are they? Under eight minutes.

    tools/gpu_check.py                      everything, as a table
    tools/gpu_check.py --json result.json   the same figures for docs/benchmarks.md
    tools/gpu_check.py --skip-bytes         only speed

1. Bytes: tests/kernels/test_triton_gpu.py, every kernel against the reference on random, golden, discriminating input.
2. Capture: every kernel in a CUDA graph, replayed on other input; no call waits for the device.
3. Speed: bytes read plus written over time, beside a device-to-device copy of as many bytes and beside torch.compile of
   the same rule (tools/torch_formulas.py).

The exit code is 0 if all bytes are right, 1 if one is not, 2 without a GPU. The goals for speed are only shown.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch_formulas

from lowprec.formats import get_format

ROOT = Path(__file__).parent.parent
BYTES = "tests/kernels/test_triton_gpu.py"
WORKERS = 8  # compiling is what takes the time

VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "fp8 128x128": ("fp8_block", {}),
    "fp8 1x128": ("fp8_block", {"block": (1, 128)}),
    "mxfp8": ("mxfp8", {}),
    "mxfp4": ("mxfp4", {}),
    "nvfp4": ("nvfp4", {}),
    "nvfp4 row": ("nvfp4", {"outer": "row"}),
    "nvfp4 16x16": ("nvfp4", {"block": (16, 16)}),
    "nvfp4 4over6": ("nvfp4", {"four_over_six": "mse", "e4m3_max": 256}),
}
SHAPES: dict[str, tuple[tuple[int, ...], torch.dtype, float]] = {  # and the goal, of a copy's bandwidth
    "4096x14336 bf16": ((4096, 14336), torch.bfloat16, 0.9),
    "8192x28672 bf16": ((8192, 28672), torch.bfloat16, 0.9),
    "128 experts 768x2048 bf16": ((128, 768, 2048), torch.bfloat16, 0.8),
    "4096x14336 fp32": ((4096, 14336), torch.float32, 0.9),
}
COMPILED_SHAPES = {"4096x14336 bf16"}  # torch.compile takes a while


@dataclass(frozen=True)
class Row:
    """One measurement. `of_copy`: bandwidth over that of the copy; `compiled_ms`: torch.compile of the same rule."""

    shape: str
    variant: str
    operation: str
    milliseconds: float
    gigabytes_a_second: float
    of_copy: float
    goal: float
    compiled_ms: float | None = None
    compiled_equal: bool | None = None


# ---- 1. bytes ------------------------------------------------------------------------------------------


def check_bytes() -> tuple[bool, str]:
    """(right, last line) of the tests, each of which runs on the GPU."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-n", str(min(WORKERS, os.cpu_count() or 1)), BYTES]
    done = subprocess.run(command, check=False, cwd=ROOT, capture_output=True, text=True)
    lines = (done.stdout + done.stderr).strip().splitlines()
    if done.returncode:
        print(*lines[-40:], sep="\n", file=sys.stderr)
    return done.returncode == 0, lines[-1] if lines else "no output"


# ---- 2. capture ----------------------------------------------------------------------------------------


def kernels_of(format_name: str) -> Any:
    """The module; imported late, since without a GPU there is nothing to do with it."""
    import importlib

    return importlib.import_module(f"lowprec.kernels.triton.{format_name}")


def operations(variant: tuple[str, dict[str, Any]], x: torch.Tensor) -> dict[str, Callable[[], Any]]:
    """Every call that a training step or a weight update makes, on `x`; each returns a tensor or a tuple of them."""
    kernels, options = kernels_of(variant[0]), get_format(variant[0]).options.parse(variant[1])
    stored = kernels.quantize(x, options)
    made: dict[str, Callable[[], Any]] = {
        "quantize": lambda: kernels.quantize(x, options),
        "quantize transpose": lambda: kernels.quantize(x.mT, options),
        "fake_quantize": lambda: kernels.fake_quantize(x, options),
        "dequantize": lambda: kernels.dequantize(stored, options, x.dtype),
    }
    if stored.global_scale is not None:
        amax = kernels.global_amax(x, options)
        made["global_amax"] = lambda: kernels.global_amax(x, options)
        made["quantize, amax given"] = lambda: kernels.quantize(x, options, amax)
    return made


def tensors(result: Any) -> list[torch.Tensor]:
    """The tensors of a result, as bytes."""
    parts = result if isinstance(result, tuple) else (result,)
    return [part.contiguous().view(-1).view(torch.uint8) for part in parts if part is not None]


def check_capture(variant: tuple[str, dict[str, Any]]) -> list[str]:
    """What failed: a call that waits for the device or allocates in a way that a graph cannot replay."""
    x = torch.randn(4, 256, 512, device="cuda", dtype=torch.bfloat16)
    faults = []
    for name, call in operations(variant, x).items():
        call()  # compiles
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            call()
        except RuntimeError as error:
            faults.append(f"{name} waits for the device: {error}")
        finally:
            torch.cuda.set_sync_debug_mode("default")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = call()
        x.copy_(torch.randn_like(x))
        graph.replay()
        pairs = zip(tensors(captured), tensors(call()), strict=True)
        if not all(torch.equal(ours, theirs) for ours, theirs in pairs):
            faults.append(f"{name}: a replayed graph gives other bytes")
    return faults


# ---- 3. speed ------------------------------------------------------------------------------------------


def milliseconds(call: Callable[[], Any]) -> float:
    """The median, with a cold second-level cache."""
    from triton.testing import do_bench

    return float(do_bench(call, warmup=10, rep=60, return_mode="median"))


def copy_gigabytes_a_second(size: int) -> float:
    """Bytes read plus written by a device-to-device copy that moves `size` bytes in all."""
    source = torch.empty(size // 2, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return size / milliseconds(lambda: target.copy_(source)) / 1e6


def bytes_moved(operation: str, x: torch.Tensor, result: Any, stored: Any, two_passes: bool) -> int:
    """What a kernel must read and write. Without its amax an NVFP4 tensor has to be read twice."""
    size = sum(part.numel() for part in tensors(result))
    if operation == "dequantize":
        return size + sum(part.numel() for part in tensors(stored))
    reads = 2 if two_passes and operation in {"quantize", "quantize transpose", "fake_quantize"} else 1
    return size + reads * x.numel() * x.element_size()


def compare_compiled(format_name: str, x: torch.Tensor, stored: Any) -> dict[str, Any]:
    """torch.compile of the format's rule with default options: how long it takes, whether its bytes are right."""
    formula = torch.compile(torch_formulas.FORMULAS[format_name])
    pairs = zip(tensors(formula(x)), tensors(stored), strict=True)
    equal = all(torch.equal(ours, theirs) for ours, theirs in pairs)
    return {"compiled_equal": equal, "compiled_ms": milliseconds(lambda: formula(x))}


def measure(shape_name: str, variant_name: str, *, compiled: bool) -> list[Row]:
    """All operations of one variant on one shape."""
    shape, dtype, goal = SHAPES[shape_name]
    variant = VARIANTS[variant_name]
    x = (torch.randn(shape, device="cuda") * 0.02).to(dtype)
    calls = operations(variant, x)
    stored = calls["quantize"]()
    rows = []
    for operation, call in calls.items():
        size = bytes_moved(operation, x, call(), stored, stored.global_scale is not None)
        took = milliseconds(call)
        speed = size / took / 1e6
        against = compare_compiled(variant[0], x, stored) if compiled and operation == "quantize" else {}
        of_copy = speed / copy_gigabytes_a_second(size)
        rows.append(Row(shape_name, variant_name, operation, took, speed, of_copy, goal, **against))
    return rows


def show(row: Row) -> str:
    """One line of the table."""
    compiled = ""
    if row.compiled_ms is not None:
        other = "" if row.compiled_equal else ", other bytes"
        compiled = f"{row.compiled_ms / row.milliseconds:.1f}x torch.compile{other}"
    reached = "reached" if row.of_copy >= row.goal else ""
    return (
        f"{row.shape:<27}{row.variant:<14}{row.operation:<22}{row.milliseconds:8.3f} ms"
        f"{row.gigabytes_a_second:8.0f} GB/s{row.of_copy:7.0%} of copy  {reached:<9}{compiled}"
    )


# ---- the command ---------------------------------------------------------------------------------------


def machine() -> dict[str, str]:
    """The card and the versions that the figures belong to."""
    import triton

    major, minor = torch.cuda.get_device_capability()
    return {
        "card": torch.cuda.get_device_name(),
        "capability": f"{major}.{minor}",
        "torch": torch.__version__,
        "cuda": str(torch.version.cuda),
        "triton": triton.__version__,
    }


def measure_all() -> list[Row]:
    """Speed of everything, printed as it comes."""
    rows = []
    for shape in SHAPES:
        for variant in VARIANTS:
            for row in measure(shape, variant, compiled=shape in COMPILED_SHAPES and not VARIANTS[variant][1]):
                print(show(row), flush=True)
                rows.append(row)
        torch.cuda.empty_cache()
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--skip-bytes", action="store_true", help="leave out the comparison with the reference")
    arguments = parser.parse_args()
    if not torch.cuda.is_available() or torch.version.hip is not None:
        print("gpu_check: no NVIDIA GPU here (torch finds none), so nothing was run", file=sys.stderr)
        return 2
    begin, result = time.monotonic(), {"machine": machine()}
    print(", ".join(f"{name} {value}" for name, value in machine().items()), flush=True)
    right, said = (True, "left out") if arguments.skip_bytes else check_bytes()
    print(f"bytes: {'equal' if right else 'NOT EQUAL'} ({said})", flush=True)
    faults = [f"{name}: {fault}" for name, variant in VARIANTS.items() for fault in check_capture(variant)]
    print("capture and synchronisation:", "; ".join(faults) or "every kernel in a graph, none waits", flush=True)
    rows = measure_all()
    print(f"{time.monotonic() - begin:.0f} seconds in all")
    if arguments.json:
        figures = [asdict(row) for row in rows]
        arguments.json.write_text(json.dumps({**result, "bytes": said, "faults": faults, "speed": figures}, indent=1))
    return 0 if right and not faults else 1


if __name__ == "__main__":
    sys.exit(main())
