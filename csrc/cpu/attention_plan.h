// What both passes of tree attention plan by: sizes, memory, who sees whom, and the order of the work.
//
// Keys lie in panels of 16. A block is a run of queries, with the R heads that share keys as rows of one matrix: row
// token * R + head. A block sees few panels of a bushy forest; only those are listed, those that every row sees in full
// before those that need a mask.
#pragma once

#include <math.h>

#include "attention.h"
#include "product.h"

namespace trace_megatron {
namespace {

constexpr int kPanel = 16;
constexpr int kPanelVecs = kPanel / kWidth;
constexpr int64_t kBlockRows = 64;                // more make chains no faster and bushy forests slower
constexpr int64_t kWaveBytes = int64_t(2) << 20;  // of laid out keys and values that are worked on at a time
constexpr float kLog2E = 1.44269504f;
constexpr float kLn2 = 0.693147181f;
constexpr float kInfinity = INFINITY;

TRACE_INLINE int64_t round_up(int64_t n, int64_t multiple) { return (n + multiple - 1) / multiple * multiple; }
TRACE_INLINE int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

// Hands out pieces of the workspace. Without a workspace it only measures.
class Arena {
 public:
  explicit Arena(void* base) : base_(reinterpret_cast<uintptr_t>(base)) {}
  template <class T>
  T* take(int64_t count) {
    T* piece = reinterpret_cast<T*>(base_ + used_);
    used_ += size_t(round_up(count * int64_t(sizeof(T)), 64));
    return piece;
  }
  size_t used() const { return used_; }

 private:
  uintptr_t base_;
  size_t used_ = 0;
};

struct Sizes {
  int64_t num_queries, num_keys, heads_per_group, num_groups, head_dim;
  int64_t dim;           // head_dim, padded with zeros to whole vectors of every width
  int64_t num_panels;    // the last one padded with keys that nobody sees
  int64_t block_tokens;  // queries of a block
  int64_t block_rows;    // rows of a block, padded to whole tiles
  int64_t num_blocks;

  explicit Sizes(const AttentionArgs& args)
      : num_queries(args.num_queries),
        num_keys(args.num_keys),
        heads_per_group(args.num_heads / args.num_groups),
        num_groups(args.num_groups),
        head_dim(args.head_dim),
        dim(round_up(args.head_dim, kPanel)),
        num_panels((args.num_keys + kPanel - 1) / kPanel),
        block_tokens(round_up((kBlockRows + heads_per_group - 1) / heads_per_group, kPanel)),
        block_rows(round_up(block_tokens * heads_per_group, kTileRows)),
        num_blocks((args.num_queries + block_tokens - 1) / block_tokens) {}
};

// The forest by panels, shared by all heads.
struct Forest {
  int32_t* end;      // [num_panels * kPanel] subtree_end, 0 at padding
  int32_t* min_end;  // [num_panels]
  int32_t* max_end;  // [num_panels]

  void take(const Sizes& sizes, Arena& arena) {
    end = arena.take<int32_t>(sizes.num_panels * kPanel);
    min_end = arena.take<int32_t>(sizes.num_panels);
    max_end = arena.take<int32_t>(sizes.num_panels);
  }
  void fill(const Sizes& sizes, const int32_t* subtree_end) {
    for (int64_t panel = 0; panel < sizes.num_panels; ++panel) {
      int32_t low = INT32_MAX, high = 0;
      for (int64_t key = panel * kPanel; key < (panel + 1) * kPanel; ++key) {
        end[key] = key < sizes.num_keys ? subtree_end[key] : 0;
        low = end[key] < low ? end[key] : low;
        high = end[key] > high ? end[key] : high;
      }
      min_end[panel] = low;
      max_end[panel] = high;
    }
  }
};

// Key/value heads are worked on in waves, so that what is laid out for them stays in cache and its memory is used
// again: by the wave after next. A wave takes as many heads as deal out their tasks evenly over the threads.
struct Waves {
  enum Kind { kPack, kCompute, kWrite };

  int64_t heads, count;
  Stage* stages;
  int64_t num_stages = 0;

  Waves(const Sizes& sizes, int64_t bytes_per_head, int64_t tasks, int num_threads) {
    heads = kWaveBytes / (bytes_per_head + 1);
    heads = heads < 1 ? 1 : heads;
    while (heads < sizes.num_groups && heads * tasks % num_threads != 0) ++heads;
    heads = smaller(heads, sizes.num_groups);
    count = (sizes.num_groups + heads - 1) / heads;
  }
  void take(Arena& arena) { stages = arena.take<Stage>(3 * count); }

