#include "../cpu/value_head.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include <cmath>

#include "check.h"
#include "ops.h"

namespace trace_megatron {
namespace {

struct Call {
  ValueHead head;
  Tensor rows;  // [A, C] float32, the chosen rows
  Tensor norm_weight, weight;
};

Call check(const Tensor& hidden, const Tensor& index, const Tensor& norm_weight, const Tensor& weight,
           const OptionalTensor& bias, double eps) {
  TORCH_CHECK_VALUE(hidden.device().is_cpu() && hidden.dim() == 2 &&
                        (hidden.scalar_type() == at::kFloat || hidden.scalar_type() == at::kBFloat16),
                    "expected hidden [T, C] as float32 or bfloat16 on the cpu, found ", hidden.scalar_type(), " ",
                    hidden.sizes(), " on ", hidden.device());
  const int64_t* place = checked_int64(index, "index");
  for (int64_t i = 0; i < index.size(0); ++i)
    TORCH_CHECK_VALUE(place[i] >= 0 && place[i] < hidden.size(0), "expected index within [0, ", hidden.size(0),
                      "), found ", place[i], " at place ", i);
  for (const Tensor& x : {norm_weight, weight})
    TORCH_CHECK_VALUE(x.device().is_cpu() && x.dim() == 1 && x.size(0) == hidden.size(1) && x.is_floating_point(),
                      "expected norm_weight and weight as floats [", hidden.size(1), "] on the cpu, found ",
                      x.scalar_type(), " ", x.sizes(), " on ", x.device());
  TORCH_CHECK_VALUE(!bias || (bias->device().is_cpu() && bias->numel() == 1), "expected one bias on the cpu, found ",
                    bias ? bias->sizes() : at::IntArrayRef());
  Call call;
  call.rows = hidden.index_select(0, index).to(at::kFloat).contiguous();
  call.norm_weight = norm_weight.to(at::kFloat).contiguous();
  call.weight = weight.to(at::kFloat).contiguous();
  call.head = {call.norm_weight.const_data_ptr<float>(), call.weight.const_data_ptr<float>(),
               bias ? bias->item().toFloat() : 0.0f, float(eps), hidden.size(1)};
  return call;
}

}  // namespace

Tensor value_head_forward(const Tensor& hidden, const Tensor& index, const Tensor& norm_weight, const Tensor& weight,
                          const OptionalTensor& bias, double eps) {
  const Call call = check(hidden, index, norm_weight, weight, bias, eps);
  Tensor probs = at::empty({index.size(0)}, at::kFloat);
  float* to = probs.mutable_data_ptr<float>();
  const float* rows = call.rows.const_data_ptr<float>();
  for (int64_t i = 0; i < index.size(0); ++i) {
    const RowSums sums = value_head_sums(call.head, rows + i * call.head.num_channels);
    to[i] = 1.0f / (1.0f + std::exp(-(sums.inverse_rms * sums.product + call.head.bias)));
  }
  return probs;
}

std::tuple<Tensor, Tensor, Tensor, Tensor> value_head_backward(const Tensor& grad_probs, const Tensor& probs,
                                                               const Tensor& hidden, const Tensor& index,
                                                               const Tensor& norm_weight, const Tensor& weight,
                                                               const OptionalTensor& bias, double eps) {
  const Call call = check(hidden, index, norm_weight, weight, bias, eps);
  for (const Tensor& x : {grad_probs, probs})
    TORCH_CHECK_VALUE(x.device().is_cpu() && x.scalar_type() == at::kFloat && x.sizes() == index.sizes(),
                      "expected probs and their gradient as float32 ", index.sizes(), " on the cpu, found ",
                      x.scalar_type(), " ", x.sizes());
  const Tensor grads = grad_probs.contiguous(), saved = probs.contiguous();
  const int64_t num_channels = call.head.num_channels;
  Tensor grad_rows = at::zeros({index.size(0), num_channels}, at::kFloat),
         scaled = at::zeros({num_channels}, at::kFloat);
  float bias_grad = 0.0f;
  for (int64_t i = 0; i < index.size(0); ++i) {
    const float prob = saved.const_data_ptr<float>()[i];
    const float logit_grad = grads.const_data_ptr<float>()[i] * prob * (1.0f - prob);
    const float* row = call.rows.const_data_ptr<float>() + i * num_channels;
    add_value_head_grads(call.head, row, value_head_sums(call.head, row), logit_grad,
                         grad_rows.mutable_data_ptr<float>() + i * num_channels, scaled.mutable_data_ptr<float>());
    bias_grad += logit_grad;
  }
  const Tensor grad_hidden = at::zeros(hidden.sizes(), at::kFloat).index_add_(0, index, grad_rows);
  const Tensor grad_bias = at::empty({1}, at::kFloat).fill_(bias_grad);
  return {grad_hidden.to(hidden.scalar_type()), scaled.mul(call.weight).to(norm_weight.scalar_type()),
          scaled.mul(call.norm_weight).to(weight.scalar_type()), grad_bias};
}

}  // namespace trace_megatron
