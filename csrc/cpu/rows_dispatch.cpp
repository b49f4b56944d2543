#include <cstring>

#include "instruction_sets.h"
#include "rows.h"

namespace trace_megatron {

extern const RowKernels kRowsGeneric;
#if TRACE_HAS_AVX2
extern const RowKernels kRowsAvx2;
#endif
#if TRACE_HAS_AVX512
extern const RowKernels kRowsAvx512;
#endif

const RowKernels* row_kernels(const char* name) {
  if (name && !strcmp(name, "avx512_bf16")) name = "avx512";  // nothing here multiplies bfloat16 numbers in pairs
  const auto wanted = [name](const RowKernels& kernels) { return !name || !strcmp(name, kernels.name); };
#if TRACE_HAS_AVX2
  __builtin_cpu_init();
#endif
#if TRACE_HAS_AVX512
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
      __builtin_cpu_supports("avx512vl") && wanted(kRowsAvx512))
    return &kRowsAvx512;
#endif
#if TRACE_HAS_AVX2
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && wanted(kRowsAvx2)) return &kRowsAvx2;
#endif
  return wanted(kRowsGeneric) ? &kRowsGeneric : nullptr;
}

}  // namespace trace_megatron
