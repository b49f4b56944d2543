// What training does to one row after another, each in one or two passes over the row: softmax, RMSNorm, SwiGLU.
//
// Rows are float32 or bfloat16; all sums are float32.
#pragma once

#include <cstdint>

namespace trace_megatron {

// Of the scaled logits x of a row, about its own highest one.
struct SoftmaxStatistics {
  float highest;   // -3.4e38 of an empty row
  float sum;       // of exp(x - highest)
  float weighted;  // sum of exp(x - highest) * (x - highest)
  float label;     // x at the label, 0 where the label is not in [0, size)
};

struct RowOps {
  SoftmaxStatistics (*softmax_statistics)(const void* logits, int64_t size, int64_t label, float scale);
  // logits <- slope * (one-hot of the label - exp(x - log_normalizer))
  void (*softmax_gradient)(void* logits, int64_t size, int64_t label, float scale, float log_normalizer, float slope);
  // out = x * r * weight; returns r = 1 / rms(x)
  float (*rms_norm)(const void* x, const void* weight, int64_t size, float eps, void* out);
  void (*rms_norm_gradient)(const void* grad, const void* x, const void* weight, int64_t size, float r, void* grad_x);
  // sums [size] += grad * x * r
  void (*rms_norm_weight_gradient)(const void* grad, const void* x, int64_t size, float r, float* sums);
  // out [size] = silu(gate) * up, where x is gate [size] and then up [size]
  void (*swiglu)(const void* x, int64_t size, void* out);
  void (*swiglu_gradient)(const void* grad, const void* x, int64_t size, void* grad_x);
};

// One build for one instruction set.
struct RowKernels {
  const char* name;
  RowOps float32, bfloat16;
};

// The fastest kernels that this processor runs, or those named (generic, avx2, avx512, avx512_bf16); null if it cannot.
const RowKernels* row_kernels(const char* name = nullptr);

}  // namespace trace_megatron
