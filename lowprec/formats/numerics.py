"""Element codecs, scale codecs, block amax and nibble packing: the only home of 448, 6 and 127.

Every function does one IEEE float32 rounding to nearest even an operation, in the written order, and keeps
subnormals. Casts behave as NVIDIA's `cvt` instructions with `.satfinite` (CUDA's cuda_fp8.hpp and
cuda_fp4.hpp emulate them on a host), which is not what numpy, ml_dtypes or torch do for Inf and NaN.

Shapes: codecs work element by element on any shape. M rows, K columns, G blocks along K.
"""

from __future__ import annotations

from typing import Any, Literal

import ml_dtypes
import numpy as np
import numpy.typing as npt

from .base import Array, Shape

F32 = npt.NDArray[np.float32]
U8 = npt.NDArray[np.uint8]

BFLOAT16: np.dtype[Any] = np.dtype(ml_dtypes.bfloat16)
FLOAT8_E4M3FN: np.dtype[Any] = np.dtype(ml_dtypes.float8_e4m3fn)
FLOAT32: np.dtype[Any] = np.dtype(np.float32)
UINT8: np.dtype[Any] = np.dtype(np.uint8)

FLT_MAX = np.float32(np.finfo(np.float32).max)
E4M3_MAX = np.float32(448.0)
E4M3_NAN = np.uint8(0x7F)
E2M1_MAX = np.float32(6.0)
E2M1_NAN = np.uint8(0x7)  # E2M1 has no NaN: the hardware gives +6
E2M1_EMAX = 2  # floor(log2(6))
E8M0_BIAS = 127
E8M0_MAX = 254  # 255 is NaN
RECIPROCAL_OF_6 = np.float32(1.0) / E2M1_MAX  # 0x3e2aaaab
RECIPROCAL_OF_448 = np.float32(1.0) / E4M3_MAX  # 0x3b124925
INT4_MIN, INT4_MAX, INT4_OFFSET = -8, 7, 8

DEEPGEMM_AMAX_FLOOR = np.float32(1e-4)

MX_BLOCK = 32
NVFP4_BLOCK = 16
NVFP4_E4M3_MAXIMA = (256, 448)
FOUR_OVER_SIX = np.float32(1.5)  # the ratio of a map-to-4 scale to the map-to-6 one

_EXPONENT_MASK = np.uint32(0xFF800000)
_MANTISSA_MASK = np.uint32(0x007FFFFF)
_MANTISSA_BITS = np.uint32(23)

# The rules above as fields of a contract; see Format.describe.
E4M3_RULES = {
    "codec": "e4m3fn",
    "ties": "even",
    "overflow": "saturate to 448, Inf too",
    "nan": "0x7F",
    "signed_zero": "kept",
}
E2M1_RULES = {
    "codec": "e2m1",
    "ties": "even",
    "overflow": "saturate to 6, Inf too",
    "nan": "0x7 (+6)",
    "signed_zero": "kept",
}
E8M0_RULES = {
    "scale_codec": "e8m0: 2^(byte - 127), 0xFF is NaN and never written for finite input",
    "scale_underflow": "byte 0, multiplier 2^127",
    "scale_overflow": "byte 254",
}
NIBBLE_PACKING = "two nibbles a byte, even element low"


# ---- element codecs ------------------------------------------------------------------------------------


def _magnitudes(exponent_bits: int, mantissa_bits: int, count: int) -> npt.NDArray[np.float64]:
    """The values of the codes 0 .. count-1 of a sign-less minifloat with subnormals and bias 2^(e-1) - 1."""
    code = np.arange(count)
    exponent, mantissa = code >> mantissa_bits, code & ((1 << mantissa_bits) - 1)
    hidden = np.where(exponent > 0, 1 << mantissa_bits, 0)
    bias = (1 << (exponent_bits - 1)) - 1
    values: npt.NDArray[np.float64] = np.ldexp(hidden + mantissa, np.maximum(exponent, 1) - bias - mantissa_bits)
    return values


def _encode_table(values: npt.NDArray[np.float64], sign_bit: int, nan_code: np.uint8) -> U8:
    """The code of every bfloat16 bit pattern: nearest value, ties to the even code, overflow to the largest.

    See `_encode` for why bfloat16 patterns are enough.
    """
    bits = np.arange(1 << 16, dtype=np.uint32)
    with np.errstate(invalid="ignore"):  # signalling NaNs are among the patterns
        x = (bits << np.uint32(16)).view(np.float32).astype(np.float64)
    midpoints = (values[:-1] + values[1:]) / 2
    below = np.searchsorted(midpoints, np.abs(x), side="left")
    above = np.searchsorted(midpoints, np.abs(x), side="right")  # one more than `below` exactly at a tie
    code = np.where(below % 2 == 0, below, above) | np.where(np.signbit(x), sign_bit, 0)
    return np.where(np.isnan(x), nan_code, code).astype(np.uint8)


