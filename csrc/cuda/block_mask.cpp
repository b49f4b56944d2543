#include <ATen/ops/empty.h>

#include "../kernels/tree_block_mask.h"
#include "check.h"
#include "ops.h"

namespace trace_megatron::cuda {

// The forest is not checked: that would wait for the device. Values that are no forest give a mask that is none.
std::vector<Tensor> tree_block_mask(const Tensor& subtree_end, int64_t block_size) {
  check_device(subtree_end, "subtree_end");
  TORCH_CHECK_VALUE(subtree_end.dim() == 1, "expected subtree_end as a vector, found sizes ", subtree_end.sizes());
  const int64_t num_tokens = subtree_end.size(0);
  check_at_most(num_tokens, kMostInt32, "tokens");
  TORCH_CHECK_VALUE(block_size >= 1, "expected a positive block size, found ", block_size);
  check_at_most(block_size, kMostInt32, "tokens in a block");
  const c10::DeviceGuard guard(subtree_end.device());
  TreeBlockMaskParams params{};
  params.subtree_end = checked<int32_t>(subtree_end, "subtree_end", at::kInt, {num_tokens}, subtree_end.device());
  const int64_t num_blocks = num_tokens == 0 ? 0 : (num_tokens - 1) / block_size + 1;
  Tensor ends = at::empty({2, num_blocks}, subtree_end.options());
  std::vector<Tensor> lists;
  const auto count = [&] { return lists.emplace_back(at::empty({1, 1, num_blocks}, subtree_end.options())).mutable_data_ptr<int32_t>(); };
  const auto index = [&] { return lists.emplace_back(at::empty({1, 1, num_blocks, num_blocks}, subtree_end.options())).mutable_data_ptr<int32_t>(); };
  params.ends = ends.mutable_data_ptr<int32_t>();
  params.partial_key_count = count(), params.partial_key_index = index();
  params.full_key_count = count(), params.full_key_index = index();
  params.partial_query_count = count(), params.partial_query_index = index();
  params.full_query_count = count(), params.full_query_index = index();
  params.num_tokens = num_tokens;
  params.block_size = block_size;
  check_launch(launch_tree_block_mask(&params, current_stream(subtree_end.device())), "tree_block_mask");
  return lists;
}

}  // namespace trace_megatron::cuda
