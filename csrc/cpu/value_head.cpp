#include "value_head.h"

#include <cmath>

#include "simd.h"

namespace trace_megatron {

RowSums value_head_sums(const ValueHead& head, const float* row) {
  const int64_t whole = head.num_channels / kWidth * kWidth;
  Vec squares = splat(0.0f), products = splat(0.0f);
  for (int64_t i = 0; i < whole; i += kWidth) {
    const Vec x = load(row + i);
    squares += x * x;
    products += load(head.norm_weight + i) * load(head.weight + i) * x;
  }
  float square = sum_lanes(squares), product = sum_lanes(products);
  for (int64_t i = whole; i < head.num_channels; ++i) {
    square += row[i] * row[i];
    product += head.norm_weight[i] * head.weight[i] * row[i];
  }
  return {1.0f / std::sqrt(square / float(head.num_channels) + head.eps), product};
}

void add_value_head_grads(const ValueHead& head, const float* row, RowSums sums, float logit_grad, float* grad_row,
                          float* scaled_sum) {
  const float r = sums.inverse_rms, direct = logit_grad * r;
  const float through_norm = logit_grad * r * r * r * sums.product / float(head.num_channels);
  for (int64_t i = 0; i < head.num_channels; ++i) {
    grad_row[i] += direct * head.norm_weight[i] * head.weight[i] - through_norm * row[i];
    scaled_sum[i] += direct * row[i];
  }
}

}  // namespace trace_megatron
