"""The Triton kernels compiled ahead of time for four generations of GPU, without one.

What the interpreter cannot show: that every kernel compiles down to machine code, with the instructions that the
numerics rely on and none that would change a bit.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")

import torch
import triton
import triton.language as tl
import triton_report
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton_report import TARGETS, Compiled, compile_ahead, plans

from lowprec.kernels.triton import casts
from lowprec.kernels.triton.launch import Launch

ROOT = Path(__file__).parents[2]
KERNELS: dict[str, Any] = {name: plan.launches for name, plan in plans()}

E4M3 = "cvt.rn.satfinite.e4m3x2.f32"
E2M1 = "cvt.rn.satfinite.e2m1x2.f32"
E8M0 = "cvt.rp.satfinite.ue8m0x2.f32"
FIRST_WITH = {E4M3: 90, E2M1: 100, E8M0: 100}
# What each format's quantize needs where the hardware has it.
NEEDS = {"fp8": {E4M3}, "mxfp8": {E4M3, E8M0}, "mxfp4 rceil": {E2M1, E8M0}, "mxfp4": {E2M1}, "nvfp4": {E4M3, E2M1}}
# Approximate or contracted arithmetic, and instructions that flush subnormals.
FORBIDDEN = re.compile(r"\b(div\.full|div\.approx|rcp\.approx|fma|mad\.f32|ex2|lg2|\w+[.\w]*\.ftz)[.\w]*")


@pytest.fixture(scope="module", autouse=True)
def empty_cache(tmp_path_factory) -> Any:
    """An empty cache, so that what is tested is what is compiled now."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_CACHE_DIR", str(tmp_path_factory.mktemp("triton")))
        yield


def compiled(name: str, target: int, position: int = -1) -> Compiled:
    return compile_ahead(KERNELS[name][position], target)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", KERNELS)
def test_compiles_to_machine_code_without_spilling(name, target) -> None:
    kernel = compiled(name, target)
    assert kernel.cubin.startswith(b"\x7fELF")
    assert f".target sm_{target}" in kernel.ptx
    assert kernel.spill_bytes == 0
    assert not FORBIDDEN.search(kernel.ptx), FORBIDDEN.search(kernel.ptx)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", [name for name in KERNELS if name.endswith(": quantize")])
def test_casts_use_the_hardware_where_it_has_them(name, target) -> None:
    ptx = compiled(name, target).ptx
    needs = next(NEEDS[prefix] for prefix in sorted(NEEDS, key=len, reverse=True) if name.startswith(prefix))
    for instruction, first in FIRST_WITH.items():
        assert (instruction in ptx) == (instruction in needs and target >= first), instruction
    # What is left is arithmetic: the interpreter's tests are tests of it.
    assert "e4m3" not in ptx or target >= 89


@pytest.mark.parametrize("name", ["fp8 128x128 te", "nvfp4 tensor", "nvfp4 4over6 mse"])
def test_quotients_are_correctly_rounded(name) -> None:
    assert "div.rn.f32" in compiled(f"{name}: quantize", 90).ptx


def test_the_error_sum_of_four_over_six_is_in_order() -> None:
    """A chain of 16 adds, or 15 where the first is to zero, for each candidate: each takes the result before it."""
    ptx = compiled("nvfp4 4over6 mae: quantize", 90).ptx
    length: dict[str, int] = {}
    for result, *operands in re.findall(r"add(?:\.rn)?\.f32\s+(%\w+), (\w+|%\w+), (\w+|%\w+);", ptx):
        length[result] = 1 + max(length.get(operand, 0) for operand in operands)
    assert set(sorted(length.values())[-2:]) <= {15, 16}


