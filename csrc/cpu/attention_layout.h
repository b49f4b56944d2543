// What both passes of tree attention share: sizes, the order in which operands are laid out, who sees whom.
//
// Keys lie in panels of 16. A block is a run of queries, with the R heads that share keys as rows of one matrix: row
// token * R + head. A block sees few panels of a bushy forest; only those are listed, those that every row sees in full
// before those that need a mask.
#pragma once

#include "attention.h"
#include "product.h"

namespace trace_megatron {
namespace {

constexpr int kPanel = 16;
constexpr int kPanelVecs = kPanel / kWidth;
constexpr int64_t kBlockRows = 64;  // more make chains no faster and bushy forests slower
constexpr int64_t kRowsAhead = 8;
constexpr int64_t kWaveBytes = int64_t(2) << 20;  // of laid out keys and values that are worked on at a time
constexpr float kLog2E = 1.44269504f;
constexpr float kLn2 = 0.693147181f;
constexpr float kInfinity = __builtin_inff();

struct BFloat16 {
  uint16_t bits;
};

TRACE_INLINE float to_float(float x) { return x; }
TRACE_INLINE float to_float(BFloat16 x) {
  const uint32_t word = uint32_t(x.bits) << 16;
  float value;
  memcpy(&value, &word, sizeof value);
  return value;
}
TRACE_INLINE void from_float(float x, float& to) { to = x; }
TRACE_INLINE void from_float(float x, BFloat16& to) {  // to nearest, ties to even
  uint32_t word;
  memcpy(&word, &x, sizeof word);
  to.bits = uint16_t(x != x ? 0x7fc0u : (word + 0x7fffu + ((word >> 16) & 1u)) >> 16);
}

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

// Key/value heads are worked on in waves, so that what is laid out for them stays in cache and its memory is used again:
// by the wave after next. A head has `tasks` tasks; where they can be dealt out evenly over the threads, they are.
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

// Reading and reordering rows of q, k, v and grad_out. Elem rows are [dim / depth]: what lies together along d.
template <class Product, class In>
struct Packing {
  typedef typename Product::Elem Elem;
  static constexpr int kDepth = Product::kDepth;

  static const In* row(const Rows& rows, int64_t token, int64_t head) {
    return static_cast<const In*>(rows.data) + token * rows.token_stride + head * rows.head_stride;
  }

  static void read(const In* from, int64_t head_dim, int64_t dim, Elem* to) {
    if constexpr (kDepth == 1) {
      for (int64_t d = 0; d < head_dim; ++d) to[d] = to_float(from[d]);
    } else {
      memcpy(to, from, size_t(head_dim) * sizeof(In));
    }
    const size_t width = kDepth == 1 ? sizeof(float) : sizeof(In);
    memset(reinterpret_cast<char*>(to) + size_t(head_dim) * width, 0, size_t(dim - head_dim) * width);
  }

  // Rows of one head lie far apart in memory: the processor does not see the next ones coming.
  static void prefetch(const In* row, int64_t ahead, int64_t head_dim) {
#if defined(__GNUC__)
    const uintptr_t from = reinterpret_cast<uintptr_t>(row) + uintptr_t(ahead) * sizeof(In);  // may lie beyond the end
    for (uintptr_t byte = 0; byte < uintptr_t(head_dim) * sizeof(In); byte += 64)
      __builtin_prefetch(reinterpret_cast<const void*>(from + byte));
#endif
  }

  static float dot(const In* a, const In* b, int64_t head_dim) {
    float sums[kPanel] = {};
    int64_t d = 0;
    for (; d + kPanel <= head_dim; d += kPanel)
      for (int64_t i = 0; i < kPanel; ++i) sums[i] += to_float(a[d + i]) * to_float(b[d + i]);
    for (int64_t i = 0; d + i < head_dim; ++i) sums[i] += to_float(a[d + i]) * to_float(b[d + i]);
    float sum = 0.0f;
    for (int64_t i = 0; i < kPanel; ++i) sum += sums[i];
    return sum;
  }

  // Rows that follow each other along k, where k counts rows: two by two where an Elem holds two.
  static void pair(const Elem* rows, int64_t num_rows, int64_t dim, Elem* to) {
    if constexpr (kDepth == 1) {
      memcpy(to, rows, size_t(num_rows * dim) * sizeof(Elem));
    } else {
      for (int64_t row = 0; row < num_rows; row += 2) {
        const char* even = reinterpret_cast<const char*>(rows + row * dim / 2);
        const char* odd = even + dim * 2;
        for (int64_t d = 0; d < dim; ++d) {
          uint16_t low, high;
          memcpy(&low, even + 2 * d, 2);
          memcpy(&high, odd + 2 * d, 2);
          to[row / 2 * dim + d] = low | uint32_t(high) << 16;
        }
      }
    }
  }

