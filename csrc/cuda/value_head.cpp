#include <ATen/ops/empty.h>
#include <ATen/ops/zeros_like.h>

#include "../kernels/value_head.h"
#include "check.h"
#include "ops.h"

namespace trace_megatron::cuda {
namespace {

// The weights as float32, kept alive until the launch.
struct Weights {
  Tensor norm_weight, weight;
};

// Checks what both passes share. Rows of index are checked by the kernels: those that are none give NaN and no gradient.
template <class Params>
Params head_params(const Tensor& hidden, const Tensor& index, const Tensor& norm_weight, const Tensor& weight,
                   const std::optional<Tensor>& bias, double eps, Weights& weights) {
  check_device(hidden, "hidden");
  const bool is_float = hidden.scalar_type() == at::kFloat;
  TORCH_CHECK_VALUE(hidden.dim() == 2 && (is_float || hidden.scalar_type() == at::kBFloat16) && hidden.size(1) > 0,
                    "expected hidden [T, C] as float32 or bfloat16, found ", hidden.scalar_type(), " ", hidden.sizes());
  check_contiguous(hidden, "hidden");
  TORCH_CHECK_VALUE(index.dim() == 1, "expected index as a vector, found sizes ", index.sizes());
  check_at_most(hidden.size(0), kMostInt32, "tokens");
  check_at_most(hidden.size(1), kMostInt32, "channels");
  check_at_most(index.size(0), kValueHeadChunk * 65535, "anchors");  // of a grid's second dimension
  for (const Tensor& x : {norm_weight, weight})
    TORCH_CHECK_VALUE(x.device() == hidden.device() && x.dim() == 1 && x.size(0) == hidden.size(1) && x.is_floating_point(),
                      "expected norm_weight and weight as floats [", hidden.size(1), "] on ", hidden.device(),
                      ", found ", x.scalar_type(), " ", x.sizes(), " on ", x.device());
  TORCH_CHECK_VALUE(!bias || (bias->device() == hidden.device() && bias->numel() == 1 && bias->is_floating_point()),
                    "expected one bias on ", hidden.device(), ", found ", bias ? bias->sizes() : at::IntArrayRef());
  weights = {norm_weight.to(at::kFloat).contiguous(), weight.to(at::kFloat).contiguous()};
  Params params{};
  if (is_float)
    params.float_hidden = hidden.const_data_ptr<float>();
  else
    params.bf16_hidden = static_cast<const uint16_t*>(hidden.const_data_ptr());
  params.index = checked<int64_t>(index, "index", at::kLong, {index.size(0)}, hidden.device());
  params.norm_weight = weights.norm_weight.const_data_ptr<float>();
  params.weight = weights.weight.const_data_ptr<float>();
  params.num_tokens = hidden.size(0);
  params.num_channels = hidden.size(1);
  params.num_anchors = index.size(0);
  params.eps = float(eps);
  return params;
}

}  // namespace

Tensor value_head_forward(const Tensor& hidden, const Tensor& index, const Tensor& norm_weight, const Tensor& weight,
                          const std::optional<Tensor>& bias, double eps) {
  const c10::DeviceGuard guard(hidden.device());
  Weights weights;
  ValueHeadParams params = head_params<ValueHeadParams>(hidden, index, norm_weight, weight, bias, eps, weights);
  const Tensor float_bias = bias ? bias->to(at::kFloat).contiguous() : Tensor();
  Tensor probs = at::empty({index.size(0)}, hidden.options().dtype(at::kFloat));
  if (bias) params.bias = float_bias.const_data_ptr<float>();
  params.probs = probs.mutable_data_ptr<float>();
  check_launch(launch_value_head(&params, current_stream(hidden.device())), "value_head");
  return probs;
}

std::tuple<Tensor, Tensor, Tensor, Tensor> value_head_backward(const Tensor& grad_probs, const Tensor& probs,
                                                               const Tensor& hidden, const Tensor& index,
                                                               const Tensor& norm_weight, const Tensor& weight,
                                                               const std::optional<Tensor>& bias, double eps) {
  const c10::DeviceGuard guard(hidden.device());
  Weights weights;
  auto params = head_params<ValueHeadBackwardParams>(hidden, index, norm_weight, weight, bias, eps, weights);
  const int64_t num_channels = hidden.size(1), num_anchors = index.size(0);
  const at::TensorOptions floats = hidden.options().dtype(at::kFloat);
  const Tensor grads = grad_probs.contiguous();
  params.probs = checked<float>(probs, "probs", at::kFloat, {num_anchors}, hidden.device());
  params.grad_probs = checked<float>(grads, "the gradient of probs", at::kFloat, {num_anchors}, hidden.device());
  Tensor scales = at::empty({3, num_anchors}, floats);
  Tensor partial_sums = at::empty({(num_anchors + kValueHeadChunk - 1) / kValueHeadChunk, num_channels}, floats);
  Tensor grad_hidden = at::zeros_like(hidden), grad_bias = at::empty({1}, floats);
  Tensor grad_norm_weight = at::empty({num_channels}, floats), grad_weight = at::empty({num_channels}, floats);
  params.scales = scales.mutable_data_ptr<float>();
  params.partial_sums = partial_sums.mutable_data_ptr<float>();
  if (hidden.scalar_type() == at::kFloat)
    params.float_grad_hidden = grad_hidden.mutable_data_ptr<float>();
  else
    params.bf16_grad_hidden = static_cast<uint16_t*>(grad_hidden.mutable_data_ptr());
  params.grad_norm_weight = grad_norm_weight.mutable_data_ptr<float>();
  params.grad_weight = grad_weight.mutable_data_ptr<float>();
  params.grad_bias = grad_bias.mutable_data_ptr<float>();
  check_launch(launch_value_head_backward(&params, current_stream(hidden.device())), "value_head_backward");
  return {grad_hidden, grad_norm_weight.to(norm_weight.scalar_type()), grad_weight.to(weight.scalar_type()), grad_bias};
}

}  // namespace trace_megatron::cuda
