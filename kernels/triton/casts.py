"""Casts between float32 and the small formats, on registers: what `lowprec.formats.numerics` says, bit for bit.

`TARGET`, known at compile time, is the compute capability times ten that the code is for, 0 in Triton's
interpreter. It chooses only how a cast is done, never what it gives:

    cast                  0            80           89, 90              100 and up
    float32 -> E4M3       arithmetic   arithmetic   cvt.e4m3x2          cvt.e4m3x2
    float32 -> E2M1       arithmetic   arithmetic   arithmetic          cvt.e2m1x2
    float32 -> E8M0       arithmetic   arithmetic   arithmetic          cvt.ue8m0x2
    float32 -> bfloat16   arithmetic   Triton's     Triton's            Triton's

Triton's own casts to float8 do not compile before capability 8.9, and in the interpreter they and the cast to
bfloat16 are wrong (carry lost, truncation), so bfloat16 is carried as int16 bits throughout.

Multiplications by powers of two move a value in and out of float32's own subnormals, so none of this may be
compiled with flush-to-zero. Sums that round must not be contracted: launch with `enable_fp_fusion=False`.

Shapes: element by element on any shape.
"""

from __future__ import annotations

import triton
import triton.language as tl

from lowprec.formats import numerics as nm

E4M3_MAX = tl.constexpr(float(nm.E4M3_MAX))
E2M1_MAX = tl.constexpr(float(nm.E2M1_MAX))
FLT_MAX = tl.constexpr(float(nm.FLT_MAX))
RECIPROCAL_OF_6 = tl.constexpr(float(nm.RECIPROCAL_OF_6))
RECIPROCAL_OF_448 = tl.constexpr(float(nm.RECIPROCAL_OF_448))
E4M3_NAN = tl.constexpr(int(nm.E4M3_NAN))
E8M0_MAX = tl.constexpr(nm.E8M0_MAX)

# Float32: sign, eight exponent bits, 23 mantissa bits.
SIGN = tl.constexpr(-0x80000000)
INFINITY = tl.constexpr(0x7F800000)  # also the mask of the exponent
NAN = tl.constexpr(0x7FC00000)
MAGNITUDE = tl.constexpr(0x7FFFFFFF)
MANTISSA = tl.constexpr(0x007FFFFF)
MANTISSA_BITS = tl.constexpr(23)
BIAS = tl.constexpr(nm.E8M0_BIAS)
HALF_OF_SMALLEST_NORMAL = tl.constexpr(0x00400000)  # 2^-127

# A small float's exponent and mantissa, put where float32 has them, are its value times 2^(its bias - 127).
E4M3_DOWN, E4M3_UP = tl.constexpr(2.0**-120), tl.constexpr(2.0**120)
E2M1_DOWN, E2M1_UP = tl.constexpr(2.0**-126), tl.constexpr(2.0**126)
E4M3_MANTISSA_BITS, E4M3_MIN_EXPONENT, E4M3_SHIFT = tl.constexpr(3), tl.constexpr(1 - 7), tl.constexpr(20)
E2M1_MANTISSA_BITS, E2M1_MIN_EXPONENT, E2M1_SHIFT = tl.constexpr(1), tl.constexpr(0), tl.constexpr(22)
E4M3_MAGNITUDE, E2M1_MAGNITUDE = tl.constexpr(int(nm.E4M3_NAN)), tl.constexpr(int(nm.E2M1_NAN))

HAS_E4M3 = tl.constexpr(89)  # the first capabilities with the instruction
HAS_E2M1 = tl.constexpr(100)
HAS_E8M0 = tl.constexpr(100)
INTERPRETED = tl.constexpr(0)


@triton.jit
def bits_of(x: tl.tensor) -> tl.tensor:
    """float32 -> its bit pattern, int32."""
    return x.to(tl.int32, bitcast=True)


@triton.jit
def float_of(bits: tl.tensor) -> tl.tensor:
    """int32 bit pattern -> float32."""
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def to_float32(x: tl.tensor) -> tl.tensor:
    """An element as it was loaded -> float32, exact. int16 is the bits of a bfloat16."""
    if x.dtype == tl.int16:
        return float_of(x.to(tl.int32) << 16)
    else:
        return x.to(tl.float32)


@triton.jit
def from_float32(x: tl.tensor, dtype: tl.constexpr, TARGET: tl.constexpr) -> tl.tensor:
    """float32 -> `dtype` as it is stored, nearest even; int16 is the bits of a bfloat16. NaN stays a NaN."""
    if dtype != tl.int16:
        return x.to(dtype)
    elif TARGET != INTERPRETED:
        return x.to(tl.bfloat16).to(tl.int16, bitcast=True)
    else:
        bits = bits_of(x)
        rounded = bits + 0x7FFF + ((bits >> 16) & 1)
        return (tl.where(x == x, rounded, NAN) >> 16).to(tl.int16)


