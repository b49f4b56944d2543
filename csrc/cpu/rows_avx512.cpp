#include "instruction_sets.h"

#if TRACE_HAS_AVX512
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma"))), \
                             apply_to = function)
#else
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")
#endif
#define TRACE_AVX512
#include "row_kernels.h"

namespace trace_megatron {
extern const RowKernels kRowsAvx512{"avx512", row_ops<float>(), row_ops<BFloat16>()};
}
#if defined(__clang__)
#pragma clang attribute pop
#endif
#endif
