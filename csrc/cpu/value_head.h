// RMSNorm, one linear unit and a sigmoid, at chosen rows of the hidden states only.
//
// Legend: A chosen rows, C channels. With c = norm_weight * weight and r = 1 / sqrt(mean(x^2) + eps):
// prob = sigmoid(r * sum(c x) + bias).
#pragma once

#include <cstdint>

namespace trace_megatron {

struct ValueHead {
  const float* norm_weight;  // [C]
  const float* weight;       // [C]
  float bias;
  float eps;
  int64_t num_channels;
};

// What a row leaves for the backward pass: r and sum(c x).
struct RowSums {
  float inverse_rms, product;
};

RowSums value_head_sums(const ValueHead& head, const float* row);

// Adds the gradients of one row; `logit_grad` is that of r * sum(c x) + bias. grad_row and scaled_sum are [C];
// scaled_sum collects logit_grad * r * x, whence both weights' gradients follow.
void add_value_head_grads(const ValueHead& head, const float* row, RowSums sums, float logit_grad, float* grad_row,
                          float* scaled_sum);

}  // namespace trace_megatron
