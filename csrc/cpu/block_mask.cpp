#include "block_mask.h"

#include <algorithm>
#include <vector>

namespace trace_megatron {
namespace {

int32_t* append_range(int32_t* to, int64_t begin, int64_t end) {
  for (int64_t i = begin; i < end; ++i) *to++ = int32_t(i);
  return to;
}

// A row whose blocks are at most two runs [a, b) and [c, d), b <= c.
void write_runs(const BlockLists& lists, int64_t row, int64_t num_blocks, int64_t a, int64_t b, int64_t c, int64_t d) {
  int32_t* to = lists.index + row * num_blocks;
  lists.count[row] = int32_t(b - a + d - c);
  to = append_range(to, a, b);
  to = append_range(to, c, d);
  to = append_range(to, 0, a);
  to = append_range(to, b, c);
  append_range(to, d, num_blocks);
}

}  // namespace

void build_block_mask(const int32_t* subtree_end, int64_t num_tokens, int64_t block, const BlockMask& mask) {
  const int64_t num_blocks = (num_tokens + block - 1) / block;
  // Blocks of queries in [i + 1, full_end[i]) see all keys of block i; those in [full_end[i], seen_end[i]) see some.
  // Its own queries see some, or all where the only query sees itself: that is so for blocks of one token.
  std::vector<int64_t> full_end(num_blocks), seen_end(num_blocks);
  const int64_t own_is_full = block == 1;
  for (int64_t i = 0; i < num_blocks; ++i) {
    const int32_t* first = subtree_end + i * block;
    const auto [low, high] = std::minmax_element(first, subtree_end + std::min((i + 1) * block, num_tokens));
    full_end[i] = std::max<int64_t>(*low / block, i + 1);
    seen_end[i] = (*high + block - 1) / block;
    write_runs(mask.full_queries, i, num_blocks, i + 1 - own_is_full, i + 1, i + 1, full_end[i]);
    write_runs(mask.partial_queries, i, num_blocks, i, i + 1 - own_is_full, full_end[i], seen_end[i]);
  }
  for (int64_t row = 0; row < num_blocks; ++row) {
    int32_t* partial = mask.partial_keys.index + row * num_blocks;
    int32_t* full = mask.full_keys.index + row * num_blocks;
    int32_t *next_partial = partial, *next_full = full;
    for (int64_t i = 0; i < row; ++i) {
      const bool is_full = row < full_end[i], is_seen = row < seen_end[i];
      *next_full = *next_partial = int32_t(i);
      next_full += is_full;
      next_partial += is_seen && !is_full;
    }
    *(own_is_full ? next_full++ : next_partial++) = int32_t(row);
    const int64_t num_full = next_full - full, num_partial = next_partial - partial;
    mask.full_keys.count[row] = int32_t(num_full);
    mask.partial_keys.count[row] = int32_t(num_partial);
    for (int64_t i = 0; i < row + 1; ++i) {
      const bool is_full = i == row ? own_is_full : row < full_end[i];
      const bool is_partial = i == row ? !own_is_full : !is_full && row < seen_end[i];
      if (!is_full) *next_full++ = int32_t(i);
      if (!is_partial) *next_partial++ = int32_t(i);
    }
    append_range(next_full, row + 1, num_blocks);
    append_range(next_partial, row + 1, num_blocks);
  }
}

}  // namespace trace_megatron
