/* The compiled kernels: quantize, dequantize and fake-quantize on stripes of rows, byte for byte as the reference.
 *
 * A matrix is a pointer, its rows and columns, and its stride: the bytes from one row to the next. So a caller may
 * hand over any stripe of whole blocks of a tensor, in any buffer and from any thread: nothing here allocates, keeps
 * state, or knows Python. Shapes and alignment to blocks are the caller's to check. Arguments come in the order
 * options, input (dtype first, and last for a decoder's output), output.
 *
 *     _platform.h    what is asked of compiler, machine and process
 *     _codecs.h      one element: E4M3, E2M1, E8M0, float16, bfloat16
 *     _tiles.h       the vector loops, on a tile of a row
 *     _FORMAT.h      the kernels of a format, made of those loops */

#include "_fp8_block.h"
#include "_int4_group.h"
#include "_mx.h"
#include "_nvfp4.h"

/* Of the sources and flags that this library was built from (_build.py). */
EXPORT const char *lowprec_digest(void)
{
    return LOWPREC_NATIVE_DIGEST;
}

/* The instruction set that the loader picked. */
EXPORT const char *lowprec_instruction_set(void)
{
#if HAS_CLONES
    __builtin_cpu_init();
    return __builtin_cpu_supports("x86-64-v4")   ? "x86-64-v4 (AVX-512)"
           : __builtin_cpu_supports("x86-64-v3") ? "x86-64-v3 (AVX2)"
                                                 : "x86-64 (SSE2)";
#else
    return "the compiler's default";
#endif
}

static void row_amax(int dtype, const void *x, int64_t x_stride, int64_t rows, int64_t cols, float *amax)
{
    for (int64_t r = 0; r < rows; r++) {
        int32_t lift = lift_of(dtype, IGNORE_NAN), pattern = 0;
        if (cols > 0)
            row_patterns(dtype, at(x, r, x_stride, 0), cols, cols, lift, &pattern);
        patterns_to_f32(dtype, &pattern, 1, &amax[r]);
    }
}

/* amax[rows]: the largest |x| of each row, NaN ignored, 0 for an empty row. */
EXPORT void lowprec_row_amax(int dtype, const void *x, int64_t x_stride, int64_t rows, int64_t cols, float *amax)
{
    IN_DEFAULT_FPU_STATE(row_amax(dtype, x, x_stride, rows, cols, amax));
}