@triton.jit
def _cast_kernel(x_ptr, code_ptr, N: tl.constexpr, E2M1: tl.constexpr, TARGET: tl.constexpr) -> None:
    x = tl.load(x_ptr + tl.arange(0, N))
    if E2M1:
        pairs = casts.pack_e2m1(tl.reshape(x, (N // 32, 32)), TARGET)
        tl.store(code_ptr + tl.arange(0, N // 2), tl.reshape(pairs, (N // 2,)))
    else:
        tl.store(code_ptr + tl.arange(0, N), casts.encode_e4m3(x, TARGET))


@pytest.mark.parametrize("e2m1", [False, True], ids=["e4m3", "e2m1"])
def test_operands_of_the_hardware_casts_are_in_order(e2m1) -> None:
    """PTX puts the first operand into the high half, so it must be the odd element of a pair."""
    launch = Launch(
        kernel=_cast_kernel,
        programs=1,
        arguments={"x_ptr": torch.empty(1), "code_ptr": torch.empty(1, dtype=torch.uint8)},
        constants={"N": 1024, "E2M1": e2m1},
        warps=1,
    )
    ptx = compile_ahead(launch, 100).ptx
    element = {}
    for registers in re.findall(r"ld\.global\.v4\.b32 \{([^}]*)\}", ptx):
        for register in registers.replace(" ", "").split(","):
            element[register] = len(element)
    pairs = re.findall(rf"{E2M1 if e2m1 else E4M3} \w+, (%\w+), (%\w+);", ptx)
    assert [(element[high], element[low]) for high, low in pairs] == [(i + 1, i) for i in range(0, 32, 2)]
    order = "first, second, third, fourth" if e2m1 else "low, high"
    assert ptx.count(f"{{{order}}}") == len(pairs) // (4 if e2m1 else 2)


class GpuThatOnlyCompiles:
    """What Triton asks a driver before it compiles."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return device


@pytest.mark.parametrize("name", ["fp8 1x128 te: quantize", "mxfp4 rceil: dequantize", "nvfp4 row: fake_quantize"])
def test_a_launch_compiles_the_same_code(name) -> None:
    """Names, order and specialisation of the arguments as `Launch.run` gives them; all but the launch itself."""
    driver.set_active(GpuThatOnlyCompiles())
    try:
        for launch in KERNELS[name]:
            arguments = {
                key: torch.empty(64, dtype=value.dtype) if isinstance(value, torch.Tensor) else value
                for key, value in launch.arguments.items()
            }
            constants = launch.constants | ({"TARGET": 90} if "TARGET" in launch.kernel.arg_names else {})
            made = launch.kernel.warmup(
                **arguments, **constants, num_warps=launch.warps, enable_fp_fusion=False, grid=(launch.programs,)
            )
            assert made.asm["ptx"] == compile_ahead(launch, 90).ptx
    finally:
        driver.set_active(None)


@pytest.mark.parametrize("name", ["fp8 128x128 te", "mxfp8", "mxfp4 rceil", "nvfp4 tensor", "nvfp4 4over6 mse"])
def test_loads_and_stores_are_wide(name) -> None:
    """16 bytes a thread where the tensor is contiguous, also when it is read along its rows."""
    for what in ("quantize", "quantize the transpose"):
        assert "ld.global.v4.b32" in compiled(f"{name}: {what}", 90).ptx, what
    assert re.search(r"st\.global\.v[24]\.b32", compiled(f"{name}: quantize", 90).ptx)
    assert "st.global.v4.b32" in compiled(f"{name}: dequantize", 90).ptx


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("name", ["fp8 128x128 te: quantize", "mxfp4 rceil: fake_quantize", "nvfp4 row: dequantize"])
def test_other_input_dtypes_compile(name, dtype) -> None:
    launches = {name: plan.launches for name, plan in plans(dtype)}[name]
    assert compile_ahead(launches[-1], 90).spill_bytes == 0


def test_the_report_is_what_the_page_holds() -> None:
    page = triton_report.PAGE.read_text()
    assert triton_report.BEGIN in page
    for name in KERNELS:
        assert f"| {name} |" in page, f"run tools/triton_report.py --write: {name} is not in {triton_report.PAGE.name}"


# ---- the folder that is called triton ------------------------------------------------------------------


def run_python(code: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], cwd=cwd, capture_output=True, text=True, env={**os.environ})


def test_the_folder_hides_nothing() -> None:
    """kernels/triton must not be taken for the package, not even where its parent is on sys.path."""
    assert not (ROOT / "kernels" / "triton" / "__init__.py").exists()
    code = "import triton, torch._dynamo; assert triton.jit, triton.__path__"
    for cwd in (ROOT, ROOT / "kernels", ROOT / "lowprec"):
        done = run_python(code, cwd)
        assert done.returncode == 0, done.stderr


def test_nothing_here_put_it_on_the_path() -> None:
    folders = {str(ROOT / "kernels"), str(ROOT / "lowprec" / "kernels"), str(ROOT / "lowprec")}
    assert not folders & set(sys.path)


def test_quantizing_on_the_cpu_does_not_import_triton() -> None:
    code = (
        "import sys, numpy, lowprec; lowprec.quantize(numpy.ones((32, 32), 'f4'), 'mxfp8');"
        "assert not {'triton', 'torch'} & set(sys.modules)"
    )
    done = run_python(code, ROOT)
    assert done.returncode == 0, done.stderr