  int64_t num_slots() const { return 2 * heads; }  // of memory
  int64_t slot(int64_t wave, int64_t place) const { return wave % 2 * heads + place; }
  int64_t group(int64_t wave, int64_t place) const { return wave * heads + place; }

  // Tasks for each head of: laying it out, the work itself, writing what it sums up (0: there is nothing to write).
  void plan(const Sizes& sizes, int64_t pack_tasks, int64_t compute_tasks, int64_t write_tasks) {
    num_stages = 0;
    int64_t computed[2] = {-1, -1}, written[2] = {-1, -1}, packed[2] = {-1, -1};  // last stages, by memory
    const auto num_heads = [&](int64_t wave) { return smaller(heads, sizes.num_groups - wave * heads); };
    const auto add = [&](Kind kind, int64_t wave, int64_t tasks, int64_t after, int64_t and_after) {
      stages[num_stages] = {kind, wave, tasks * num_heads(wave), {after, and_after}};
      return num_stages++;
    };
    for (int64_t wave = 0; wave < count + 2; ++wave) {
      const int64_t i = wave % 2;
      if (wave < count) packed[i] = add(kPack, wave, pack_tasks, computed[i], -1);
      if (wave >= 2 && write_tasks) written[i] = add(kWrite, wave - 2, write_tasks, computed[i], -1);
      if (wave < count) computed[i] = add(kCompute, wave, compute_tasks, packed[i], written[i]);
    }
  }
};

struct RowRange {
  int64_t begin, end;
};

// One block's queries and the panels that they see.
struct Block {
  int64_t first, num_tokens, num_rows;  // num_rows without the padding to whole tiles
  const int32_t* position;              // [num_tokens]
  int32_t* row_position;                // [block_rows]
  int32_t* panels;                      // [num_panels] those that every row sees in full first
  int64_t num_full, num_visible;

  void take(const Sizes& sizes, Arena& arena) {
    row_position = arena.take<int32_t>(sizes.block_rows);
    panels = arena.take<int32_t>(sizes.num_panels);
  }

  void open(const Sizes& sizes, const Forest& forest, const int32_t* positions, int64_t index) {
    first = index * sizes.block_tokens;
    num_tokens = smaller(sizes.block_tokens, sizes.num_queries - first);
    num_rows = num_tokens * sizes.heads_per_group;
    position = positions + first;
    for (int64_t row = 0; row < round_up(num_rows, kTileRows); ++row)
      row_position[row] = position[smaller(row / sizes.heads_per_group, num_tokens - 1)];
    const int32_t lowest = position[0], highest = position[num_tokens - 1];
    const int64_t num_candidates = highest / kPanel + 1;
    num_full = num_visible = 0;
    for (int64_t panel = 0; panel < num_candidates; ++panel)
      if (sees(forest, panel, lowest) && sees_all(forest, panel, lowest, highest)) panels[num_full++] = int32_t(panel);
    num_visible = num_full;
    for (int64_t panel = 0; panel < num_candidates; ++panel)
      if (sees(forest, panel, lowest) && !sees_all(forest, panel, lowest, highest))
        panels[num_visible++] = int32_t(panel);
  }

  // Rows, in whole tiles, that see a key of these panels; all rows where the panels are seen in full.
  RowRange rows_of(const Sizes& sizes, const Forest& forest, int64_t first_panel, int64_t count) const {
    int64_t begin = 0, end = num_tokens;
    if (first_panel + count > num_full) {
      int32_t lowest_key = INT32_MAX, highest_end = 0;
      for (int64_t i = first_panel; i < first_panel + count; ++i) {
        const int32_t key = panels[i] * kPanel;
        lowest_key = key < lowest_key ? key : lowest_key;
        highest_end = forest.max_end[panels[i]] > highest_end ? forest.max_end[panels[i]] : highest_end;
      }
      while (begin < num_tokens && position[begin] < lowest_key) ++begin;
      while (end > begin && position[end - 1] >= highest_end) --end;
    }
    return {begin * sizes.heads_per_group / kTileRows * kTileRows, round_up(end * sizes.heads_per_group, kTileRows)};
  }

 private:
  static bool sees(const Forest& forest, int64_t panel, int32_t lowest) { return forest.max_end[panel] > lowest; }
  static bool sees_all(const Forest& forest, int64_t panel, int32_t lowest, int32_t highest) {
    return panel * kPanel + kPanel - 1 <= lowest && forest.min_end[panel] > highest;
  }
};

// Lanes of keys from `key` on that a query at `position` sees.
TRACE_INLINE IntVec visible_lanes(const Forest& forest, int64_t key, int32_t position) {
  return (count_from(int32_t(key)) <= splat(position)) & (load(forest.end + key) > splat(position));
}

}  // namespace
}  // namespace trace_megatron
