// The ops as torch sees them: each checks its arguments, lays out sizes and pointers, and calls a kernel.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <tuple>
#include <vector>

#include "../cpu/parallel.h"

namespace trace_megatron {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;

// torch's intra-op threads (torch.set_num_threads); one inside a parallel region.
Parallel torch_threads();

std::tuple<Tensor, Tensor> tree_attention_forward(const Tensor& q, const Tensor& k, const Tensor& v,
                                                  const Tensor& subtree_end, const OptionalTensor& query_index,
                                                  double scale);
std::tuple<Tensor, Tensor, Tensor> tree_attention_backward(const Tensor& grad_out, const Tensor& q, const Tensor& k,
                                                           const Tensor& v, const Tensor& subtree_end,
                                                           const OptionalTensor& query_index, const Tensor& out,
                                                           const Tensor& lse, double scale);

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> pack_tree(const Tensor& tokens, const Tensor& offsets,
                                                             const Tensor& parents, const OptionalTensor& leaves);
std::tuple<Tensor, Tensor> cut_tree(const Tensor& offsets, const Tensor& parents, const Tensor& leaves,
                                    int64_t tokens_per_bin, int64_t num_ranks);

// Counts and indices of partial keys, full keys, partial queries, full queries.
std::vector<Tensor> tree_block_mask(const Tensor& subtree_end, int64_t block_size);

Tensor allocate_roots_op(const Tensor& success_probs, const Tensor& budgets, const Tensor& offsets,
                         std::optional<int64_t> max_rollouts, bool exact);
Tensor allocate_prefixes_op(const Tensor& repeat_probs, const Tensor& budgets, const Tensor& offsets);
Tensor allocate_table_op(const Tensor& values, int64_t budget, bool exact);

Tensor value_head_forward(const Tensor& hidden, const Tensor& index, const Tensor& norm_weight, const Tensor& weight,
                          const OptionalTensor& bias, double eps);
std::tuple<Tensor, Tensor, Tensor, Tensor> value_head_backward(const Tensor& grad_probs, const Tensor& probs,
                                                               const Tensor& hidden, const Tensor& index,
                                                               const Tensor& norm_weight, const Tensor& weight,
                                                               const OptionalTensor& bias, double eps);

// [4, E]: highest, sum, weighted and label of every row of logits [E, V]; see cpu/rows.h.
Tensor softmax_statistics(const Tensor& logits, const Tensor& labels, double scale);
void softmax_gradient_(Tensor& logits, const Tensor& labels, const Tensor& log_normalizers, const Tensor& slopes,
                       double scale);
// The normed rows, and 1 / rms of each.
std::tuple<Tensor, Tensor> rms_norm_forward(const Tensor& x, const Tensor& weight, double eps);
std::tuple<Tensor, Tensor> rms_norm_backward(const Tensor& grad, const Tensor& x, const Tensor& weight,
                                             const Tensor& inverse);
Tensor swiglu_forward(const Tensor& x);
Tensor swiglu_backward(const Tensor& grad, const Tensor& x);

}  // namespace trace_megatron
