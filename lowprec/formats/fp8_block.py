"""fp8_block: E4M3 elements, one FP32 scale a block, 128x128 for weights and 1x128 for activations.

One name, three rules in use. They differ in the last bit of the scale, and in 1e-4 of the codes:

    rule       encode (multiplier of x)   stored scale (decode)   amax floor   zero block
    te         448 / A                    1 / (448 / A)           none         scale 1
    deepgemm   1 / (A / 448)              A / 448                 1e-4         scale 1e-4 / 448
    deepseek   x is divided by the scale  A / 448                 1e-4         scale 1e-4 / 448

`scale="pow2"` makes the scale a power of two, rounded up, so it is also exact as an E8M0 byte (Blackwell).

Agrees with TransformerEngine (common/recipe/recipe_common.cuh, common/transpose/quantize_transpose_*_blockwise.cu),
DeepGEMM (deep_gemm/utils/math.py) and the formulas of DeepSeek-V3 (inference/kernel.py) under IEEE division: Triton
compiles that file's `/` to an approximate divide, so a GPU may differ there in the last bit.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from . import numerics as nm
from .base import Array, ArraySpec, Format, Layout, Options, Quantized, Shape, check_input, check_shape

NAME = "fp8_block"


class Rule(enum.StrEnum):
    """Whose formula."""

    TE = "te"
    DEEPGEMM = "deepgemm"
    DEEPSEEK = "deepseek"


class Scale(enum.StrEnum):
    """Which values a scale can have."""

    FP32 = "fp32"
    POW2 = "pow2"


@dataclass(frozen=True, kw_only=True)
class Fp8BlockOptions(Options):
    """`block` is (rows, columns) of a block; blocks at the edges may be ragged in either direction."""

    format: ClassVar[str] = NAME
    rule: Rule = Rule.TE
    scale: Scale = Scale.FP32
    block: tuple[int, int] = (128, 128)

    @property
    def row_alignment(self) -> int:
        """A cut along M keeps whole blocks together."""
        return self.block[0]

    @property
    def column_alignment(self) -> int:
        """A cut along K keeps whole blocks together."""
        return self.block[1]


def layout(shape: Shape, options: Fp8BlockOptions) -> Layout:
    """qdata [.., M, K] E4M3; scale [.., ceil(M/bm), ceil(K/bk)] float32."""
    check_shape(NAME, shape)
    scale_shape = nm.block_counts(shape, options.block)
    return Layout(ArraySpec(shape, nm.FLOAT8_E4M3FN), ArraySpec(scale_shape, nm.FLOAT32), None)


def _te_scales(amax: nm.F32, options: Fp8BlockOptions, dtype: np.dtype[Any]) -> tuple[nm.F32, nm.F32]:
    """(encode, decode) a block."""
    encode = nm.E4M3_MAX / amax
    # 448 / A overflows for A < 1.3165538e-36; TE then takes the largest value of the input's dtype.
    encode = np.where(np.isinf(encode), nm.finite_max(dtype), encode)
    if options.scale is Scale.POW2:
        encode = nm.floor_power_of_two(encode)  # the encode scale down, hence the decode scale up
    encode = np.where((amax == 0) | ~np.isfinite(amax), np.float32(1.0), encode)
    return encode, np.float32(1.0) / encode


def _floored_scale(amax: nm.F32, options: Fp8BlockOptions) -> nm.F32:
    """The decode scale of DeepGEMM and DeepSeek; NaN stays NaN with FP32 scales."""
    scale = np.maximum(amax, nm.DEEPGEMM_AMAX_FLOOR)
    scale /= nm.E4M3_MAX
    return nm.ceil_power_of_two(scale) if options.scale is Scale.POW2 else scale


@np.errstate(all="ignore")
def quantize(x: Array, options: Fp8BlockOptions, amax: Array | None = None) -> Quantized:
    """[.., M, K] -> E4M3 [.., M, K] and float32 [.., ceil(M/bm), ceil(K/bk)], the decode multiplier.

    Finite input gives finite codes and scales. te: NaN is ignored by the amax and has code 0x7F, a block with
    Inf has scale 1 and Inf saturates. deepgemm, deepseek: NaN and Inf reach the block's scale (2^127 in pow2).
    """
    check_input(NAME, x)
    del amax  # no global scale
    x32: Array = x.astype(np.float32)
    block = options.block
    if options.rule is Rule.TE:
        encode, scale = _te_scales(nm.block_amax(x, block), options, x.dtype)
        scaled = x32 * nm.spread(encode, block, x.shape)
    else:
        scale = _floored_scale(nm.block_amax(x, block, nan="propagate"), options)
        if options.rule is Rule.DEEPGEMM:
            scaled = x32 * nm.spread(np.float32(1.0) / scale, block, x.shape)
        else:
            scaled = x32 / nm.spread(scale, block, x.shape)
    return Quantized(nm.encode_e4m3(scaled).view(nm.FLOAT8_E4M3FN), scale, None)


@np.errstate(all="ignore")
def dequantize(quantized: Quantized, options: Fp8BlockOptions, dtype: Any) -> Array:
    """fl(q * scale) in float32, then one rounding to `dtype`: [.., M, K]."""
    q = nm.decode_e4m3(codes(quantized.qdata))
    return (q * nm.spread(quantized.scale, options.block, q.shape)).astype(dtype)


def codes(qdata: Array) -> nm.U8:
    """The E4M3 bytes [.., M, K]."""
    return qdata.view(np.uint8)


def describe(options: Fp8BlockOptions) -> dict[str, Any]:
    """Every rule that decides a bit."""
    te, pow2 = options.rule is Rule.TE, options.scale is Scale.POW2
    encode = {
        Rule.TE: "s = fl(448 / A), cleared to a power of two; x * s" if pow2 else "s = fl(448 / A); x * s",
        Rule.DEEPGEMM: "fl(x * fl(1 / scale))",
        Rule.DEEPSEEK: "fl(x / scale)",
    }
    decode_scale = "fl(1 / s)" if te else "ceil_power_of_two(fl(A / 448))" if pow2 else "fl(A / 448)"
    return {
        "element": nm.E4M3_RULES,
        "block_shape": list(options.block),
        "ragged_edge": "a scale for every started block, missing elements count as zero",
        "amax": "float32, exact, of the input's own dtype",
        "amax_floor": 0.0 if te else 1e-4,
        "zero_block": "scale 1" if te else "scale of the amax floor",
        "scale_codec": "float32, the decode multiplier",
        "scale": decode_scale,
        "scale_overflow": "s = largest finite value of the input's dtype" if te else "cannot happen",
        "encode": encode[options.rule],
        "nonfinite_amax": "NaN ignored, Inf gives scale 1" if te else "reaches the scale (2^127 in pow2)",
        "packing": "one byte an element",
        "decode": "fl(q * scale), then one rounding to the result's dtype",
        "source": {
            Rule.TE: "TransformerEngine: common/recipe/recipe_common.cuh",
            Rule.DEEPGEMM: "DeepGEMM: deep_gemm/utils/math.py",
            Rule.DEEPSEEK: "DeepSeek-V3: inference/kernel.py",
        }[options.rule],
    }


FORMAT = Format(
    name=NAME,
    options=Fp8BlockOptions,
    quantize=quantize,
    dequantize=dequantize,
    codes=codes,
    layout=layout,
    describe=describe,
)
