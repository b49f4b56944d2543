#include "instruction_sets.h"

#if TRACE_HAS_AVX512
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma"))), \
                             apply_to = function)
#else
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")
#endif
#define TRACE_AVX512
#include "attention_kernels.h"

namespace trace_megatron {
extern const AttentionKernels kAttentionAvx512{"avx512", forward_workspace, backward_workspace, forward, backward};
}
#if defined(__clang__)
#pragma clang attribute pop
#endif
#endif
