/* The vector loops: every function works on a tile, at most TILE elements of one row, as float32.
 *
 * A kernel is a few of them in a row: load, block amax, scales, multiply, encode. The tile stays in the first-level
 * cache between them, so passing it on costs little, and each loop is written and compiled once instead of once for
 * each dtype and format. */

#pragma once

#include "_codecs.h"

#define TILE 2048
#define ALIGNED _Alignas(64) /* a vector register must not straddle two cache lines: half the speed */

enum dtype { F32, F16, BF16 };

/* A caller's buffer may begin at any byte, as tensors in a file do, and one buffer is read as several types. */
typedef uint16_t __attribute__((aligned(1), may_alias)) u16;
typedef uint32_t __attribute__((aligned(1), may_alias)) u32;
typedef float __attribute__((aligned(1), may_alias)) f32;

INLINE int64_t size_of(int dtype) { return dtype == F32 ? 4 : 2; }
INLINE float largest_finite(int dtype) { return dtype == F32 ? FLOAT_MAX : dtype == F16 ? 65504.0f : 0x1.fep127f; }
INLINE int64_t min_of(int64_t a, int64_t b) { return a < b ? a : b; }
INLINE const char *at(const void *matrix, int64_t row, int64_t stride, int64_t byte)
{
    return (const char *)matrix + row * stride + byte;
}
INLINE char *out_at(void *matrix, int64_t row, int64_t stride, int64_t byte)
{
    return (char *)matrix + row * stride + byte;
}

/* ---- dtypes ---- */

CLONES void load_tile(int dtype, const void *restrict x, int64_t count, float *restrict v)
{
    if (dtype == BF16)
        for (int64_t i = 0; i < count; i++)
            v[i] = float_of((uint32_t)((const u16 *)x)[i] << 16);
    else if (dtype == F16)
        for (int64_t i = 0; i < count; i++)
            v[i] = f16_to_f32(((const u16 *)x)[i]);
    else
        memcpy(v, x, (size_t)count * sizeof *v);
}

CLONES void store_tile(int dtype, const float *restrict v, int64_t count, void *restrict y)
{
    if (dtype == BF16)
        for (int64_t i = 0; i < count; i++)
            ((u16 *)y)[i] = f32_to_bf16(v[i]);
    else if (dtype == F16)
        for (int64_t i = 0; i < count; i++)
            ((u16 *)y)[i] = f32_to_f16(v[i]);
    else
        memcpy(y, v, (size_t)count * sizeof *v);
}

/* ---- block amax ----
 *
 * The bit patterns of magnitudes order like the magnitudes, with NaN above Inf. So the maximum is one of integers, of
 * the input's own width. Adding `lift`, the distance from Inf to the largest positive integer, wraps NaN around to
 * the negative ones, where no maximum sees it; with a lift of 0 NaN wins. Patterns are kept lifted meanwhile. */

