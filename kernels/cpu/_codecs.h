/* Element and scale codecs: the C twin of lowprec/formats/numerics.py, one function a codec.
 *
 * Everything is written on 32-bit lanes without a branch, so that the compiler turns a loop over any of these
 * functions into vector code. Rounding is the FPU's own, to nearest even, with subnormals: `_native.c` sees to it. */

#pragma once

#include "_platform.h"

#define SIGN_BIT 0x80000000u
#define INF_BITS 0x7f800000
#define NAN_BITS 0x7fc00000
#define FLOAT_MAX 0x1.fffffep127f
#define E4M3_MAX 448.0f
#define E2M1_MAX 6.0f
#define E4M3_NAN 0x7f
#define E2M1_NAN 0x7

INLINE uint32_t bits_of(float v)
{
    uint32_t u;
    memcpy(&u, &v, sizeof u);
    return u;
}

INLINE float float_of(uint32_t u)
{
    float v;
    memcpy(&v, &u, sizeof v);
    return v;
}

/* The bits of |v|. They order like the magnitudes, NaN above Inf; signed, because SSE2 compares only those. */
INLINE int32_t magnitude_of(float v)
{
    return (int32_t)(bits_of(v) & ~SIGN_BIT);
}

/* numpy's minimum and maximum for one operand that is not NaN: a NaN in `v` stays. */
INLINE float at_most(float v, float limit) { return v > limit ? limit : v; }
INLINE float at_least(float v, float limit) { return v < limit ? limit : v; }

/* ---- rounding to a small float -------------------------------------------------------------------------- */

/* `a` is the magnitude (bits) of a float32, clamped to the small float's largest value.
 *
 * The step of a float with M mantissa bits at 2^e * 1.xxx is 2^(e - M), and below its lowest exponent (subnormals)
 * stays that of the lowest. `anchor` is the float32 2^(e + 23 - M), whose own step is just that. So adding it makes
 * the FPU round to the small float: the sum is anchor + steps, it never leaves anchor's binade because
 * a < 2^(e + 1), and an even number of steps is an even mantissa, so ties go where they should. */
INLINE int32_t step_exponent(int32_t a, int lowest)
{
    int32_t exponent = a & INF_BITS, floor = (lowest + 127) << 23;
    return exponent > floor ? exponent : floor; /* biased, in its place in a float32 */
}

INLINE float anchored(int32_t a, int32_t exponent, int mantissa_bits)
{
    return float_of((uint32_t)a) + float_of((uint32_t)(exponent + ((23 - mantissa_bits) << 23)));
}

/* code * 2^(23 - M), plus the excess below, modulo 2^32. The code is steps + (e - lowest) * 2^M; a magnitude that
 * rounds up to 2^(e + 1) has 2^(M + 1) steps, which carries into the exponent as it should. The anchor is a multiple
 * of 2^23, so shifting the sum leaves only the steps. */
INLINE uint32_t wide_code(int32_t a, int mantissa_bits, int lowest)
{
    int32_t exponent = step_exponent(a, lowest);
    return (bits_of(anchored(a, exponent, mantissa_bits)) << (23 - mantissa_bits)) + (uint32_t)exponent;
}

/* What (wide_code >> (23 - M)) exceeds the code by. The caller subtracts it last, from a value already as narrow as
 * the code: a compiler moves what comes after the shift to bytes, four times as many a vector. */
#define CODE_EXCESS(mantissa_bits, lowest) (((lowest) + 127u) << (mantissa_bits))

/* The rounded magnitude itself: taking the anchor off again is exact. */
INLINE float rounded_magnitude(int32_t a, int mantissa_bits, int lowest)
{
    int32_t exponent = step_exponent(a, lowest);
    return anchored(a, exponent, mantissa_bits) - float_of((uint32_t)(exponent + ((23 - mantissa_bits) << 23)));
}

/* ---- E4M3: 4 exponent bits, 3 mantissa bits, bias 7, largest 448 ------------------------------------------ */

INLINE int32_t clamped_e4m3(float v)
{
    int32_t a = magnitude_of(v), max = 0x43e00000; /* 448 */
    return a < max ? a : max;
}

INLINE uint8_t encode_e4m3(float v)
{
    uint32_t wide = wide_code(clamped_e4m3(v), 3, -6) + ((bits_of(v) & SIGN_BIT) >> 4); /* to bit 7 of the code */
    uint32_t nan = (E4M3_NAN + CODE_EXCESS(3, -6)) << 20;
    wide = magnitude_of(v) > INF_BITS ? nan : wide;
    return (uint8_t)((wide >> 20) - CODE_EXCESS(3, -6));
}

/* decode_e4m3(encode_e4m3(v)) without the code in between. */
INLINE float round_e4m3(float v)
{
    uint32_t value = bits_of(rounded_magnitude(clamped_e4m3(v), 3, -6)) | (bits_of(v) & SIGN_BIT);
    return float_of(magnitude_of(v) > INF_BITS ? NAN_BITS : value);
}

INLINE float decode_e4m3(uint8_t code)
{
    uint32_t a = code & 0x7f;
    uint32_t normal = (a << 20) + ((127u - 7) << 23);
    uint32_t subnormal = bits_of((float)(int32_t)a * 0x1p-9f);
    uint32_t value = (a < 8 ? subnormal : normal) | ((uint32_t)(code & 0x80) << 24);
    return float_of(a == E4M3_NAN ? NAN_BITS : value);
}

