"""Compile every Triton kernel ahead of time, without a GPU, and say what the compiler made of it.

    tools/triton_report.py                 the table of docs/benchmarks.md
    tools/triton_report.py --write         the same, into docs/benchmarks.md
    tools/triton_report.py --target 90     one target

A kernel is compiled exactly as it would be launched for a weight of 4096 x 14336 in bfloat16: the plan is made for a
tensor without memory. Registers and spills are what the machine code says that it needs.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.compiler import ASTSource

from lowprec.formats import get_format
from lowprec.kernels.triton import fp8_block, mxfp4, mxfp8, nvfp4, swizzle
from lowprec.kernels.triton.launch import Launch, Plan

TARGETS = (80, 90, 100, 120)
SHAPE = (4096, 14336)
PAGE = Path(__file__).parent.parent / "docs" / "benchmarks.md"
BEGIN, END = "<!-- triton_report: begin -->", "<!-- triton_report: end -->"

MODULES: dict[str, Any] = {"fp8_block": fp8_block, "mxfp8": mxfp8, "mxfp4": mxfp4, "nvfp4": nvfp4}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "fp8 128x128 te": ("fp8_block", {}),
    "fp8 128x128 te pow2": ("fp8_block", {"scale": "pow2"}),
    "fp8 128x128 deepgemm": ("fp8_block", {"rule": "deepgemm"}),
    "fp8 128x128 deepseek": ("fp8_block", {"rule": "deepseek"}),
    "fp8 1x128 te": ("fp8_block", {"block": (1, 128)}),
    "mxfp8": ("mxfp8", {}),
    "mxfp4 rceil": ("mxfp4", {}),
    "mxfp4 floor": ("mxfp4", {"scale_rule": "floor"}),
    "mxfp4 even": ("mxfp4", {"scale_rule": "even"}),
    "nvfp4 tensor": ("nvfp4", {}),
    "nvfp4 row": ("nvfp4", {"outer": "row"}),
    "nvfp4 16x16": ("nvfp4", {"block": (16, 16)}),
    "nvfp4 4over6 mae": ("nvfp4", {"four_over_six": "mae", "e4m3_max": 256}),
    "nvfp4 4over6 mse": ("nvfp4", {"four_over_six": "mse", "e4m3_max": 256}),
    "nvfp4 4over6 16x16": ("nvfp4", {"four_over_six": "mse", "e4m3_max": 256, "block": (16, 16)}),
}
# They differ from a variant above only in the formula of the scale.
ONLY_QUANTIZE = {"fp8 128x128 te pow2", "fp8 128x128 deepgemm", "mxfp4 floor", "mxfp4 even", "nvfp4 4over6 mae"}

_POINTERS = {
    torch.uint8: "*u8",
    torch.int16: "*i16",
    torch.int32: "*i32",
    torch.float16: "*fp16",
    torch.float32: "*fp32",
}
ALIGNED = [["tt.divisibility", 16]]


# ---- every launch --------------------------------------------------------------------------------------


def plans(dtype: torch.dtype = torch.bfloat16) -> Iterator[tuple[str, Plan[Any]]]:
    """(name, plan) of everything that can be launched, for tensors without memory."""
    x = torch.empty(SHAPE, dtype=dtype, device="meta")
    for name, (format_name, values) in VARIANTS.items():
        module, options = MODULES[format_name], get_format(format_name).options.parse(values)
        quantize = module.plan_quantize(x, options)
        yield f"{name}: quantize", quantize
        if name in ONLY_QUANTIZE:
            continue
        yield f"{name}: quantize the transpose", module.plan_quantize(x.mT, options)
        yield f"{name}: fake_quantize", module.plan_fake_quantize(x, options)
        yield f"{name}: dequantize", module.plan_dequantize(quantize.result, options, dtype)
    options = get_format("nvfp4").options()
    yield "nvfp4: amax of two partners", nvfp4.plan_global_amax(x, options, x.clone())
    yield "swizzle", swizzle.plan_swizzle(torch.empty((SHAPE[0], SHAPE[1] // 16), dtype=torch.uint8, device="meta"))


# ---- compiling -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Compiled:
    """What came out: the code, and what it needs for one thread (registers, spills) and for one program (shared)."""

    ptx: str
    cubin: bytes
    registers: int
    spill_bytes: int
    shared_bytes: int


def compile_ahead(launch: Launch, target: int) -> Compiled:
    """Compile for compute capability `target` (90 is 9.0) with the arguments specialised as a launch does."""
    kernel = launch.kernel
    constants = launch.constants | ({"TARGET": target} if "TARGET" in kernel.arg_names else {})
    signature: dict[str, str] = {}
    attributes: dict[tuple[int, ...], list[list[Any]]] = {}
    for position, name in enumerate(kernel.arg_names):
        value = launch.arguments.get(name)
        if isinstance(value, torch.Tensor):
            signature[name] = _POINTERS[value.dtype]
            attributes[(position,)] = ALIGNED
        elif name in constants or value == 1:
            signature[name] = "constexpr"
            constants.setdefault(name, value)
        else:
            signature[name] = "i32" if abs(value) < 2**31 else "i64"
            if value % 16 == 0:
                attributes[(position,)] = ALIGNED
    made = triton.compile(
        ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attributes),
        target=GPUTarget("cuda", target, 32),
        options={"num_warps": launch.warps, "enable_fp_fusion": False},
    )
    return Compiled(made.asm["ptx"], made.asm["cubin"], *_usage(made.asm["cubin"]), int(made.metadata.shared))


def _usage(cubin: bytes) -> tuple[int, int]:
    """(registers, bytes of stack) of a thread; no kernel here has an array, so all of a stack is spilled registers."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", said)
    assert found is not None, said
    return int(found[1]), int(found[2])


# ---- the table -----------------------------------------------------------------------------------------


def table(targets: tuple[int, ...]) -> str:
    """One row a kernel: threads a program, shared bytes, and registers for each target."""
    head = ["kernel", "tile", "threads", "shared bytes", *(f"registers sm_{target}" for target in targets)]
    lines = [" | ".join(["", *head, ""]).strip(), "|" + "---|" * len(head)]
    spilled = 0
    for name, plan in plans():
        launch = plan.launches[-1]
        made = [compile_ahead(launch, target) for target in targets]
        spilled += sum(kernel.spill_bytes for kernel in made)
        tile = f"{launch.constants.get('ROWS', 128)}x{launch.constants['COLUMNS']}"
        shared = sorted({kernel.shared_bytes for kernel in made})
        row = [name, tile, str(32 * launch.warps), "-".join(map(str, shared[:: max(len(shared) - 1, 1)]))]
        lines.append(" | ".join(["", *row, *(str(kernel.registers) for kernel in made), ""]).strip())
    versions = f"triton {triton.__version__}, ptxas {get_ptxas(90).version} and {get_ptxas(100).version}"
    return "\n".join([*lines, "", f"Bytes spilled by all of them together: {spilled}. {versions}."])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", type=int, action="append", help="compute capability times ten; all if left out")
    parser.add_argument("--write", action="store_true", help="put the table into docs/benchmarks.md")
    arguments = parser.parse_args()
    text = table(tuple(arguments.target or TARGETS))
    if not arguments.write:
        print(text)
        return 0
    page = PAGE.read_text()
    before, rest = page.split(BEGIN)
    _, after = rest.split(END)
    PAGE.write_text(f"{before}{BEGIN}\n{text}\n{END}{after}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
