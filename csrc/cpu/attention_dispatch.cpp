#include <cstring>

#include "attention.h"
#include "instruction_sets.h"

namespace trace_megatron {

extern const AttentionKernels kAttentionGeneric;
#if TRACE_HAS_AVX2
extern const AttentionKernels kAttentionAvx2;
#endif
#if TRACE_HAS_AVX512
extern const AttentionKernels kAttentionAvx512;
#endif
#if TRACE_HAS_AVX512_BF16
extern const AttentionKernels kAttentionAvx512BFloat16;
#endif

const AttentionKernels* attention_kernels(const char* name) {
  const auto wanted = [name](const AttentionKernels& kernels) { return !name || !strcmp(name, kernels.name); };
#if TRACE_HAS_AVX2
  __builtin_cpu_init();
#endif
#if TRACE_HAS_AVX512
  const bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
#if TRACE_HAS_AVX512_BF16
  if (avx512 && __builtin_cpu_supports("avx512bf16") && wanted(kAttentionAvx512BFloat16))
    return &kAttentionAvx512BFloat16;
#endif
  if (avx512 && wanted(kAttentionAvx512)) return &kAttentionAvx512;
#endif
#if TRACE_HAS_AVX2
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && wanted(kAttentionAvx2)) return &kAttentionAvx2;
#endif
  return wanted(kAttentionGeneric) ? &kAttentionGeneric : nullptr;
}

}  // namespace trace_megatron