#define DEFINE_MAXIMA(name, uint, lane, mask)                                                                    \
    INLINE lane name##_of_run(const uint *x, int64_t count, uint lift)                                           \
    {                                                                                                            \
        lane max = (lane)lift;                                                                                   \
        _Pragma("GCC unroll 1") /* a loop, else GCC 12 makes scalars of 16 elements */                           \
        for (int64_t i = 0; i < count; i++) {                                                                    \
            lane pattern = (lane)(uint)((x[i] & mask) + lift);                                                   \
            max = pattern > max ? pattern : max;                                                                 \
        }                                                                                                        \
        return max;                                                                                              \
    }                                                                                                            \
                                                                                                                 \
    INLINE void name##_of_blocks(const uint *x, int64_t count, int64_t width, uint lift, int32_t *restrict max)  \
    {                                                                                                            \
        int64_t whole = count / width;                                                                           \
        for (int64_t b = 0; b < whole; b++)                                                                      \
            max[b] = name##_of_run(x + b * width, width, lift) - lift;                                           \
        if (count % width)                                                                                       \
            max[whole] = name##_of_run(x + whole * width, count % width, lift) - lift;                           \
    }                                                                                                            \
                                                                                                                 \
    CLONES void name##_blocks(const void *x, int64_t count, int64_t width, int32_t lift, int32_t *restrict max)  \
    {                                                                                                            \
        if (width == 16)                                                                                         \
            name##_of_blocks(x, count, 16, (uint)lift, max);                                                     \
        else if (width == 32)                                                                                    \
            name##_of_blocks(x, count, 32, (uint)lift, max);                                                     \
        else                                                                                                     \
            name##_of_blocks(x, count, width, (uint)lift, max);                                                  \
    }                                                                                                            \
                                                                                                                 \
    /* column[i] = max(column[i], lifted pattern of x[i]) */                                                     \
    CLONES void name##_columns(const void *x, int64_t count, int32_t lift, uint *restrict column)                \
    {                                                                                                            \
        for (int64_t i = 0; i < count; i++) {                                                                    \
            lane pattern = (lane)(uint)((((const uint *)x)[i] & mask) + (uint)lift), max = (lane)column[i];      \
            column[i] = (uint)(pattern > max ? pattern : max);                                                   \
        }                                                                                                        \
    }

DEFINE_MAXIMA(max16, u16, int16_t, 0x7fff)
DEFINE_MAXIMA(max32, u32, int32_t, 0x7fffffff)

CLONES void patterns_to_f32(int dtype, const int32_t *restrict pattern, int64_t count, float *restrict v)
{
    if (dtype == BF16)
        for (int64_t i = 0; i < count; i++)
            v[i] = float_of((uint32_t)pattern[i] << 16);
    else if (dtype == F16)
        for (int64_t i = 0; i < count; i++)
            v[i] = f16_to_f32((uint16_t)pattern[i]);
    else
        memcpy(v, pattern, (size_t)count * sizeof *v);
    for (int64_t i = 0; i < count; i++)
        v[i] = magnitude_of(v[i]) > INF_BITS ? float_of(NAN_BITS) : v[i];
}

enum nan_in_amax { IGNORE_NAN, KEEP_NAN };

INLINE int32_t lift_of(int dtype, int nan)
{
    return nan == KEEP_NAN ? 0 : dtype == F32 ? INT32_MAX - INF_BITS : dtype == F16 ? 0x7fff - 0x7c00 : 0x7fff - 0x7f80;
}

static void row_patterns(int dtype, const void *x, int64_t count, int64_t width, int32_t lift, int32_t *pattern)
{
    if (dtype == F32)
        max32_blocks(x, count, width, lift, pattern);
    else
        max16_blocks(x, count, width, lift, pattern);
}

/* Over several rows first a maximum a column, so that rows are read one after the other as memory likes it. */
static void rows_patterns(int dtype, const void *x, int64_t stride, int64_t rows, int64_t count, int64_t width,
                          int32_t lift, int32_t *pattern)
{
    ALIGNED u32 column[TILE];
    memset(column, 0, sizeof column); /* a pattern lower than any but NaN's, lifted or not */
    for (int64_t r = 0; r < rows; r++)
        if (dtype == F32)
            max32_columns(at(x, r, stride, 0), count, lift, column);
        else
            max16_columns(at(x, r, stride, 0), count, lift, (u16 *)column);
    row_patterns(dtype, column, count, width, 0, pattern); /* they are lifted already */
    for (int64_t b = 0; b < (count + width - 1) / width; b++)
        pattern[b] = pattern[b] > lift ? pattern[b] - lift : 0;
}

/* amax[b]: the largest |x| of block b, `width` columns of all `rows`, the last block perhaps short. */
static void block_amax(int dtype, const void *x, int64_t stride, int64_t rows, int64_t count, int64_t width, int nan,
                       float *amax)
{
    ALIGNED int32_t pattern[TILE], lift = lift_of(dtype, nan);
    if (rows == 1)
        row_patterns(dtype, x, count, width, lift, pattern);
    else
        rows_patterns(dtype, x, stride, rows, count, width, lift, pattern);
    patterns_to_f32(dtype, pattern, (count + width - 1) / width, amax);
}

