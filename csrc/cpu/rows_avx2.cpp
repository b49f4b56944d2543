#include "instruction_sets.h"

#if TRACE_HAS_AVX2
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma"))), apply_to = function)
#else
#pragma GCC target("avx2,fma")
#endif
#define TRACE_AVX2
#include "row_kernels.h"

namespace trace_megatron {
extern const RowKernels kRowsAvx2{"avx2", row_ops<float>(), row_ops<BFloat16>()};
}
#if defined(__clang__)
#pragma clang attribute pop
#endif
#endif
