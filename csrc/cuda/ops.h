// The ops on a CUDA device, with the signatures of csrc/api/ops.h.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <tuple>
#include <vector>

namespace trace_megatron::cuda {

using at::Tensor;

Tensor allocate_roots(const Tensor& success_probs, const Tensor& budgets, const Tensor& offsets,
                      std::optional<int64_t> max_rollouts, bool exact);
Tensor allocate_prefixes(const Tensor& repeat_probs, const Tensor& budgets, const Tensor& offsets);
Tensor allocate_table(const Tensor& values, int64_t budget, bool exact);

Tensor prefix_attention(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& key_pages,
                        const Tensor& value_pages, const Tensor& subtree_end, const Tensor& page_table,
                        const Tensor& items, const Tensor& key_tiles, int64_t rows, double scale);

std::vector<Tensor> tree_block_mask(const Tensor& subtree_end, int64_t block_size);

Tensor value_head_forward(const Tensor& hidden, const Tensor& index, const Tensor& norm_weight, const Tensor& weight,
                          const std::optional<Tensor>& bias, double eps);
std::tuple<Tensor, Tensor, Tensor, Tensor> value_head_backward(const Tensor& grad_probs, const Tensor& probs,
                                                               const Tensor& hidden, const Tensor& index,
                                                               const Tensor& norm_weight, const Tensor& weight,
                                                               const std::optional<Tensor>& bias, double eps);

}  // namespace trace_megatron::cuda