  // A panel's rows [16, dim / depth] turned to [dim / depth, 16].
  static void turn(const Elem* rows, int64_t dim, Elem* to) {
    const int64_t length = dim / kDepth;
    for (int64_t k = 0; k < length; ++k)
      for (int64_t key = 0; key < kPanel; ++key) to[k * kPanel + key] = rows[key * length + k];
  }

  static void read_panel(const Rows& rows, const Sizes& sizes, int64_t panel, int64_t head, Elem* to) {
    const int64_t length = sizes.dim / kDepth;
    for (int64_t i = 0; i < kPanel; ++i) {
      const int64_t token = panel * kPanel + i;
      if (token < sizes.num_keys) {
        read(row(rows, token, head), sizes.head_dim, sizes.dim, to + i * length);
      } else {
        memset(to + i * length, 0, size_t(length) * sizeof(Elem));
      }
    }
  }

  // All rows of a block, the padding of the last tile included, which is zero.
  static void read_block(const Rows& rows, const Sizes& sizes, const Block& block, int64_t group, Elem* to) {
    const int64_t length = sizes.dim / kDepth;
    const int64_t tokens_ahead = (kRowsAhead + sizes.heads_per_group - 1) / sizes.heads_per_group;
    for (int64_t i = 0; i < block.num_rows; ++i) {
      const int64_t head = group * sizes.heads_per_group + i % sizes.heads_per_group;
      const In* from = row(rows, block.first + i / sizes.heads_per_group, head);
      prefetch(from, tokens_ahead * rows.token_stride, sizes.head_dim);
      read(from, sizes.head_dim, sizes.dim, to + i * length);
    }
    memset(to + block.num_rows * length, 0,
           size_t((round_up(block.num_rows, kTileRows) - block.num_rows) * length) * sizeof(Elem));
  }
};

// to[4 rows, num_panels * 16 keys] = left[4 rows, dim] times the turned panels.
template <class Product>
TRACE_INLINE void multiply_panels(const typename Product::Elem* left, int64_t length, const int32_t* panels,
                                  int64_t num_panels, const typename Product::Elem* turned, float* to, int64_t stride) {
  for_vec_tiles(num_panels * kPanelVecs, [&](int64_t vec, auto count) TRACE_INLINE_LAMBDA {
    constexpr int kVecs = decltype(count)::value;
    const typename Product::Elem* right[kVecs];
    for (int j = 0; j < kVecs; ++j)
      right[j] = turned + panels[(vec + j) / kPanelVecs] * length * kPanel + (vec + j) % kPanelVecs * kWidth;
    Tile<kVecs> tile;
    tile.clear();
    for (int64_t k = 0; k < length; ++k) tile.template step<Product>(left + k, length, right, k * kPanel);
    tile.write(to + vec * kWidth, stride);
  });
}

// to[4 rows, dim] = factor[4 rows] * to + left[4 rows, num_panels * 16 keys] times the panels' rows, paired.
template <class Product>
TRACE_INLINE void add_rows(const typename Product::Elem* left, int64_t left_stride, const int32_t* panels,
                           int64_t num_panels, const typename Product::Elem* paired, const float* factor, float* to,
                           int64_t dim) {
  constexpr int kSteps = kPanel / Product::kDepth;
  for_vec_tiles(dim / kWidth, [&](int64_t vec, auto count) TRACE_INLINE_LAMBDA {
    constexpr int kVecs = decltype(count)::value;
    Tile<kVecs> tile;
    tile.read(to + vec * kWidth, dim);
    if (factor) tile.scale_rows(factor);
    for (int64_t i = 0; i < num_panels; ++i) {
      const typename Product::Elem* right[kVecs];
      for (int j = 0; j < kVecs; ++j) right[j] = paired + panels[i] * kSteps * dim + (vec + j) * kWidth;
      for (int64_t k = 0; k < kSteps; ++k)
        tile.template step<Product>(left + i * kSteps + k, left_stride, right, k * dim);
    }
    tile.write(to + vec * kWidth, dim);
  });
}

}  // namespace
}  // namespace trace_megatron
