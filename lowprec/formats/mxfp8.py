"""mxfp8: E4M3 elements, one E8M0 scale for 32 elements of a row, exponent rounded up.

Agrees with TransformerEngine (common/cast/mxfp8/quantize_mxfp8.cuh, common/util/ptx.cuh) and, for finite
input, with torchao's to_mx in RCEIL mode. The OCP MX specification's floor rule is used by no NVIDIA path.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from . import numerics as nm
from .base import Array, ArraySpec, Format, Layout, Options, Quantized, Shape, check_input, check_shape

NAME = "mxfp8"


@dataclass(frozen=True, kw_only=True)
class Mxfp8Options(Options):
    """No choices."""

    format: ClassVar[str] = NAME

    @property
    def column_alignment(self) -> int:
        """A cut along K keeps whole blocks together."""
        return nm.MX_BLOCK


def layout(shape: Shape, options: Mxfp8Options) -> Layout:
    """qdata [.., M, K] E4M3; scale [.., M, K/32], E8M0 bytes. K is a multiple of 32."""
    del options
    check_shape(NAME, shape, columns=nm.MX_BLOCK)
    scale_shape = (*shape[:-1], shape[-1] // nm.MX_BLOCK)
    return Layout(ArraySpec(shape, nm.FLOAT8_E4M3FN), ArraySpec(scale_shape, nm.UINT8), None)


@np.errstate(all="ignore")
def quantize(x: Array, options: Mxfp8Options, amax: Array | None = None) -> Quantized:
    """[.., M, K] -> E4M3 [.., M, K] and E8M0 bytes [.., M, K/32].

    The byte goes up iff A > 448 * 2^k. A zero block has byte 0. NaN is ignored by the amax and has code 0x7F;
    Inf gives byte 254 and code 448.
    """
    check_input(NAME, x)
    layout(x.shape, options)
    del amax  # no global scale
    block = (1, nm.MX_BLOCK)
    scale = nm.encode_e8m0(nm.block_amax(x, block) * nm.RECIPROCAL_OF_448)
    scaled = x.astype(np.float32) * nm.spread(nm.e8m0_multiplier(scale), block, x.shape)
    return Quantized(nm.encode_e4m3(scaled).view(nm.FLOAT8_E4M3FN), scale, None)


@np.errstate(all="ignore")
def dequantize(quantized: Quantized, options: Mxfp8Options, dtype: Any) -> Array:
    """q * 2^(byte - 127), exact in float32 unless it overflows, then one rounding to `dtype`: [.., M, K]."""
    del options
    q = nm.decode_e4m3(codes(quantized.qdata))
    return (q * nm.spread(nm.decode_e8m0(quantized.scale), (1, nm.MX_BLOCK), q.shape)).astype(dtype)


def codes(qdata: Array) -> nm.U8:
    """The E4M3 bytes [.., M, K]."""
    return qdata.view(np.uint8)


def describe(options: Mxfp8Options) -> dict[str, Any]:
    """Every rule that decides a bit."""
    del options
    return {
        "element": nm.E4M3_RULES,
        "block_shape": [1, nm.MX_BLOCK],
        "ragged_edge": "refused: K must be a multiple of 32",
        "amax": "float32, exact, of the input's own dtype",
        "amax_floor": 0.0,
        "zero_block": "byte 0, codes 0 with the element's sign",
        **nm.E8M0_RULES,
        "scale": "encode_e8m0_up(fl(A * fl(1/448)))",
        "encode": "fl(x * 2^(127 - byte))",
        "nonfinite_amax": "NaN ignored, Inf gives byte 254",
        "packing": "one byte an element",
        "decode": "q * 2^(byte - 127), exact, then one rounding to the result's dtype",
        "source": "TransformerEngine: common/cast/mxfp8/quantize_mxfp8.cuh",
    }


FORMAT = Format(
    name=NAME,
    options=Mxfp8Options,
    quantize=quantize,
    dequantize=dequantize,
    codes=codes,
    layout=layout,
    describe=describe,
)