@triton.jit
def _round(a: tl.tensor, MANTISSA_BITS_KEPT: tl.constexpr, MIN_EXPONENT: tl.constexpr) -> tl.tensor:
    """A non-negative float32 to the nearest value of a small float without upper end, ties to even.

    The anchor is a power of two whose last bit in float32 weighs one step of the small float at `a`, so that the
    sum is rounded there by the adder, and the difference is exact. Below MIN_EXPONENT the step stays the same.
    """
    exponent = tl.maximum(bits_of(a) & INFINITY, (BIAS + MIN_EXPONENT) << MANTISSA_BITS)
    anchor = float_of(exponent + ((MANTISSA_BITS - MANTISSA_BITS_KEPT) << MANTISSA_BITS))
    return (a + anchor) - anchor


@triton.jit
def _with_sign_of(a: tl.tensor, x: tl.tensor) -> tl.tensor:
    return float_of(bits_of(a) | (bits_of(x) & SIGN))


# ---- E4M3 ----------------------------------------------------------------------------------------------


@triton.jit
def round_e4m3(x: tl.tensor) -> tl.tensor:
    """decode_e4m3(encode_e4m3(x)) without the code in between."""
    a = _round(tl.minimum(tl.abs(x), E4M3_MAX), E4M3_MANTISSA_BITS, E4M3_MIN_EXPONENT)
    return tl.where(x == x, _with_sign_of(a, x), float_of(tl.full((), NAN, tl.int32)))


@triton.jit
def encode_e4m3(x: tl.tensor, TARGET: tl.constexpr) -> tl.tensor:
    """float32 -> E4M3 byte, uint8: nearest even, saturating, NaN to 0x7F, the sign of zero kept."""
    if TARGET >= HAS_E4M3:
        return tl.inline_asm_elementwise(
            """{
            .reg .b16 low, high;
            cvt.rn.satfinite.e4m3x2.f32 low, $2, $1;
            cvt.rn.satfinite.e4m3x2.f32 high, $4, $3;
            mov.b32 $0, {low, high};
            }""",
            constraints="=r,f,f,f,f",
            args=[x],
            dtype=tl.uint8,
            is_pure=True,
            pack=4,
        )
    else:
        a = _round(tl.minimum(tl.abs(x), E4M3_MAX), E4M3_MANTISSA_BITS, E4M3_MIN_EXPONENT)
        code = (bits_of(a * E4M3_DOWN) >> E4M3_SHIFT) | ((bits_of(x) >> 24) & 0x80)
        return tl.where(x == x, code, E4M3_NAN).to(tl.uint8)


@triton.jit
def decode_e4m3(code: tl.tensor) -> tl.tensor:
    """E4M3 byte -> float32; 0x7F and 0xFF give NaN."""
    a = code.to(tl.int32) & E4M3_MAGNITUDE
    value = float_of(a << E4M3_SHIFT) * E4M3_UP
    signed = bits_of(value) | ((code.to(tl.int32) & 0x80) << 24)
    return float_of(tl.where(a == E4M3_NAN, NAN, signed))


# ---- E2M1 ----------------------------------------------------------------------------------------------


@triton.jit
def _clamp_e2m1(x: tl.tensor) -> tl.tensor:
    """Saturate at 6. NaN, which no comparison holds for, becomes +6."""
    return tl.maximum(tl.where(x < E2M1_MAX, x, E2M1_MAX), -E2M1_MAX)


@triton.jit
def round_e2m1(x: tl.tensor) -> tl.tensor:
    """decode_e2m1(encode_e2m1(x)) without the code in between."""
    clamped = _clamp_e2m1(x)
    return _with_sign_of(_round(tl.abs(clamped), E2M1_MANTISSA_BITS, E2M1_MIN_EXPONENT), clamped)


@triton.jit
def _e2m1_nibble(x: tl.tensor) -> tl.tensor:
    """float32 -> E2M1 nibble, int32, by arithmetic."""
    clamped = _clamp_e2m1(x)
    a = _round(tl.abs(clamped), E2M1_MANTISSA_BITS, E2M1_MIN_EXPONENT)
    return (bits_of(a * E2M1_DOWN) >> E2M1_SHIFT) | ((bits_of(clamped) >> 28) & 0x8)


