#include "../cpu/pack.h"

#include <ATen/ops/empty.h>

#include <algorithm>
#include <limits>

#include "check.h"
#include "ops.h"

namespace trace_megatron {
namespace {

Segments check_segments(const Tensor& offsets, const Tensor& parents, int64_t num_tokens) {
  const Segments segments{checked_offsets(offsets, "offsets", num_tokens), checked_int64(parents, "parents"),
                          parents.size(0)};
  TORCH_CHECK_VALUE(offsets.size(0) == segments.num_segments + 1, "expected one parent for each of ",
                    offsets.size(0) - 1, " segments, found ", segments.num_segments);
  for (int64_t i = 0; i < segments.num_segments; ++i)
    TORCH_CHECK_VALUE(segments.parents[i] >= -1 && segments.parents[i] < i, "expected parents[", i,
                      "] as -1 or an earlier segment, found ", segments.parents[i]);
  return segments;
}

const int64_t* check_leaves(const Tensor& leaves, int64_t num_segments) {
  const int64_t* data = checked_int64(leaves, "leaves");
  for (int64_t i = 0; i < leaves.size(0); ++i)
    TORCH_CHECK_VALUE(data[i] >= 0 && data[i] < num_segments, "expected leaves within [0, ", num_segments, "), found ",
                      data[i], " at place ", i);
  return data;
}

}  // namespace

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> pack_tree(const Tensor& tokens, const Tensor& offsets,
                                                             const Tensor& parents, const OptionalTensor& leaves) {
  const int64_t* ids = checked_int64(tokens, "tokens");
  const Segments segments = check_segments(offsets, parents, tokens.size(0));
  const int64_t* kept = leaves ? check_leaves(*leaves, segments.num_segments) : nullptr;
  static const int64_t none = 0;  // an empty tensor may have no memory, and null means all segments
  const Layout layout = leaves ? build_layout(segments, leaves->size(0) ? kept : &none, leaves->size(0))
                               : build_layout(segments, nullptr, 0);
  TORCH_CHECK_VALUE(layout.num_tokens <= std::numeric_limits<int32_t>::max(), "expected at most ",
                    std::numeric_limits<int32_t>::max(), " packed tokens, found ", layout.num_tokens);
  const auto longs = at::TensorOptions(at::kLong), ints = at::TensorOptions(at::kInt);
  Tensor packed = at::empty({layout.num_tokens}, longs), positions = at::empty({layout.num_tokens}, longs);
  Tensor subtree_end = at::empty({layout.num_tokens}, ints), predecessor = at::empty({layout.num_tokens}, ints);
  write_pack(segments, layout, ids,
             {packed.mutable_data_ptr<int64_t>(), positions.mutable_data_ptr<int64_t>(),
              subtree_end.mutable_data_ptr<int32_t>(), predecessor.mutable_data_ptr<int32_t>()});
  Tensor last = at::empty({segments.num_segments}, longs);
  std::copy(layout.last.begin(), layout.last.end(), last.mutable_data_ptr<int64_t>());
  return {packed, positions, subtree_end, predecessor, last};
}

std::tuple<Tensor, Tensor> cut_tree(const Tensor& offsets, const Tensor& parents, const Tensor& leaves,
                                    int64_t tokens_per_bin, int64_t num_ranks) {
  TORCH_CHECK_VALUE(tokens_per_bin >= 1 && num_ranks >= 1, "expected a positive limit and ranks, found ",
                    tokens_per_bin, " and ", num_ranks);
  const int64_t num_tokens =
      offsets.dim() == 1 && offsets.size(0) ? checked_int64(offsets, "offsets")[offsets.size(0) - 1] : 0;
  TORCH_CHECK_VALUE(num_tokens <= std::numeric_limits<int32_t>::max(), "expected at most ",
                    std::numeric_limits<int32_t>::max(), " tokens, found ", num_tokens);
  const Segments segments = check_segments(offsets, parents, num_tokens);
  const Bins bins =
      cut_by_leaves(segments, check_leaves(leaves, segments.num_segments), leaves.size(0), tokens_per_bin, num_ranks);
  Tensor of_leaf = at::empty({leaves.size(0)}, at::kLong), rank = at::empty({int64_t(bins.rank.size())}, at::kLong);
  std::copy(bins.of_leaf.begin(), bins.of_leaf.end(), of_leaf.mutable_data_ptr<int64_t>());
  std::copy(bins.rank.begin(), bins.rank.end(), rank.mutable_data_ptr<int64_t>());
  return {of_leaf, rank};
}

}  // namespace trace_megatron
