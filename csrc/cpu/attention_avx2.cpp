#include "instruction_sets.h"

#if TRACE_HAS_AVX2
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma"))), apply_to = function)
#else
#pragma GCC target("avx2,fma")
#endif
#define TRACE_AVX2
#include "attention_kernels.h"

namespace trace_megatron {
extern const AttentionKernels kAttentionAvx2{"avx2", forward_workspace, backward_workspace, forward, backward};
}
#if defined(__clang__)
#pragma clang attribute pop
#endif
#endif
