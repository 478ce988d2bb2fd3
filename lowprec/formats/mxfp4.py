"""mxfp4: E2M1 elements, one E8M0 scale for 32 elements of a row.

Three rules for the exponent are in use. The byte goes up when the block's amax A reaches, for some k,

    rceil   A >  1.5  * 2^k    torchao's RCEIL, TransformerEngine's proposed MXFP4 training; no element saturates
    floor   A >= 2    * 2^k    OCP MX specification 6.3; elements in (6, 8) * 2^k saturate
    even    A >= 1.75 * 2^k    compressed-tensors (quantization/utils/mxfp_utils.py), torchao's EVEN
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from . import numerics as nm
from .base import Array, ArraySpec, Format, Layout, Options, Quantized, Shape, check_input, check_shape

NAME = "mxfp4"


class ScaleRule(enum.StrEnum):
    """How the exponent is chosen."""

    RCEIL = "rceil"
    FLOOR = "floor"
    EVEN = "even"


@dataclass(frozen=True, kw_only=True)
class Mxfp4Options(Options):
    """`scale_rule` says how the exponent is chosen."""

    format: ClassVar[str] = NAME
    scale_rule: ScaleRule = ScaleRule.RCEIL

    @property
    def column_alignment(self) -> int:
        """A cut along K keeps whole blocks together."""
        return nm.MX_BLOCK


def layout(shape: Shape, options: Mxfp4Options) -> Layout:
    """qdata [.., M, K/2] bytes; scale [.., M, K/32], E8M0 bytes. K is a multiple of 32."""
    del options
    check_shape(NAME, shape, columns=nm.MX_BLOCK)
    *rows, k = shape
    return Layout(ArraySpec((*rows, k // 2), nm.UINT8), ArraySpec((*rows, k // nm.MX_BLOCK), nm.UINT8), None)


def _scale_byte(amax: nm.F32, rule: ScaleRule) -> nm.U8:
    """The E8M0 byte of a block; Inf gives 254 under every rule."""
    match rule:
        case ScaleRule.RCEIL:
            return nm.encode_e8m0(amax * nm.RECIPROCAL_OF_6)
        case ScaleRule.FLOOR:
            exponent = nm.biased_exponent(amax)
        case ScaleRule.EVEN:
            exponent = nm.biased_exponent(amax, round_to_mantissa_bits=1)
    byte = np.maximum(exponent - nm.E2M1_EMAX, 0)
    return np.where(np.isinf(amax), nm.E8M0_MAX, byte).astype(np.uint8)


@np.errstate(all="ignore")
def quantize(x: Array, options: Mxfp4Options, amax: Array | None = None) -> Quantized:
    """[.., M, K] -> bytes of two nibbles [.., M, K/2] and E8M0 bytes [.., M, K/32].

    A zero block has byte 0. NaN is ignored by the amax and has code 0x7; Inf gives byte 254 and code 6.
    """
    check_input(NAME, x)
    layout(x.shape, options)
    del amax  # no global scale
    block = (1, nm.MX_BLOCK)
    scale = _scale_byte(nm.block_amax(x, block), options.scale_rule)
    scaled = x.astype(np.float32) * nm.spread(nm.e8m0_multiplier(scale), block, x.shape)
    return Quantized(nm.pack_nibbles(nm.encode_e2m1(scaled)), scale, None)


@np.errstate(all="ignore")
def dequantize(quantized: Quantized, options: Mxfp4Options, dtype: Any) -> Array:
    """q * 2^(byte - 127), exact in float32 unless it overflows, then one rounding to `dtype`: [.., M, K]."""
    del options
    q = nm.decode_e2m1_packed(quantized.qdata)
    return (q * nm.spread(nm.decode_e8m0(quantized.scale), (1, nm.MX_BLOCK), q.shape)).astype(dtype)


def codes(qdata: Array) -> nm.U8:
    """One nibble an element: [.., M, K]."""
    return nm.unpack_nibbles(qdata)


def describe(options: Mxfp4Options) -> dict[str, Any]:
    """Every rule that decides a bit."""
    scale, source = {
        ScaleRule.RCEIL: ("encode_e8m0_up(fl(A * fl(1/6)))", "torchao: mx_formats to_mx, RCEIL"),
        ScaleRule.FLOOR: ("max(0, floor(log2 A) - 2 + 127)", "OCP MX specification 1.0, section 6.3"),
        ScaleRule.EVEN: (
            "max(0, floor(log2 of A rounded to one mantissa bit, ties away) - 2 + 127)",
            "compressed-tensors: quantization/utils/mxfp_utils.py",
        ),
    }[options.scale_rule]
    return {
        "element": nm.E2M1_RULES,
        "block_shape": [1, nm.MX_BLOCK],
        "ragged_edge": "refused: K must be a multiple of 32",
        "amax": "float32, exact, of the input's own dtype",
        "amax_floor": 0.0,
        "zero_block": "byte 0, codes 0 with the element's sign",
        **nm.E8M0_RULES,
        "scale": scale,
        "encode": "fl(x * 2^(127 - byte))",
        "nonfinite_amax": "NaN ignored, Inf gives byte 254",
        "packing": nm.NIBBLE_PACKING,
        "decode": "q * 2^(byte - 127), exact, then one rounding to the result's dtype",
        "source": source,
    }


FORMAT = Format(
    name=NAME,
    options=Mxfp4Options,
    quantize=quantize,
    dequantize=dequantize,
    codes=codes,
    layout=layout,
    describe=describe,
)