@triton.jit
def encode_e2m1_pairs(even: tl.tensor, odd: tl.tensor, TARGET: tl.constexpr) -> tl.tensor:
    """Two float32 -> a byte of two E2M1 nibbles, even low: nearest even, saturating, NaN to 0x7, -0 to 0x8."""
    if TARGET >= HAS_E2M1:
        return tl.inline_asm_elementwise(
            """{
            .reg .b8 first, second, third, fourth;
            cvt.rn.satfinite.e2m1x2.f32 first, $5, $1;
            cvt.rn.satfinite.e2m1x2.f32 second, $6, $2;
            cvt.rn.satfinite.e2m1x2.f32 third, $7, $3;
            cvt.rn.satfinite.e2m1x2.f32 fourth, $8, $4;
            mov.b32 $0, {first, second, third, fourth};
            }""",
            constraints="=r,f,f,f,f,f,f,f,f",
            args=[even, odd],
            dtype=tl.uint8,
            is_pure=True,
            pack=4,
        )
    else:
        return (_e2m1_nibble(even) | (_e2m1_nibble(odd) << 4)).to(tl.uint8)


@triton.jit
def pack_e2m1(x_NB: tl.tensor, TARGET: tl.constexpr) -> tl.tensor:
    """float32 [N, B] -> bytes of two E2M1 nibbles [N, B/2], even element low."""
    even_NH, odd_NH = tl.split(tl.reshape(x_NB, (x_NB.shape[0], x_NB.shape[1] // 2, 2)))
    return encode_e2m1_pairs(even_NH, odd_NH, TARGET)


@triton.jit
def unpack_e2m1(pair_MH: tl.tensor) -> tl.tensor:
    """Bytes of two E2M1 nibbles, even element low [M, K/2] -> float32 [M, K/2, 2], in the order of [M, K]."""
    return decode_e2m1(tl.join(pair_MH & 0xF, pair_MH >> 4))


@triton.jit
def decode_e2m1(code: tl.tensor) -> tl.tensor:
    """E2M1 nibble, in the low bits of an integer -> float32."""
    code = code.to(tl.int32)
    value = float_of((code & E2M1_MAGNITUDE) << E2M1_SHIFT) * E2M1_UP
    return float_of(bits_of(value) | ((code & 0x8) << 28))


# ---- E8M0 ----------------------------------------------------------------------------------------------


@triton.jit
def encode_e8m0(v: tl.tensor, TARGET: tl.constexpr) -> tl.tensor:
    """Non-negative float32, no NaN -> E8M0 byte, int32: exponent rounded up; Inf gives 254, v <= 2^-127 gives 0."""
    if TARGET >= HAS_E8M0:
        return tl.inline_asm_elementwise(
            """{
            .reg .b16 pair;
            cvt.rp.satfinite.ue8m0x2.f32 pair, 0f00000000, $1;
            cvt.u32.u16 $0, pair;
            }""",
            constraints="=r,f",
            args=[v],
            dtype=tl.int32,
            is_pure=True,
            pack=1,
        )
    else:
        bits = bits_of(v)
        mantissa = bits & MANTISSA
        rounded = tl.minimum((bits >> MANTISSA_BITS) + (mantissa != 0).to(tl.int32), E8M0_MAX)
        # A subnormal is m * 2^-149: byte 0, 2^-127, holds it up to m = 2^22.
        return tl.where(bits <= MANTISSA, (mantissa > HALF_OF_SMALLEST_NORMAL).to(tl.int32), rounded)


@triton.jit
def decode_e8m0(byte: tl.tensor) -> tl.tensor:
    """E8M0 byte -> 2^(byte - 127), byte 0 is a float32 subnormal; 255 gives NaN."""
    byte = byte.to(tl.int32)
    bits = tl.where(byte == 0, HALF_OF_SMALLEST_NORMAL, byte << MANTISSA_BITS)
    return float_of(tl.where(byte > E8M0_MAX, NAN, bits))


@triton.jit
def e8m0_multiplier(byte: tl.tensor) -> tl.tensor:
    """E8M0 byte, not 255 -> 2^(127 - byte); 254 gives the float32 subnormal 2^-127."""
    byte = byte.to(tl.int32)
    return float_of(tl.where(byte == E8M0_MAX, HALF_OF_SMALLEST_NORMAL, (E8M0_MAX - byte) << MANTISSA_BITS))


# ---- the largest magnitude -----------------------------------------------------------------------------


@triton.jit
def row_amax(x: tl.tensor) -> tl.tensor:
    """float32 [M, K] -> the largest |x| of each row, [M, 1]; NaN is ignored, a row of NaN alone gives 0.

    On integers: patterns without their sign order like the magnitude, and the addition sends NaN, which lies above
    Inf, below zero. Of a number and a signalling NaN, floating-point maxima give now the one, now the other.
    """
    ordered = tl.max((bits_of(x) & MAGNITUDE) + MANTISSA, axis=1, keep_dims=True)
    return float_of(tl.maximum(ordered, MANTISSA) - MANTISSA)


@triton.jit
def row_amax_or_nan(x: tl.tensor) -> tl.tensor:
    """The same, but a row with a NaN gives NaN."""
    amax = tl.max(bits_of(x) & MAGNITUDE, axis=1, keep_dims=True)
    return float_of(tl.where(amax > INFINITY, NAN, amax))
