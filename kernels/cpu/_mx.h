/* MXFP8 and MXFP4: lowprec/formats/mxfp8.py and mxfp4.py have the rules. */

#pragma once

#include "_tiles.h"

#define MX_BLOCK 32
#define MX_BLOCKS (TILE / MX_BLOCK)

enum mx_element { E4M3, E2M1 };
enum mx_rule { RCEIL, FLOOR, EVEN };

INLINE uint32_t mx_scale(float amax, float reciprocal_of_max, int rule)
{
    if (rule == RCEIL)
        return encode_e8m0(amax * reciprocal_of_max);
    /* EVEN rounds to one mantissa bit, ties away: half of that bit's weight is added. 6 lies in the binade of 2^2. */
    int32_t exponent = (int32_t)((bits_of(amax) + (rule == EVEN ? 1u << 21 : 0)) >> 23) - 2;
    exponent = exponent > 0 ? exponent : 0;
    return amax > FLOAT_MAX ? 254 : (uint32_t)exponent;
}

/* For each block the stored byte, what its elements are multiplied by, and what its codes are. */
CLONES void mx_scales(int element, int rule, const float *restrict amax, int64_t blocks, uint8_t *restrict byte,
                      float *restrict encode, float *restrict decode)
{
    float reciprocal = 1.0f / (element == E4M3 ? E4M3_MAX : E2M1_MAX);
    for (int64_t b = 0; b < blocks; b++) {
        uint32_t scale = mx_scale(amax[b], reciprocal, rule);
        byte[b] = (uint8_t)scale;
        encode[b] = inverse_e8m0(scale);
        decode[b] = decode_e8m0(scale);
    }
}

CLONES void decode_e8m0_tile(const uint8_t *restrict byte, int64_t blocks, float *restrict v)
{
    for (int64_t b = 0; b < blocks; b++)
        v[b] = decode_e8m0(byte[b]);
}

/* One tile of a row: to codes, or with `fake` to the values that those codes decode to, in dtype. */
static void mx_tile(int element, int rule, int fake, int dtype, const void *x, int64_t count, void *out, uint8_t *byte)
{
    ALIGNED float v[TILE], amax[MX_BLOCKS], encode[MX_BLOCKS], decode[MX_BLOCKS];
    block_amax(dtype, x, 0, 1, count, MX_BLOCK, IGNORE_NAN, amax);
    mx_scales(element, rule, amax, count / MX_BLOCK, byte, encode, decode);
    load_tile(dtype, x, count, v);
    multiply_tile(v, count, MX_BLOCK, encode);
    if (!fake && element == E4M3) {
        encode_e4m3_tile(v, count, out);
    } else if (!fake) {
        encode_e2m1_packed(v, count, out);
    } else {
        if (element == E4M3)
            round_e4m3_tile(v, count);
        else
            round_e2m1_tile(v, count);
        multiply_tile(v, count, MX_BLOCK, decode);
        store_tile(dtype, v, count, out);
    }
}

static void mx_matrix(int element, int rule, int fake, int dtype, const void *x, int64_t x_stride, int64_t rows,
                      int64_t cols, void *out, int64_t out_stride, void *scale, int64_t scale_stride)
{
    ALIGNED uint8_t byte[MX_BLOCKS];
    for (int64_t r = 0; r < rows; r++)
        for (int64_t c = 0; c < cols; c += TILE) {
            int64_t count = min_of(TILE, cols - c), first = fake ? c * size_of(dtype) : element == E4M3 ? c : c / 2;
            mx_tile(element, rule, fake, dtype, at(x, r, x_stride, c * size_of(dtype)), count,
                    out_at(out, r, out_stride, first), byte);
            if (!fake)
                memcpy(out_at(scale, r, scale_stride, c / MX_BLOCK), byte, (size_t)(count / MX_BLOCK));
        }
}

/* cols is a multiple of 32. q: one byte an element, or for E2M1 half of one. scale: E8M0 bytes [rows, cols / 32]. */
EXPORT void lowprec_mx_quantize(int element, int rule, int dtype, const void *x, int64_t x_stride, int64_t rows,
                                int64_t cols, void *q, int64_t q_stride, void *scale, int64_t scale_stride)
{
    IN_DEFAULT_FPU_STATE(
        mx_matrix(element, rule, 0, dtype, x, x_stride, rows, cols, q, q_stride, scale, scale_stride));
}

/* y: the dtype of x. */
EXPORT void lowprec_mx_fake_quantize(int element, int rule, int dtype, const void *x, int64_t x_stride, int64_t rows,
                                     int64_t cols, void *y, int64_t y_stride)
{
    IN_DEFAULT_FPU_STATE(mx_matrix(element, rule, 1, dtype, x, x_stride, rows, cols, y, y_stride, 0, 0));
}

static void mx_decode(int element, int dtype, const void *q, int64_t q_stride, const void *scale, int64_t scale_stride,
                      int64_t rows, int64_t cols, void *y, int64_t y_stride)
{
    ALIGNED float v[TILE], decode[MX_BLOCKS];
    for (int64_t r = 0; r < rows; r++)
        for (int64_t c = 0; c < cols; c += TILE) {
            int64_t count = min_of(TILE, cols - c);
            const void *codes = at(q, r, q_stride, element == E4M3 ? c : c / 2);
            if (element == E4M3)
                decode_e4m3_tile(codes, count, v);
            else
                decode_e2m1_packed(codes, count, v);
            decode_e8m0_tile((const uint8_t *)at(scale, r, scale_stride, c / MX_BLOCK), count / MX_BLOCK, decode);
            multiply_tile(v, count, MX_BLOCK, decode);
            store_tile(dtype, v, count, out_at(y, r, y_stride, c * size_of(dtype)));
        }
}

/* y: dtype. */
EXPORT void lowprec_mx_dequantize(int element, const void *q, int64_t q_stride, const void *scale, int64_t scale_stride,
                                  int64_t rows, int64_t cols, int dtype, void *y, int64_t y_stride)
{
    IN_DEFAULT_FPU_STATE(mx_decode(element, dtype, q, q_stride, scale, scale_stride, rows, cols, y, y_stride));
}
