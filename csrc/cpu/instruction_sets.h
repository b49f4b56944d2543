// Which instruction sets beyond the compiler's default get kernels of their own, chosen when the program runs.
#pragma once

#if defined(__GNUC__) && defined(__x86_64__)  // GCC and Clang
#define TRACE_HAS_AVX2 1
#define TRACE_HAS_AVX512 1
#if defined(__clang__) || __GNUC__ >= 10
#define TRACE_HAS_AVX512_BF16 1
#else
#define TRACE_HAS_AVX512_BF16 0
#endif
#else
#define TRACE_HAS_AVX2 0
#define TRACE_HAS_AVX512 0
#define TRACE_HAS_AVX512_BF16 0
#endif
