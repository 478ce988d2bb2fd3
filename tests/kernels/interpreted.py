"""Run the Triton kernels on numpy arrays and compare every byte.

In a worker process whose TRITON_INTERPRET is 1 they are interpreted: that is chosen when a kernel's file is imported,
for the whole process. In a process without it they run on the GPU.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from bitwise import Array, assert_same_bits
from hostile import Kernel, assert_same_values, load, plain

from lowprec.formats import numerics as nm
from lowprec.kernels.triton import casts, nvfp4
from lowprec.kernels.triton.launch import target_of
from lowprec.kernels.triton.swizzle import swizzle
from lowprec.qtensor import like, to_numpy


def kernel_and_options(variant: tuple[str, dict[str, Any]]) -> tuple[Kernel, Any]:
    kernel = load("triton", variant[0])
    return kernel, kernel.format.options.parse(variant[1])


def tensor(x: Array) -> torch.Tensor:
    """A torch tensor of the same bits, where the kernels run."""
    return like(x, torch.empty(0, device="cpu" if is_interpreted() else "cuda"))


def is_interpreted() -> bool:
    return bool(triton.knobs.runtime.interpret)


def compare(variant: tuple[str, dict[str, Any]], x: Array, amax: Array | None = None) -> int:
    """What is stored, and values in the dtype of `x`, decoded and fake-quantized. Returns the bytes compared."""
    kernel, options = kernel_and_options(variant)
    compared = compare_bytes(variant, x, amax)
    want = kernel.format.quantize(x, options, amax)
    compared += assert_same_values(kernel, want, options, x.dtype)
    values = kernel.format.dequantize(want, options, x.dtype)
    got = kernel.fake_quantize(x, options, amax)
    assert_same_bits(*plain(kernel, got, values), x, "fake-quantized values")
    return compared + values.nbytes


def compare_bytes(variant: tuple[str, dict[str, Any]], x: Array, amax: Array | None = None) -> int:
    """Only what is stored: qdata, scale, global scale."""
    kernel, options = kernel_and_options(variant)
    want, got = kernel.format.quantize(x, options, amax), kernel.quantize(x, options, amax)
    for ours, theirs, what in zip(got, want, want._fields, strict=True):
        if theirs is None:
            assert ours is None
        else:
            assert_same_bits(ours, np.asarray(theirs), None, what)
    return sum(array.nbytes for array in want if array is not None)


def compare_views(variant: tuple[str, dict[str, Any]], x: Array) -> None:
    """Views of a tensor [E, M, K] that are not contiguous, the transpose among them, as their copies."""
    kernel, options = kernel_and_options(variant)
    whole = tensor(x)
    views = {
        "transpose": whole.mT,
        "columns": whole[..., 16:-16],
        "every second column": whole[..., ::2],
        "rows": whole[:, 16:],
        "one matrix many times": whole[:1].expand(3, -1, -1),
        "matrix": whole[1].T,
        "four dimensions": whole.reshape(1, *whole.shape).mT,
    }
    for name, view in views.items():
        copy = to_numpy(view.contiguous())
        want, got = kernel.format.quantize(copy, options, None), kernel.module.quantize(view, options)
        assert_same_bits(to_numpy(got.scale), want.scale, None, f"{name}: scale")
        assert_same_bits(to_numpy(got.qdata), want.qdata, None, f"{name}: qdata")
        fake = to_numpy(kernel.module.fake_quantize(view, options))
        assert_same_bits(fake, kernel.format.dequantize(want, options, x.dtype), copy, f"{name}: fake")


def partner_amax(x: Array, partner: Array, options: dict[str, Any]) -> Array:
    kernel, parsed = kernel_and_options(("nvfp4", options))
    assert_same_bits(
        to_numpy(nvfp4.global_amax(tensor(x), parsed)), np.asarray(kernel.format.global_amax(x, parsed)), None, "amax"
    )
    return to_numpy(nvfp4.global_amax(tensor(x), parsed, tensor(partner)))


def swizzled(scale: Array) -> Array:
    return to_numpy(swizzle(tensor(scale)))


def error_of(function: str, variant: tuple[str, dict[str, Any]], x: torch.Tensor) -> str:
    """The message of what the call raises; empty if it raises nothing."""
    kernel, options = kernel_and_options(variant)
    try:
        getattr(kernel.module, function)(x if is_interpreted() else x.cuda(), options)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


# ---- casts, alone --------------------------------------------------------------------------------------


@triton.jit
def _cast_kernel(
    x_ptr, code_ptr, value_ptr, half_ptr, WHICH: tl.constexpr, N: tl.constexpr, TARGET: tl.constexpr
) -> None:
    at = tl.program_id(0) * N + tl.arange(0, N)
    total = tl.num_programs(0) * N
    x = tl.load(x_ptr + at)
    if WHICH == 0:
        code, rounded = casts.encode_e4m3(x, TARGET), casts.round_e4m3(x)
        value = casts.decode_e4m3(code)
    elif WHICH == 1:
        code, rounded = casts.encode_e2m1_pairs(x, tl.zeros_like(x), TARGET), casts.round_e2m1(x)
        value = casts.decode_e2m1(code)
    else:
        code = casts.encode_e8m0(tl.where(x == x, tl.abs(x), 0.0), TARGET).to(tl.uint8)
        value, rounded = casts.decode_e8m0(code), casts.e8m0_multiplier(code)
    tl.store(code_ptr + at, code)
    tl.store(value_ptr + at, value)
    tl.store(value_ptr + total + at, rounded)
    tl.store(half_ptr + at, casts.from_float32(x, tl.int16, TARGET))


def run_casts(x: Array, which: int) -> tuple[Array, Array, Array, Array]:
    """(code, decoded code, rounded, bfloat16 bits) of float32 values; x has a power of two of them."""
    given, n = tensor(x), 1 << 14 if not is_interpreted() else x.size
    code = torch.empty(x.size, dtype=torch.uint8, device=given.device)
    value, half = torch.empty(2, x.size, device=given.device), torch.empty_like(given, dtype=torch.int16)
    target = target_of(given.device)
    _cast_kernel[(x.size // n,)](
        given, code, value, half, WHICH=which, N=n, TARGET=target, num_warps=8, enable_fp_fusion=False
    )
    return to_numpy(code), *to_numpy(value), to_numpy(half.view(torch.bfloat16))


def compare_casts() -> int:
    """Every bfloat16 pattern, its float32 neighbours and what lies between two of them; returns how many."""
    high = np.arange(1 << 16, dtype=np.uint32) << np.uint32(16)
    x = np.concatenate([high, high + np.uint32(1), high - np.uint32(1), high + np.uint32(0x8000)]).view(np.float32)
    nan = np.isnan(x)
    for which, (encode, decode) in enumerate([(nm.encode_e4m3, nm.decode_e4m3), (nm.encode_e2m1, nm.decode_e2m1)]):
        code, value, rounded, half = run_casts(x, which)
        assert_same_bits(code, encode(x), x, "code")
        for got in (value, rounded):
            want = decode(encode(x))
            assert_same_bits(np.where(np.isnan(want), np.float32(0), got), np.nan_to_num(want), x, "value")
        assert_same_bits(np.where(nan, half.dtype.type(0), half), np.where(nan, 0, x).astype(half.dtype), x, "bfloat16")
        assert np.isnan(half[nan].astype(np.float32)).all()
    a = np.where(nan, np.float32(0), np.abs(x))
    code, value, multiplier, _ = run_casts(x, 2)
    assert_same_bits(code, nm.encode_e8m0(a), a, "E8M0 byte")
    assert_same_bits(value, nm.decode_e8m0(code), a, "E8M0 value")
    assert_same_bits(multiplier, nm.e8m0_multiplier(code), a, "E8M0 multiplier")
    return x.size
