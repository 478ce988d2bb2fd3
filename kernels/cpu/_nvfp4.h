/* NVFP4: lowprec/formats/nvfp4.py has the rules. */

#pragma once

#include "_tiles.h"

#define NV_BLOCK 16
#define NV_BLOCKS (TILE / NV_BLOCK)

enum nv_choice { ALWAYS_SIX, MAE, MSE };

struct nv_options {
    int tile;      /* a scale for 16 x 16 elements instead of 1 x 16 */
    int choice;    /* four over six, and by which error */
    float largest; /* 6 * e4m3_max */
};

/* What a global amax decides. */
struct nv_outer {
    float amax, encode, decode; /* G, S, fl(1/S) */
};

CLONES void nv_outer_of(float largest, const float *restrict amax, int64_t count, struct nv_outer *restrict outer)
{
    for (int64_t i = 0; i < count; i++) {
        float encode = at_most(largest / amax[i], FLOAT_MAX);
        encode = amax[i] == 0 || encode == 0 ? 1.0f : encode;
        outer[i] = (struct nv_outer){amax[i], encode, 1.0f / encode};
    }
}

/* For each block what its elements are multiplied by, and what its codes are. */
CLONES void nv_factors(float outer_decode, const uint8_t *restrict scale, int64_t blocks, float *restrict encode,
                       float *restrict decode)
{
    for (int64_t b = 0; b < blocks; b++) {
        decode[b] = decode_e4m3(scale[b]) * outer_decode;
        encode[b] = at_most(1.0f / decode[b], FLOAT_MAX);
    }
}

CLONES void nv_six(float outer_encode, const float *restrict amax, int64_t blocks, uint8_t *restrict scale)
{
    float encode = outer_encode * (1.0f / E2M1_MAX);
    for (int64_t b = 0; b < blocks; b++)
        scale[b] = encode_e4m3(at_most(amax[b] * encode, FLOAT_MAX));
}

/* ---- four over six: of two scales for each block the one with the smaller error ---- */

CLONES void nv_candidates(float outer_encode, const float *restrict amax, int64_t blocks, uint8_t *restrict six,
                          uint8_t *restrict four)
{
    for (int64_t b = 0; b < blocks; b++) {
        float base = amax[b] / E2M1_MAX * outer_encode;
        six[b] = encode_e4m3(at_most(base, E4M3_MAX));
        four[b] = encode_e4m3(at_most(base * 1.5f, E4M3_MAX));
    }
}

/* Even elements to the first half of `out`, odd ones to the second. */
CLONES void split_even_odd(const float *restrict v, int64_t count, float *restrict out)
{
    for (int64_t i = 0; i < count / 2; i++) {
        out[i] = v[2 * i];
        out[count / 2 + i] = v[2 * i + 1];
    }
}

/* Turn [blocks][16] into [16][blocks], in place, so that lanes are blocks: each split makes the lowest bit of an index
 * its highest, and four of them bring the 4 bits of the place in a block to the top. */
static void nv_turn(float *v, int64_t count)
{
    ALIGNED float other[TILE];
    for (int twice = 0; twice < 2; twice++) {
        split_even_odd(v, count, other);
        split_even_odd(other, count, v);
    }
}

/* The error of each block of a row under `scale`; x is turned. A block's sum runs strictly in the order of its
 * elements. */
CLONES void nv_error(struct nv_options options, struct nv_outer outer, const float *restrict x, int64_t blocks,
                     const uint8_t *restrict scale, float *restrict error)
{
    ALIGNED float encode[NV_BLOCKS], value[NV_BLOCKS];
    for (int64_t b = 0; b < blocks; b++) {
        value[b] = decode_e4m3(scale[b]);
        encode[b] = at_most(1.0f / (value[b] * outer.decode), FLOAT_MAX);
        error[b] = 0;
    }
    for (int64_t i = 0; i < NV_BLOCK; i++)
        for (int64_t b = 0; b < blocks; b++) {
            float v = x[i * blocks + b];
            float d = round_e2m1(v * encode[b]) * value[b] * outer.amax / options.largest - v;
            error[b] += options.choice == MAE ? float_of((uint32_t)magnitude_of(d)) : d * d;
        }
}

