/* INT4 groups: lowprec/formats/int4_group.py has the rules. */

#pragma once

#include "_tiles.h"

#define INT4_OFFSET 8

struct int4_options {
    int64_t group;
    float divisor, lowest; /* 7 and -7, or 7.5 and -8 */
};

/* The nearest integer, ties to even, of a number clamped to [-8, 7]: 1.5 * 2^23 has a step of 1, so adding it rounds,
 * and the sum's mantissa counts. NaN is 0. */
INLINE int32_t encode_int4(float v, float lowest)
{
    float clamped = at_most(at_least(v, lowest), 7.0f);
    int32_t code = (int32_t)(bits_of(clamped + 0x1.8p23f) - bits_of(0x1.8p23f));
    return magnitude_of(v) > INF_BITS ? 0 : code;
}

CLONES void encode_int4_tile(float lowest, const float *restrict v, int64_t count, uint8_t *restrict codes)
{
    for (int64_t i = 0; i < count; i++)
        codes[i] = (uint8_t)(encode_int4(v[i], lowest) + INT4_OFFSET);
}

/* Through an integer, which has no -0. */
CLONES void round_int4_tile(float lowest, float *v, int64_t count)
{
    for (int64_t i = 0; i < count; i++)
        v[i] = (float)encode_int4(v[i], lowest);
}

CLONES void decode_int4_tile(const uint8_t *restrict codes, int64_t count, float *restrict v)
{
    for (int64_t i = 0; i < count; i++)
        v[i] = (float)((int32_t)codes[i] - INT4_OFFSET);
}

/* For each group the stored scale, in bfloat16 and in float32. A zero group has 1, which leaves its codes 0 whatever
 * numbers too small for a scale are in it. */
CLONES void int4_scales(float amax_divisor, const float *restrict amax, int64_t groups, uint16_t *restrict stored,
                        float *restrict scale)
{
    for (int64_t g = 0; g < groups; g++) {
        uint16_t rounded = f32_to_bf16(at_most(amax[g] / amax_divisor, largest_finite(BF16)));
        stored[g] = rounded == 0 ? 0x3f80 : rounded; /* 1.0 */
        scale[g] = float_of((uint32_t)stored[g] << 16);
    }
}

static void int4_tile(struct int4_options options, int fake, int dtype, const void *x, int64_t count, void *out,
                      uint16_t *stored)
{
    ALIGNED float v[TILE], amax[TILE], scale[TILE];
    ALIGNED uint8_t codes[TILE];
    block_amax(dtype, x, 0, 1, count, options.group, IGNORE_NAN, amax);
    int4_scales(options.divisor, amax, count / options.group, stored, scale);
    load_tile(dtype, x, count, v);
    divide_tile(v, count, options.group, scale);
    if (!fake) {
        encode_int4_tile(options.lowest, v, count, codes);
        pack_tile(codes, count, out);
        return;
    }
    round_int4_tile(options.lowest, v, count);
    multiply_tile(v, count, options.group, scale);
    store_tile(dtype, v, count, out);
}

static void int4_matrix(struct int4_options options, int fake, int dtype, const void *x, int64_t x_stride, int64_t rows,
                        int64_t cols, void *out, int64_t out_stride, void *scale, int64_t scale_stride)
{
    int64_t wide = TILE / options.group * options.group;
    ALIGNED uint16_t stored[TILE];
    for (int64_t r = 0; r < rows; r++)
        for (int64_t c = 0; c < cols; c += wide) {
            int64_t count = min_of(wide, cols - c), groups = count / options.group;
            int4_tile(options, fake, dtype, at(x, r, x_stride, c * size_of(dtype)), count,
                      out_at(out, r, out_stride, fake ? c * size_of(dtype) : c / 2), stored);
            if (!fake)
                memcpy(out_at(scale, r, scale_stride, c / options.group * 2), stored, (size_t)groups * sizeof *stored);
        }
}

INLINE struct int4_options int4_options_of(int64_t group, int half_steps)
{
    return (struct int4_options){group, half_steps == 15 ? 7.5f : 7.0f, half_steps == 15 ? -8.0f : -7.0f};
}

/* half_steps: twice what the amax is divided by, 14 or 15. cols is a multiple of the group, which is even and at most
 * TILE. q: half a byte an element. scale: bfloat16 [rows, cols / group]. */
EXPORT void lowprec_int4_group_quantize(int half_steps, int64_t group, int dtype, const void *x, int64_t x_stride,
                                        int64_t rows, int64_t cols, void *q, int64_t q_stride, void *scale,
                                        int64_t scale_stride)
{
    struct int4_options options = int4_options_of(group, half_steps);
    IN_DEFAULT_FPU_STATE(int4_matrix(options, 0, dtype, x, x_stride, rows, cols, q, q_stride, scale, scale_stride));
}

/* y: the dtype of x. */
EXPORT void lowprec_int4_group_fake_quantize(int half_steps, int64_t group, int dtype, const void *x, int64_t x_stride,
                                             int64_t rows, int64_t cols, void *y, int64_t y_stride)
{
    struct int4_options options = int4_options_of(group, half_steps);
    IN_DEFAULT_FPU_STATE(int4_matrix(options, 1, dtype, x, x_stride, rows, cols, y, y_stride, 0, 0));
}

static void int4_decode(int64_t group, int dtype, const void *q, int64_t q_stride, const void *scale,
                        int64_t scale_stride, int64_t rows, int64_t cols, void *y, int64_t y_stride)
{
    int64_t wide = TILE / group * group;
    ALIGNED uint8_t codes[TILE];
    ALIGNED float v[TILE], decode[TILE];
    for (int64_t r = 0; r < rows; r++)
        for (int64_t c = 0; c < cols; c += wide) {
            int64_t count = min_of(wide, cols - c);
            unpack_tile((const uint8_t *)at(q, r, q_stride, c / 2), count, codes);
            decode_int4_tile(codes, count, v);
            load_tile(BF16, at(scale, r, scale_stride, c / group * 2), count / group, decode);
            multiply_tile(v, count, group, decode);
            store_tile(dtype, v, count, out_at(y, r, y_stride, c * size_of(dtype)));
        }
}

/* y: dtype. */
EXPORT void lowprec_int4_group_dequantize(int64_t group, const void *q, int64_t q_stride, const void *scale,
                                          int64_t scale_stride, int64_t rows, int64_t cols, int dtype, void *y,
                                          int64_t y_stride)
{
    IN_DEFAULT_FPU_STATE(int4_decode(group, dtype, q, q_stride, scale, scale_stride, rows, cols, y, y_stride));
}
