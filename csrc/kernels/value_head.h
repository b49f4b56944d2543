// RMSNorm, one linear unit and a sigmoid at chosen rows. Legend: T tokens, C channels, A anchors.
//
// With c = norm_weight * weight and r = 1 / sqrt(mean(x^2) + eps): prob = sigmoid(r * sum(c x) + bias).
#pragma once

#include "launch.h"

namespace trace_megatron {

struct ValueHeadParams {
  Global<const float> float_hidden;      // [T, C]; null where it is bfloat16
  Global<const uint16_t> bf16_hidden;    // [T, C], the bits of bfloat16, or null
  Global<const int64_t> index;           // [A], repeats allowed
  Global<const float> norm_weight;       // [C]
  Global<const float> weight;            // [C]
  Global<const float> bias;              // [1], or null
  Global<float> probs;                   // [A]; NaN where index is no row
  int64_t num_tokens, num_channels, num_anchors;
  float eps;
};

struct ValueHeadBackwardParams {
  Global<const float> float_hidden;      // as above
  Global<const uint16_t> bf16_hidden;
  Global<const int64_t> index;
  Global<const float> norm_weight;
  Global<const float> weight;
  Global<const float> probs;             // [A] from the forward pass
  Global<const float> grad_probs;        // [A]
  Global<float> scales;                  // [3, A] workspace
  Global<float> partial_sums;            // [ceil(A / kValueHeadChunk), C] workspace
  Global<float> float_grad_hidden;       // [T, C], zero before; null where it is bfloat16
  Global<uint16_t> bf16_grad_hidden;     // [T, C], zero before, or null
  Global<float> grad_norm_weight;        // [C]
  Global<float> grad_weight;             // [C]
  Global<float> grad_bias;               // [1]
  int64_t num_tokens, num_channels, num_anchors;
  float eps;
};

constexpr int64_t kValueHeadChunk = 64;  // anchors whose share of the weights' gradients one block adds up

// Deterministic, both.
extern "C" cudaError_t launch_value_head(const ValueHeadParams* params, cudaStream_t stream);
extern "C" cudaError_t launch_value_head_backward(const ValueHeadBackwardParams* params, cudaStream_t stream);

}  // namespace trace_megatron