typedef float nv_row_errors[NV_BLOCK][NV_BLOCKS];

/* The errors of the 16 rows of a tile are added as a tree: row r with r + 8, then + 4, + 2, + 1. */
CLONES void nv_sum_rows(int64_t blocks, nv_row_errors error)
{
    for (int64_t half = NV_BLOCK / 2; half > 0; half /= 2)
        for (int64_t r = 0; r < half; r++)
            for (int64_t b = 0; b < blocks; b++)
                error[r][b] += error[r + half][b];
}

CLONES void nv_smaller(const float *restrict error_six, const float *restrict error_four, const uint8_t *restrict six,
                       const uint8_t *restrict four, int64_t blocks, uint8_t *restrict scale)
{
    for (int64_t b = 0; b < blocks; b++)
        scale[b] = error_four[b] < error_six[b] ? four[b] : six[b];
}

static void nv_choose(struct nv_options options, struct nv_outer outer, int dtype, const void *x, int64_t x_stride,
                      int64_t count, const float *amax, uint8_t *scale)
{
    int64_t blocks = count / NV_BLOCK;
    ALIGNED float v[TILE];
    ALIGNED nv_row_errors error_six, error_four;
    ALIGNED uint8_t six[NV_BLOCKS], four[NV_BLOCKS];
    nv_candidates(outer.encode, amax, blocks, six, four);
    for (int64_t r = 0; r < (options.tile ? NV_BLOCK : 1); r++) {
        load_tile(dtype, at(x, r, x_stride, 0), count, v);
        nv_turn(v, count);
        nv_error(options, outer, v, blocks, six, error_six[r]);
        nv_error(options, outer, v, blocks, four, error_four[r]);
    }
    if (options.tile) {
        nv_sum_rows(blocks, error_six);
        nv_sum_rows(blocks, error_four);
    }
    nv_smaller(error_six[0], error_four[0], six, four, blocks, scale);
}

/* ---- one row, or 16 for tiles ---- */

static void nv_scales(struct nv_options options, struct nv_outer outer, int dtype, const void *x, int64_t x_stride,
                      int64_t count, uint8_t *scale)
{
    ALIGNED float amax[NV_BLOCKS];
    block_amax(dtype, x, x_stride, options.tile ? NV_BLOCK : 1, count, NV_BLOCK, IGNORE_NAN, amax);
    if (options.choice == ALWAYS_SIX)
        nv_six(outer.encode, amax, count / NV_BLOCK, scale);
    else
        nv_choose(options, outer, dtype, x, x_stride, count, amax, scale);
}

static void nv_row(int fake, int dtype, const void *x, int64_t count, const float *encode, const float *decode, void *out)
{
    ALIGNED float v[TILE];
    load_tile(dtype, x, count, v);
    multiply_tile(v, count, NV_BLOCK, encode);
    if (!fake) {
        encode_e2m1_packed(v, count, out);
        return;
    }
    round_e2m1_tile(v, count);
    multiply_tile(v, count, NV_BLOCK, decode);
    store_tile(dtype, v, count, out);
}

static void nv_matrix(struct nv_options options, const float *amax, int64_t amax_step, int fake, int dtype,
                      const void *x, int64_t x_stride, int64_t rows, int64_t cols, void *out, int64_t out_stride,
                      void *scale, int64_t scale_stride)
{
    int64_t high = options.tile ? NV_BLOCK : 1;
    ALIGNED uint8_t chosen[NV_BLOCKS];
    ALIGNED float encode[NV_BLOCKS], decode[NV_BLOCKS];
    struct nv_outer outer;
    for (int64_t r = 0; r < rows; r += high) {
        nv_outer_of(options.largest, amax + r * amax_step, 1, &outer);
        for (int64_t c = 0; c < cols; c += TILE) {
            int64_t count = min_of(TILE, cols - c), blocks = count / NV_BLOCK;
            nv_scales(options, outer, dtype, at(x, r, x_stride, c * size_of(dtype)), x_stride, count, chosen);
            nv_factors(outer.decode, chosen, blocks, encode, decode);
            for (int64_t i = r; i < r + high; i++) {
                nv_row(fake, dtype, at(x, i, x_stride, c * size_of(dtype)), count, encode, decode,
                       out_at(out, i, out_stride, fake ? c * size_of(dtype) : c / 2));
                if (!fake)
                    memcpy(out_at(scale, i, scale_stride, c / NV_BLOCK), chosen, (size_t)blocks);
            }
        }
    }
}

