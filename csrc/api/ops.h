// The ops as torch sees them: each checks its arguments, lays out sizes and pointers, and calls a kernel.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <tuple>

#include "../cpu/parallel.h"

namespace trace_megatron {

using at::Tensor;

// torch's intra-op threads (torch.set_num_threads); one inside a parallel region.
Parallel torch_threads();

// Name of the instruction set whose kernels run; setting TRACE_CPU_ISA chooses another one that the processor has.
std::tuple<Tensor, Tensor> tree_attention_forward(const Tensor& q, const Tensor& k, const Tensor& v,
                                                  const Tensor& subtree_end, const std::optional<Tensor>& query_index,
                                                  double scale);
std::tuple<Tensor, Tensor, Tensor> tree_attention_backward(const Tensor& grad_out, const Tensor& q, const Tensor& k,
                                                           const Tensor& v, const Tensor& subtree_end,
                                                           const std::optional<Tensor>& query_index, const Tensor& out,
                                                           const Tensor& lse, double scale);

}  // namespace trace_megatron
