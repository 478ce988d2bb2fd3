/* What the kernels need from the compiler, the machine and the process. */

#pragma once

#include <fenv.h>
#include <float.h>
#include <stdint.h>
#include <string.h>

#if defined(__FAST_MATH__) || (defined(__FINITE_MATH_ONLY__) && __FINITE_MATH_ONLY__)
#error "these kernels need IEEE arithmetic: build without -ffast-math, -Ofast and -ffinite-math-only"
#endif
#if FLT_EVAL_METHOD != 0 && FLT_EVAL_METHOD != 16
#error "these kernels need float operations that round to float, unlike the x87's"
#endif
#if !defined(__BYTE_ORDER__) || __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "checkpoints are little-endian, and so must the machine be"
#endif

#define EXPORT __attribute__((visibility("default")))
#define INLINE static inline __attribute__((always_inline))

/* A function with a vector loop is compiled for several instruction sets, and the loader picks one at run time.
 * Results do not depend on which: every operation is one IEEE rounding, a sum has one order, nothing is contracted. */
#if defined(__x86_64__) && defined(__GLIBC__) && !defined(__clang__) && __GNUC__ >= 12 && !defined(LOWPREC_NO_CLONES)
#define CLONES static __attribute__((noinline, target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#define HAS_CLONES 1
#else
#define CLONES static __attribute__((noinline))
#define HAS_CLONES 0
#endif

/* The bytes must not depend on what else runs in the process: another library may have made the FPU flush subnormals
 * or round another way. Arithmetic happens only in functions marked CLONES, which no compiler moves out of between. */
#define IN_DEFAULT_FPU_STATE(statement) \
    do {                                \
        fenv_t callers;                 \
        fegetenv(&callers);             \
        fesetenv(FE_DFL_ENV);           \
        statement;                      \
        fesetenv(&callers);             \
    } while (0)