/* amax: the global amax G, one (amax_step 0) or one a row (1). cols, and rows for tiles, are multiples of 16. q: half a
 * byte an element. scale: E4M3 bytes [rows, cols / 16]. */
EXPORT void lowprec_nvfp4_quantize(int tile, int choice, int e4m3_max, const float *amax, int64_t amax_step, int dtype,
                                   const void *x, int64_t x_stride, int64_t rows, int64_t cols, void *q,
                                   int64_t q_stride, void *scale, int64_t scale_stride)
{
    struct nv_options options = {tile, choice, (float)(6 * e4m3_max)};
    IN_DEFAULT_FPU_STATE(nv_matrix(options, amax, amax_step, 0, dtype, x, x_stride, rows, cols, q, q_stride, scale,
                                   scale_stride));
}

/* y: the dtype of x. */
EXPORT void lowprec_nvfp4_fake_quantize(int tile, int choice, int e4m3_max, const float *amax, int64_t amax_step,
                                        int dtype, const void *x, int64_t x_stride, int64_t rows, int64_t cols, void *y,
                                        int64_t y_stride)
{
    struct nv_options options = {tile, choice, (float)(6 * e4m3_max)};
    IN_DEFAULT_FPU_STATE(nv_matrix(options, amax, amax_step, 1, dtype, x, x_stride, rows, cols, y, y_stride, 0, 0));
}

static void nv_global_scale(float largest, const float *amax, int64_t count, float *global_scale)
{
    struct nv_outer outer;
    for (int64_t i = 0; i < count; i++) {
        nv_outer_of(largest, amax + i, 1, &outer);
        global_scale[i] = outer.decode;
    }
}

/* The stored global scale of each global amax. */
EXPORT void lowprec_nvfp4_global_scale(int e4m3_max, const float *amax, int64_t count, float *global_scale)
{
    IN_DEFAULT_FPU_STATE(nv_global_scale((float)(6 * e4m3_max), amax, count, global_scale));
}

/* decode[b] = fl(scale * global scale) */
CLONES void nv_decode_scales(float global_scale, const uint8_t *restrict scale, int64_t blocks, float *restrict decode)
{
    for (int64_t b = 0; b < blocks; b++)
        decode[b] = decode_e4m3(scale[b]) * global_scale;
}

static void nv_decode(const float *global_scale, int64_t global_step, int dtype, const void *q, int64_t q_stride,
                      const void *scale, int64_t scale_stride, int64_t rows, int64_t cols, void *y, int64_t y_stride)
{
    ALIGNED float v[TILE], decode[NV_BLOCKS];
    for (int64_t r = 0; r < rows; r++)
        for (int64_t c = 0; c < cols; c += TILE) {
            int64_t count = min_of(TILE, cols - c);
            decode_e2m1_packed(at(q, r, q_stride, c / 2), count, v);
            nv_decode_scales(global_scale[r * global_step], (const uint8_t *)at(scale, r, scale_stride, c / NV_BLOCK),
                             count / NV_BLOCK, decode);
            multiply_tile(v, count, NV_BLOCK, decode);
            store_tile(dtype, v, count, out_at(y, r, y_stride, c * size_of(dtype)));
        }
}

/* global_scale: one (global_step 0) or one a row (1). y: dtype. */
EXPORT void lowprec_nvfp4_dequantize(const float *global_scale, int64_t global_step, const void *q, int64_t q_stride,
                                     const void *scale, int64_t scale_stride, int64_t rows, int64_t cols, int dtype,
                                     void *y, int64_t y_stride)
{
    IN_DEFAULT_FPU_STATE(nv_decode(global_scale, global_step, dtype, q, q_stride, scale, scale_stride, rows, cols, y,
                                   y_stride));
}