/* ---- scaling ---- */

/* v = v OPERATOR the factor of its block of WIDTH; the last block may be short. */
#define SCALE_BLOCKS(WIDTH, OPERATOR)                                           \
    {                                                                           \
        int64_t whole = count / (WIDTH);                                        \
        for (int64_t b = 0; b < whole; b++)                                     \
            _Pragma("GCC unroll 1") /* as above */                              \
            for (int64_t i = 0; i < (WIDTH); i++)                               \
                v[b * (WIDTH) + i] = v[b * (WIDTH) + i] OPERATOR factor[b];     \
        for (int64_t i = whole * (WIDTH); i < count; i++)                       \
            v[i] = v[i] OPERATOR factor[whole];                                 \
    }

CLONES void multiply_tile(float *restrict v, int64_t count, int64_t width, const float *restrict factor)
{
    if (width == 16)
        SCALE_BLOCKS(16, *)
    else if (width == 32)
        SCALE_BLOCKS(32, *)
    else if (width == 128)
        SCALE_BLOCKS(128, *)
    else
        SCALE_BLOCKS(width, *)
}

CLONES void divide_tile(float *restrict v, int64_t count, int64_t width, const float *restrict factor)
{
    if (width == 32)
        SCALE_BLOCKS(32, /)
    else if (width == 128)
        SCALE_BLOCKS(128, /)
    else
        SCALE_BLOCKS(width, /)
}

/* ---- elements ---- */

CLONES void encode_e4m3_tile(const float *restrict v, int64_t count, uint8_t *restrict codes)
{
    for (int64_t i = 0; i < count; i++)
        codes[i] = encode_e4m3(v[i]);
}

CLONES void round_e4m3_tile(float *v, int64_t count)
{
    for (int64_t i = 0; i < count; i++)
        v[i] = round_e4m3(v[i]);
}

CLONES void decode_e4m3_tile(const uint8_t *restrict codes, int64_t count, float *restrict v)
{
    for (int64_t i = 0; i < count; i++)
        v[i] = decode_e4m3(codes[i]);
}

/* Codes of four bits are packed two a byte, the even one low; `count` is even. */
CLONES void pack_tile(const uint8_t *restrict codes, int64_t count, uint8_t *restrict packed)
{
    for (int64_t i = 0; i < count / 2; i++) {
        uint32_t pair = ((const u16 *)codes)[i];
        packed[i] = (uint8_t)(pair | pair >> 4);
    }
}

CLONES void unpack_tile(const uint8_t *restrict packed, int64_t count, uint8_t *restrict codes)
{
    for (int64_t i = 0; i < count / 2; i++)
        ((u16 *)codes)[i] = (uint16_t)((packed[i] | packed[i] << 4) & 0x0f0f);
}

CLONES void encode_e2m1_tile(const float *restrict v, int64_t count, uint8_t *restrict codes)
{
    for (int64_t i = 0; i < count; i++)
        codes[i] = encode_e2m1(v[i]);
}

CLONES void round_e2m1_tile(float *v, int64_t count)
{
    for (int64_t i = 0; i < count; i++)
        v[i] = round_e2m1(v[i]);
}

CLONES void decode_e2m1_tile(const uint8_t *restrict codes, int64_t count, float *restrict v)
{
    for (int64_t i = 0; i < count; i++)
        v[i] = decode_e2m1(codes[i]);
}

static void encode_e2m1_packed(const float *v, int64_t count, uint8_t *packed)
{
    ALIGNED uint8_t codes[TILE];
    encode_e2m1_tile(v, count, codes);
    pack_tile(codes, count, packed);
}

static void decode_e2m1_packed(const void *packed, int64_t count, float *v)
{
    ALIGNED uint8_t codes[TILE];
    unpack_tile(packed, count, codes);
    decode_e2m1_tile(codes, count, v);
}