_E4M3_VALUES = _magnitudes(4, 3, 127)  # 0x7F is NaN
_E2M1_VALUES = _magnitudes(2, 1, 8)
_E4M3_CODE = _encode_table(_E4M3_VALUES, 0x80, E4M3_NAN)
_E2M1_CODE = _encode_table(_E2M1_VALUES, 0x8, E2M1_NAN)
_E4M3_VALUE = np.concatenate([_E4M3_VALUES, [np.nan], -_E4M3_VALUES, [np.nan]]).astype(np.float32)
_E2M1_VALUE = np.concatenate([_E2M1_VALUES, -_E2M1_VALUES]).astype(np.float32)
_E2M1_PAIR = np.stack([np.tile(_E2M1_VALUE, 16), np.repeat(_E2M1_VALUE, 16)], axis=-1).view(np.uint64)[:, 0]


def _look_up(table: Array, index: Array) -> Array:
    """`table[index]` for an index that cannot be out of range; "clip" spares numpy the check (3 times faster)."""
    return np.take(table, index, mode="clip")


def _encode(x: F32, table: U8) -> U8:
    """Codes of float32 values through the table of the bfloat16 ones.

    The lower half of the float32 is folded into one sticky bit (round to odd). bfloat16 has eight
    significant bits, more than two beyond the codec's, so rounding the folded value to the nearest code
    gives the same code as rounding the float32 itself; ties stay ties and nothing else becomes one.
    """
    halves = np.ascontiguousarray(x, dtype="<f4").view("<u2").reshape(*x.shape, 2)
    return _look_up(table, halves[..., 1] | (halves[..., 0] != 0))


def encode_e4m3(x: F32) -> U8:
    """float32 -> E4M3 byte: nearest even, |x| > 448 and Inf give 448, NaN gives 0x7F, the sign of zero is kept.

    Agrees with PTX `cvt.rn.satfinite.e4m3x2.f32`.
    """
    return _encode(x, _E4M3_CODE)


def decode_e4m3(codes: U8) -> F32:
    """E4M3 byte -> its value in float32; 0x7F and 0xFF give NaN."""
    return _look_up(_E4M3_VALUE, codes)


def encode_e2m1(x: F32) -> U8:
    """float32 -> E2M1 nibble: nearest even, |x| > 6 and Inf give 6, NaN gives 0x7, the sign of zero is kept.

    Agrees with PTX `cvt.rn.satfinite.e2m1x2.f32`.
    """
    return _encode(x, _E2M1_CODE)


def decode_e2m1(codes: U8) -> F32:
    """E2M1 nibble -> its value in float32."""
    return _look_up(_E2M1_VALUE, codes)


def decode_e2m1_packed(packed: U8) -> F32:
    """[.., K/2] bytes of two nibbles, even element low -> [.., K] float32."""
    return _look_up(_E2M1_PAIR, packed).view(np.float32)


# ---- scale codecs --------------------------------------------------------------------------------------


def encode_e8m0(v: F32) -> U8:
    """Non-negative float32 -> E8M0 byte, exponent rounded up; Inf gives 254, NaN 255, v <= 2^-127 gives 0.

    Agrees with PTX `cvt.rp.satfinite.ue8m0x2.f32`. ml_dtypes and torch round to nearest instead.
    """
    bits = v.view(np.uint32)
    exponent, mantissa = (bits >> _MANTISSA_BITS) & np.uint32(0xFF), bits & _MANTISSA_MASK
    # A subnormal is m * 2^-149: it fits byte 0 (2^-127) up to m = 2^22.
    subnormal = (mantissa > np.uint32(1 << 22)).astype(np.uint32)
    rounded = np.minimum(exponent + (mantissa != 0), np.uint32(E8M0_MAX))
    byte = np.where(exponent == 0, subnormal, rounded)
    return np.where(np.isnan(v), 255, byte).astype(np.uint8)


_E8M0_EXPONENT = np.arange(255) - E8M0_BIAS
_E8M0_VALUE = np.append(np.ldexp(1.0, _E8M0_EXPONENT), np.nan).astype(np.float32)
_E8M0_INVERSE = np.append(np.ldexp(1.0, -_E8M0_EXPONENT), np.nan).astype(np.float32)


def decode_e8m0(byte: U8) -> F32:
    """E8M0 byte -> 2^(byte - 127) in float32 (byte 0 is the subnormal 2^-127), 255 -> NaN."""
    return _look_up(_E8M0_VALUE, byte)


def e8m0_multiplier(byte: U8) -> F32:
    """E8M0 byte -> 2^(127 - byte), the factor of an element before its cast; 254 gives the subnormal 2^-127."""
    return _look_up(_E8M0_INVERSE, byte)


def biased_exponent(v: F32, *, round_to_mantissa_bits: int | None = None) -> npt.NDArray[np.int32]:
    """The exponent field of a non-negative float32, floor(log2 v) + 127, and 0 for a subnormal.

    With `round_to_mantissa_bits` the value is first rounded to that many, ties away from zero.
    """
    bits = v.view(np.uint32)
    if round_to_mantissa_bits is not None:
        bits = bits + (np.uint32(1 << 22) >> np.uint32(round_to_mantissa_bits))
    return (bits >> _MANTISSA_BITS).astype(np.int32)


