// FlexAttention's block mask of a forest, straight from subtree_end.
#pragma once

#include <cstdint>

namespace trace_megatron {

// One list of blocks for each row, as FlexAttention sorts them: the row's blocks ascending, then all others ascending.
struct BlockLists {
  int32_t* count;  // [blocks]
  int32_t* index;  // [blocks, blocks]
};

struct BlockMask {
  BlockLists partial_keys, full_keys;        // a row for each block of queries
  BlockLists partial_queries, full_queries;  // a row for each block of keys
};

// Blocks of `block` tokens; a block counts as full where every query of a whole block sees every key.
void build_block_mask(const int32_t* subtree_end, int64_t num_tokens, int64_t block, const BlockMask& mask);

}  // namespace trace_megatron
