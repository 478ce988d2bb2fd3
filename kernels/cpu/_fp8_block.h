/* FP8 blocks: lowprec/formats/fp8_block.py has the rules. */

#pragma once

#include "_tiles.h"

enum fp8_rule { TE, DEEPGEMM, DEEPSEEK };

struct fp8_options {
    int rule, pow2;
    int64_t block_rows, block_cols;
};

/* For each block the stored scale, and what its elements are multiplied by, or for deepseek divided by. */
CLONES void fp8_scales(struct fp8_options options, float dtype_max, const float *amax, int64_t blocks, float *scale,
                       float *factor)
{
    for (int64_t b = 0; b < blocks; b++) {
        if (options.rule == TE) {
            float encode = E4M3_MAX / amax[b];
            encode = encode > FLOAT_MAX ? dtype_max : encode;
            encode = options.pow2 ? floor_power_of_two(encode) : encode;
            encode = amax[b] == 0 || amax[b] > FLOAT_MAX ? 1.0f : encode;
            scale[b] = 1.0f / encode;
            factor[b] = encode;
        } else {
            float decode = at_least(amax[b], 1e-4f) / E4M3_MAX;
            decode = options.pow2 ? ceil_power_of_two(decode) : decode;
            scale[b] = decode;
            factor[b] = options.rule == DEEPGEMM ? 1.0f / decode : decode;
        }
    }
}

/* `count` elements of one row: to codes, or with `fake` to the values that those codes decode to, in dtype. */
static void fp8_row(struct fp8_options options, int fake, int dtype, const void *x, int64_t count, const float *factor,
                    const float *scale, void *out)
{
    ALIGNED float v[TILE];
    load_tile(dtype, x, count, v);
    if (options.rule == DEEPSEEK)
        divide_tile(v, count, options.block_cols, factor);
    else
        multiply_tile(v, count, options.block_cols, factor);
    if (!fake) {
        encode_e4m3_tile(v, count, out);
        return;
    }
    round_e4m3_tile(v, count);
    multiply_tile(v, count, options.block_cols, scale);
    store_tile(dtype, v, count, out);
}

/* The largest |x| of each block of a region one block high: blocks within TILE columns, or one wider block. */
static void fp8_amax(struct fp8_options options, int dtype, const void *x, int64_t x_stride, int64_t rows, int64_t cols,
                     float *amax)
{
    int nan = options.rule == TE ? IGNORE_NAN : KEEP_NAN;
    block_amax(dtype, x, x_stride, rows, min_of(TILE, cols), options.block_cols, nan, amax);
    for (int64_t c = TILE; c < cols; c += TILE) {
        float part;
        block_amax(dtype, at(x, 0, 0, c * size_of(dtype)), x_stride, rows, min_of(TILE, cols - c), TILE, nan, &part);
        amax[0] = magnitude_of(part) > magnitude_of(amax[0]) ? part : amax[0];
    }
}

static void fp8_region(struct fp8_options options, int fake, int dtype, const void *x, int64_t x_stride, int64_t rows,
                       int64_t cols, void *out, int64_t out_stride, float *scale)
{
    int64_t blocks = (cols + options.block_cols - 1) / options.block_cols, size = fake ? size_of(dtype) : 1;
    ALIGNED float amax[TILE], factor[TILE];
    fp8_amax(options, dtype, x, x_stride, rows, cols, amax);
    fp8_scales(options, largest_finite(dtype), amax, blocks, scale, factor);
    for (int64_t r = 0; r < rows; r++)
        for (int64_t c = 0; c < cols; c += TILE) /* more than once only for a block wider than TILE */
            fp8_row(options, fake, dtype, at(x, r, x_stride, c * size_of(dtype)), min_of(TILE, cols - c), factor, scale,
                    out_at(out, r, out_stride, c * size));
}

/* Columns done at a time: whole blocks that fit TILE, few enough that a second-level cache keeps their rows between
 * amax and encoding. */
static int64_t fp8_region_cols(struct fp8_options options)
{
    int64_t most = options.block_rows > 64 ? TILE / 2 : TILE;
    return options.block_cols >= most ? options.block_cols : most / options.block_cols * options.block_cols;
}

