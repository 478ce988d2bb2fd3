"""int4_group: symmetric INT4 codes, one BF16 scale for a group of elements of a row.

    rule      scale                codes      who
    amax7     bf16(fl(A / 7))      [-7, 7]    scale of slime, miles and Megatron-Bridge; see below for codes
    amax7.5   bf16(fl(A / 7.5))    [-8, 7]    compressed-tensors

The scale is rounded to its storage dtype before the codes are computed: what is trained is what is served. Those
trainers divide by the float32 scale and then store it rounded: on bfloat16 weights about 0.3 % of their codes differ
from ours, and the value they train with from the value that is served. They also keep scales above 1e-5 (Bridge 1e-10).
Packed as compressed-tensors' `pack-quantized`: eight codes an int32, the first in the low nibble, each + 8.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from ..errors import FormatError
from . import numerics as nm
from .base import Array, ArraySpec, Format, Layout, Options, Quantized, Shape, check_input, check_shape

NAME = "int4_group"
GROUPS = (32, 128)
CODES_PER_WORD = 8


class Rule(enum.StrEnum):
    """What the group's amax is divided by."""

    AMAX7 = "amax7"
    AMAX7_5 = "amax7.5"


@dataclass(frozen=True, kw_only=True)
class Int4GroupOptions(Options):
    """`group`: elements that share a scale; `rule`: what the amax is divided by, and the range of the codes."""

    format: ClassVar[str] = NAME
    group: int = 32
    rule: Rule = Rule.AMAX7

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.group not in GROUPS:
            raise FormatError(f"{NAME}: group cannot be {self.group} (known: 32, 128)")

    @property
    def column_alignment(self) -> int:
        """A cut along K keeps whole blocks together."""
        return self.group


def layout(shape: Shape, options: Int4GroupOptions) -> Layout:
    """qdata [.., M, K/8] int32; scale [.., M, K/group] bfloat16. K is a multiple of the group."""
    check_shape(NAME, shape, columns=options.group)
    *rows, k = shape
    return Layout(
        ArraySpec((*rows, k // CODES_PER_WORD), np.dtype(np.int32)),
        ArraySpec((*rows, k // options.group), nm.BFLOAT16),
        None,
    )


@np.errstate(all="ignore")
def quantize(x: Array, options: Int4GroupOptions, amax: Array | None = None) -> Quantized:
    """[.., M, K] -> int32 of eight nibbles [.., M, K/8] and bfloat16 [.., M, K/group].

    code = RNE(fl(x / scale)) with the stored scale, clamped. A group whose stored scale is 0 has scale 1 and
    codes 0. NaN is ignored by the amax and has code 0; a group with Inf has the largest finite scale, and Inf
    saturates.
    """
    check_input(NAME, x)
    layout(x.shape, options)
    del amax  # no global scale
    block = (1, options.group)
    seven = options.rule is Rule.AMAX7
    divisor = np.float32(nm.INT4_MAX) if seven else np.float32(nm.INT4_MAX + 0.5)
    ideal = np.minimum(nm.block_amax(x, block) / divisor, nm.finite_max(nm.BFLOAT16))
    scale = ideal.astype(nm.BFLOAT16)
    # A group so small that its scale is 0 has only codes 0 under a scale of 1, too.
    scale = np.where(scale == 0, nm.BFLOAT16.type(1.0), scale)
    quotient = x.astype(np.float32) / nm.spread(scale.astype(np.float32), block, x.shape)
    lowest = -nm.INT4_MAX if seven else nm.INT4_MIN
    code = np.clip(np.rint(quotient), lowest, nm.INT4_MAX)
    code = np.where(np.isnan(code), 0, code)
    stored = (code + nm.INT4_OFFSET).astype(np.uint8)
    return Quantized(nm.pack_nibbles(stored).view("<i4"), scale, None)


@np.errstate(all="ignore")
def dequantize(quantized: Quantized, options: Int4GroupOptions, dtype: Any) -> Array:
    """fl(q * scale) in float32, then one rounding to `dtype`: [.., M, K]."""
    q = codes(quantized.qdata).astype(np.float32) - nm.INT4_OFFSET
    return (q * nm.spread(quantized.scale.astype(np.float32), (1, options.group), q.shape)).astype(dtype)


def codes(qdata: Array) -> nm.U8:
    """One nibble an element, code + 8: [.., M, K]."""
    return nm.unpack_nibbles(np.ascontiguousarray(qdata, dtype="<i4").view(np.uint8))


def describe(options: Int4GroupOptions) -> dict[str, Any]:
    """Every rule that decides a bit."""
    seven = options.rule is Rule.AMAX7
    return {
        "element": {
            "codec": "int4, symmetric, two's complement + 8",
            "range": [-nm.INT4_MAX if seven else nm.INT4_MIN, nm.INT4_MAX],
            "ties": "even",
            "overflow": "clamp",
            "nan": "0",
            "signed_zero": "dropped",
        },
        "block_shape": [1, options.group],
        "ragged_edge": "refused: K must be a multiple of the group",
        "amax": "float32, exact, of the input's own dtype",
        "amax_floor": 0.0,
        "zero_block": "scale 1, codes 0; also where the stored scale underflows to 0",
        "scale_codec": "bfloat16, nearest even, rounded before the codes are computed",
        "scale": f"bf16(fl(A / {'7' if seven else '7.5'}))",
        "encode": "round to nearest even of fl(x / scale)",
        "nonfinite_amax": "NaN ignored, Inf gives the largest finite bfloat16",
        "packing": "eight codes an int32, the first in the low nibble",
        "decode": "fl(q * scale), then one rounding to the result's dtype",
        "source": "miles, slime: INT4 quantization-aware training, with the stored scale"
        if seven
        else "compressed-tensors: quantization/utils/helpers.py",
    }


FORMAT = Format(
    name=NAME,
    options=Int4GroupOptions,
    quantize=quantize,
    dequantize=dequantize,
    codes=codes,
    layout=layout,
    describe=describe,
)