/* ---- E2M1: 0, 0.5, 1, 1.5, 2, 3, 4, 6. NaN has no code and becomes +6 -------------------------------------- */

INLINE int32_t clamped_e2m1(float v)
{
    int32_t a = magnitude_of(v), max = 0x40c00000; /* 6, also of a NaN */
    return a < max ? a : max;
}

INLINE uint32_t sign_unless_nan(float v)
{
    return magnitude_of(v) > INF_BITS ? 0 : bits_of(v) & SIGN_BIT;
}

INLINE uint8_t encode_e2m1(float v)
{
    uint32_t wide = wide_code(clamped_e2m1(v), 1, 0) + (sign_unless_nan(v) >> 6); /* to bit 3 of the code */
    return (uint8_t)((wide >> 22) - CODE_EXCESS(1, 0)) & 0xf;
}

INLINE float round_e2m1(float v)
{
    return float_of(bits_of(rounded_magnitude(clamped_e2m1(v), 1, 0)) | sign_unless_nan(v));
}

/* Below 1 the value is half the code: 1 + code / 2 is built in the mantissa and the 1 taken off, exactly. */
INLINE float decode_e2m1(uint8_t code)
{
    uint32_t a = code & 0x7;
    float one = a < 2 ? 1.0f : 0.0f;
    float value = float_of((a << 22) + (a < 2 ? 127u << 23 : 126u << 23)) - one;
    return float_of(bits_of(value) | ((uint32_t)(code & 0x8) << 28));
}

/* ---- E8M0: a power of two, 2^(byte - 127), 255 is NaN -------------------------------------------------------- */

/* The exponent rounded up, of v >= 0. A subnormal is m * 2^-149: byte 0 (2^-127) holds it up to m = 2^22. */
INLINE uint32_t encode_e8m0(float v)
{
    uint32_t u = bits_of(v), exponent = u >> 23, mantissa = u & 0x7fffff;
    uint32_t up = exponent + (mantissa != 0);
    up = up < 254 ? up : 254;
    uint32_t byte = exponent == 0 ? mantissa > 0x400000 : up;
    return u > INF_BITS ? 255 : byte;
}

/* 2^k is its exponent field alone, except 2^-127, which is subnormal, and byte 255. */
INLINE float power_of_two(int32_t biased_exponent)
{
    uint32_t u = biased_exponent <= 0 ? 0x400000u : (uint32_t)biased_exponent << 23;
    return float_of(u);
}

INLINE float decode_e8m0(uint32_t byte)
{
    return byte == 255 ? float_of(NAN_BITS) : power_of_two((int32_t)byte);
}

/* 2^(127 - byte), what an element is multiplied by. */
INLINE float inverse_e8m0(uint32_t byte)
{
    return byte == 255 ? float_of(NAN_BITS) : power_of_two(254 - (int32_t)byte);
}

INLINE float floor_power_of_two(float v) { return float_of(bits_of(v) & 0xff800000u); }

/* In [2^-126, 2^127]; Inf and NaN give 2^127. */
INLINE float ceil_power_of_two(float v)
{
    uint32_t u = bits_of(v), exponent = ((u >> 23) & 0xff) + ((u & 0x7fffff) != 0);
    exponent = exponent < 1 ? 1 : exponent > 254 ? 254 : exponent;
    return float_of(exponent << 23);
}

/* ---- float16 and bfloat16 -------------------------------------------------------------------------------- */

/* The exponent moves from bias 15 to bias 127; a subnormal is 2^-14 + m * 2^-24 without the 2^-14, exactly. */
INLINE float f16_to_f32(uint16_t h)
{
    uint32_t a = (uint32_t)(h & 0x7fff) << 13;
    uint32_t normal = a + ((127u - 15) << 23);
    uint32_t subnormal = bits_of(float_of(a + ((127u - 14) << 23)) - 0x1p-14f);
    uint32_t special = a | INF_BITS;
    uint32_t value = a < (1u << 23) ? subnormal : a >= (31u << 23) ? special : normal;
    return float_of(value | ((uint32_t)(h & 0x8000) << 16));
}

/* NaN keeps its sign and the top of its payload, and becomes quiet. */
INLINE uint16_t f32_to_f16(float v)
{
    int32_t a = magnitude_of(v), max = 0x47800000; /* 65536: the code of Inf */
    uint32_t code = (wide_code(a < max ? a : max, 10, -14) >> 13) - CODE_EXCESS(10, -14);
    uint32_t nan = 0x7e00 | ((uint32_t)a >> 13 & 0x3ff);
    return (uint16_t)((a > INF_BITS ? nan : code) | ((bits_of(v) >> 16) & 0x8000));
}

INLINE uint16_t f32_to_bf16(float v)
{
    uint32_t u = bits_of(v);
    uint32_t rounded = (u + 0x7fff + ((u >> 16) & 1)) >> 16;
    return (uint16_t)(magnitude_of(v) > INF_BITS ? ((u >> 16) & 0x8000) | 0x7fc0 : rounded);
}