static void fp8_matrix(struct fp8_options options, int fake, int dtype, const void *x, int64_t x_stride, int64_t rows,
                       int64_t cols, void *out, int64_t out_stride, void *scale, int64_t scale_stride)
{
    int64_t high = options.block_rows, wide = fp8_region_cols(options), size = fake ? size_of(dtype) : 1;
    ALIGNED float region_scale[TILE];
    for (int64_t r = 0; r < rows; r += high)
        for (int64_t c = 0; c < cols; c += wide) {
            int64_t region_rows = min_of(high, rows - r), region_cols = min_of(wide, cols - c);
            int64_t blocks = (region_cols + options.block_cols - 1) / options.block_cols;
            fp8_region(options, fake, dtype, at(x, r, x_stride, c * size_of(dtype)), x_stride, region_rows, region_cols,
                       out_at(out, r, out_stride, c * size), out_stride, region_scale);
            if (!fake)
                memcpy(out_at(scale, r / high, scale_stride, c / options.block_cols * 4), region_scale,
                       (size_t)blocks * sizeof *region_scale);
        }
}

/* q: one byte an element. scale: float32 [rows / block_rows, cols / block_cols], rounded up. The first row of x begins
 * a block. */
EXPORT void lowprec_fp8_block_quantize(int rule, int pow2, int64_t block_rows, int64_t block_cols, int dtype,
                                       const void *x, int64_t x_stride, int64_t rows, int64_t cols, void *q,
                                       int64_t q_stride, void *scale, int64_t scale_stride)
{
    struct fp8_options options = {rule, pow2, block_rows, block_cols};
    IN_DEFAULT_FPU_STATE(fp8_matrix(options, 0, dtype, x, x_stride, rows, cols, q, q_stride, scale, scale_stride));
}

/* y: the dtype of x. */
EXPORT void lowprec_fp8_block_fake_quantize(int rule, int pow2, int64_t block_rows, int64_t block_cols, int dtype,
                                            const void *x, int64_t x_stride, int64_t rows, int64_t cols, void *y,
                                            int64_t y_stride)
{
    struct fp8_options options = {rule, pow2, block_rows, block_cols};
    IN_DEFAULT_FPU_STATE(fp8_matrix(options, 1, dtype, x, x_stride, rows, cols, y, y_stride, 0, 0));
}

/* Columns from c on that a tile can decode: whole blocks, or a piece of one that is wider. */
static int64_t fp8_decode_cols(int64_t block_cols, int64_t c)
{
    return block_cols > TILE ? min_of(TILE, block_cols - c % block_cols) : TILE / block_cols * block_cols;
}

static void fp8_decode(int64_t block_rows, int64_t block_cols, int dtype, const void *q, int64_t q_stride,
                       const void *scale, int64_t scale_stride, int64_t rows, int64_t cols, void *y, int64_t y_stride)
{
    ALIGNED float v[TILE], factor[TILE];
    for (int64_t r = 0; r < rows; r++)
        for (int64_t c = 0, count; c < cols; c += count) {
            count = min_of(fp8_decode_cols(block_cols, c), cols - c);
            int64_t first = c / block_cols, blocks = (c + count - 1) / block_cols - first + 1;
            memcpy(factor, at(scale, r / block_rows, scale_stride, first * 4), (size_t)blocks * sizeof *factor);
            decode_e4m3_tile((const uint8_t *)at(q, r, q_stride, c), count, v);
            multiply_tile(v, count, block_cols, factor);
            store_tile(dtype, v, count, out_at(y, r, y_stride, c * size_of(dtype)));
        }
}

/* y: dtype. */
EXPORT void lowprec_fp8_block_dequantize(int64_t block_rows, int64_t block_cols, const void *q, int64_t q_stride,
                                         const void *scale, int64_t scale_stride, int64_t rows, int64_t cols, int dtype,
                                         void *y, int64_t y_stride)
{
    IN_DEFAULT_FPU_STATE(
        fp8_decode(block_rows, block_cols, dtype, q, q_stride, scale, scale_stride, rows, cols, y, y_stride));
}
