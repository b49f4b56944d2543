// The ops that run on a CUDA device; csrc/bindings.cpp defines them.
#include <torch/library.h>

#include "ops.h"

TORCH_LIBRARY_IMPL(trace_megatron, CUDA, m) {
  m.impl("prefix_attention", &trace_megatron::cuda::prefix_attention);
  m.impl("tree_block_mask", &trace_megatron::cuda::tree_block_mask);
  m.impl("allocate_roots", &trace_megatron::cuda::allocate_roots);
  m.impl("allocate_prefixes", &trace_megatron::cuda::allocate_prefixes);
  m.impl("allocate_table", &trace_megatron::cuda::allocate_table);
  m.impl("value_head_forward", &trace_megatron::cuda::value_head_forward);
  m.impl("value_head_backward", &trace_megatron::cuda::value_head_backward);
}
