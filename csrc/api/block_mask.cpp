#include "../cpu/block_mask.h"

#include <ATen/ops/empty.h>

#include "check.h"
#include "ops.h"

namespace trace_megatron {

std::vector<Tensor> tree_block_mask(const Tensor& subtree_end, int64_t block_size) {
  const int64_t num_tokens = subtree_end.dim() == 1 ? subtree_end.size(0) : 0;
  const int32_t* end = checked_int32(subtree_end, "subtree_end", num_tokens);
  check_forest_of(end, num_tokens);
  TORCH_CHECK_VALUE(block_size >= 1, "expected a positive block size, found ", block_size);
  const int64_t num_blocks = num_tokens == 0 ? 0 : (num_tokens - 1) / block_size + 1;
  std::vector<Tensor> tensors;
  BlockLists lists[4];
  for (BlockLists& list : lists) {
    tensors.push_back(at::empty({1, 1, num_blocks}, at::kInt));
    tensors.push_back(at::empty({1, 1, num_blocks, num_blocks}, at::kInt));
    list = {tensors[tensors.size() - 2].mutable_data_ptr<int32_t>(), tensors.back().mutable_data_ptr<int32_t>()};
  }
  if (num_blocks) build_block_mask(end, num_tokens, block_size, {lists[0], lists[1], lists[2], lists[3]});
  return tensors;
}

}  // namespace trace_megatron