def floor_power_of_two(s: F32) -> F32:
    """Clear the mantissa: the largest power of two that is not above a normal `s`."""
    return (s.view(np.uint32) & _EXPONENT_MASK).view(np.float32)


def ceil_power_of_two(s: F32) -> F32:
    """The smallest power of two in [2^-126, 2^127] that is not below `s`; Inf and NaN give 2^127."""
    bits = s.view(np.uint32)
    exponent = ((bits >> _MANTISSA_BITS) & np.uint32(0xFF)) + ((bits & _MANTISSA_MASK) != 0)
    bounded: npt.NDArray[np.uint32] = np.clip(exponent, np.uint32(1), np.uint32(E8M0_MAX))
    return (bounded << _MANTISSA_BITS).view(np.float32)


def finite_max(dtype: np.dtype[Any]) -> np.float32:
    """The largest finite value of float32, float16 or bfloat16: the bit pattern before Inf's."""
    integer = np.dtype(f"u{dtype.itemsize}")
    return np.float32((np.array([np.inf], dtype=dtype).view(integer) - integer.type(1)).view(dtype)[0])


# ---- blocks --------------------------------------------------------------------------------------------


def block_counts(shape: Shape, block_shape: tuple[int, int]) -> Shape:
    """[.., M, K] -> [.., ceil(M/bm), ceil(K/bk)]: a scale for every started block."""
    *lead, m, k = shape
    bm, bk = block_shape
    return (*lead, -(-m // bm), -(-k // bk))


def _fold_columns(magnitude: Array, width: int) -> Array:
    """Maximum over blocks of `width` columns; the last axis is a multiple of it."""
    while width % 2 == 0:  # neighbours first: long passes over memory instead of one short reduction a block
        magnitude = np.maximum(magnitude[..., 0::2], magnitude[..., 1::2])
        width //= 2
    if width == 1:
        return magnitude
    *rows, k = magnitude.shape
    out: Array = magnitude.reshape(*rows, k // width, width).max(axis=-1)
    return out


def _fold_rows(magnitude: Array, height: int) -> Array:
    """Maximum over blocks of `height` rows; the last block may be short."""
    *lead, m, k = magnitude.shape
    whole = m // height
    out: Array = magnitude[..., : whole * height, :].reshape(*lead, whole, height, k).max(axis=-2, initial=0)
    if m % height == 0:
        return out
    rest = magnitude[..., whole * height :, :].max(axis=-2, keepdims=True, initial=0)
    return np.concatenate([out, rest], axis=-2)


def block_amax(x: Array, block_shape: tuple[int, int], *, nan: Literal["ignore", "propagate"] = "ignore") -> F32:
    """The largest |x| of each block, exact, in float32: [.., M, K] -> [.., ceil(M/bm), ceil(K/bk)].

    Elements missing from a ragged block count as zero. NaN counts as zero too, or makes its block NaN.

    The bit pattern without its sign orders like the magnitude, in float32, float16 and bfloat16 alike, with
    NaN above Inf; so the maximum is taken on integers of the input's own width.
    """
    integer = np.dtype(f"u{x.dtype.itemsize}")
    bits = np.ascontiguousarray(x).view(integer)
    magnitude = bits & integer.type(np.iinfo(integer).max >> 1)
    infinity = np.array(np.inf, dtype=x.dtype).view(integer)
    bm, bk = block_shape
    ragged = -x.shape[-1] % bk

    def fold(magnitude: Array) -> Array:
        rows = magnitude if bm == 1 else _fold_rows(magnitude, bm)
        if ragged:
            rows = np.pad(rows, [(0, 0)] * (rows.ndim - 1) + [(0, ragged)])
        return _fold_columns(rows, bk)

    out = fold(magnitude)
    if (out > infinity).any():
        out = fold(np.where(magnitude > infinity, 0, magnitude)) if nan == "ignore" else out
    return np.where(out > infinity, np.float32(np.nan), out.view(x.dtype).astype(np.float32))


def spread(per_block: Array, block_shape: tuple[int, int], shape: Shape) -> Array:
    """One value a block -> one value an element: [.., ceil(M/bm), ceil(K/bk)] -> `shape` [.., M, K]."""
    m, k = shape[-2:]
    bm, bk = block_shape
    out = np.repeat(per_block, bk, axis=-1)[..., :k]
    return out if bm == 1 else np.repeat(out, bm, axis=-2)[..., :m, :]


# ---- packing -------------------------------------------------------------------------------------------


def pack_nibbles(codes: U8) -> U8:
    """[.., K] codes of four bits -> [.., K/2] bytes, the even element in the low nibble. K is even."""
    pairs = np.ascontiguousarray(codes).view("<u2")  # the even element is the low byte
    out: U8 = (pairs | pairs >> 4).astype(np.uint8)
    return out


def unpack_nibbles(packed: U8) -> U8:
    """Inverse of `pack_nibbles`: [.., K/2] bytes -> [.., K] codes."""
    pairs = np.ascontiguousarray(packed).astype("<u2")
    out: U8 = ((pairs | pairs << 4) & 0x0F0F).view(np.uint8)
    return out
