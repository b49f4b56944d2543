// The ops of csrc/cuda with their kernels on the CPU runner, as torch.ops.trace_megatron_simt.*: one library for tests.
#include <torch/library.h>

#include "cuda/allocate.cpp"
#include "cuda/block_mask.cpp"
#include "cuda/prefix_attention.cpp"
#include "cuda/value_head.cpp"
#include "kernels/allocate_prefixes.cu"
#include "kernels/allocate_roots.cu"
#include "kernels/allocate_table.cu"
#include "kernels/prefix_attention.cu"
#include "kernels/tree_block_mask.cu"
#include "kernels/value_head.cu"
#include "kernels/value_head_backward.cu"

namespace trace_megatron::cuda {
cudaStream_t current_stream(at::Device) { return nullptr; }
}  // namespace trace_megatron::cuda

TORCH_LIBRARY(trace_megatron_simt, m) {
  m.def(
      "prefix_attention(Tensor q, Tensor k, Tensor v, Tensor key_pages, Tensor value_pages, Tensor subtree_end,"
      " Tensor page_table, Tensor items, Tensor key_tiles, int rows, float scale) -> Tensor");
  m.def("tree_block_mask(Tensor subtree_end, int block_size) -> Tensor[]");
  m.def("allocate_roots(Tensor success_probs, Tensor budgets, Tensor offsets, int? max_rollouts, bool exact) -> Tensor");
  m.def("allocate_prefixes(Tensor repeat_probs, Tensor budgets, Tensor offsets) -> Tensor");
  m.def("allocate_table(Tensor values, int budget, bool exact) -> Tensor");
  m.def(
      "value_head_forward(Tensor hidden, Tensor index, Tensor norm_weight, Tensor weight, Tensor? bias, float eps)"
      " -> Tensor");
  m.def(
      "value_head_backward(Tensor grad_probs, Tensor probs, Tensor hidden, Tensor index, Tensor norm_weight,"
      " Tensor weight, Tensor? bias, float eps)"
      " -> (Tensor, Tensor, Tensor, Tensor)");
}

TORCH_LIBRARY_IMPL(trace_megatron_simt, CPU, m) {
  m.impl("prefix_attention", &trace_megatron::cuda::prefix_attention);
  m.impl("tree_block_mask", &trace_megatron::cuda::tree_block_mask);
  m.impl("allocate_roots", &trace_megatron::cuda::allocate_roots);
  m.impl("allocate_prefixes", &trace_megatron::cuda::allocate_prefixes);
  m.impl("allocate_table", &trace_megatron::cuda::allocate_table);
  m.impl("value_head_forward", &trace_megatron::cuda::value_head_forward);
  m.impl("value_head_backward", &trace_megatron::cuda::value_head_backward);
}
