// Trees of segments laid out as packs. Segment n holds tokens [offsets[n], offsets[n + 1]); its parent comes before it.
#pragma once

#include <cstdint>
#include <vector>

namespace trace_megatron {

struct Segments {
  const int64_t* offsets;  // [N + 1]
  const int64_t* parents;  // [N], -1 at a root
  int64_t num_segments;

  int64_t size(int64_t segment) const { return offsets[segment + 1] - offsets[segment]; }
};

// Where the kept segments go: preorder, children in their own order.
struct Layout {
  std::vector<int64_t> start;  // [N], -1 where left out
  std::vector<int64_t> end;    // [N] one past the last token of the segment's subtree
  std::vector<int64_t> last;   // [N] position of the last token of the segment's history, -1 where there is none
  std::vector<int64_t> depth;  // [N] tokens on the path before the segment
  std::vector<int64_t> order;  // [N] place among the kept segments
  int64_t num_tokens;
};

// Keeps the segments at or above `leaves`; all where leaves is null.
Layout build_layout(const Segments& segments, const int64_t* leaves, int64_t num_leaves);

struct PackedTokens {
  int64_t* tokens;  // [T]
  int64_t* position_ids;
  int32_t* subtree_end;
  int32_t* predecessor;
};

void write_pack(const Segments& segments, const Layout& layout, const int64_t* tokens, const PackedTokens& to);

// Pairs of blocks (queries, keys) of which at least one query sees a key.
int64_t count_visited_blocks(const int32_t* subtree_end, int64_t num_tokens, int64_t block);

struct Bins {
  std::vector<int64_t> of_leaf;  // [L]
  std::vector<int64_t> rank;     // [number of bins], equally many bins on each rank
};

// Cuts trees by leaves into bins of at most `limit` tokens (a longer path has a bin of its own): neighbours in preorder
// stay together, the fullest pieces are placed first, and ranks are balanced by visited attention blocks.
Bins cut_by_leaves(const Segments& segments, const int64_t* leaves, int64_t num_leaves, int64_t limit,
                   int64_t num_ranks);

constexpr int64_t kAttentionBlock = 128;  // FlexAttention's

}  // namespace trace_megatron
