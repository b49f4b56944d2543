// The forward pass: scores of a block against a few panels at a time, softmax with a running maximum, values added.
#pragma once

#include "attention_layout.h"

namespace trace_megatron {
namespace {

template <class Product, class In>
class ForwardPass {
 public:
  typedef typename Product::Elem Elem;
  typedef Packing<Product, In> Pack;
  static constexpr int64_t kGroup = 16;  // panels between two looks at the running maximum
  static constexpr int64_t kKeys = kGroup * kPanel;

  ForwardPass(const AttentionForward& call, int num_threads, Arena& arena)
      : call_(call),
        sizes_(call.args),
        length_(sizes_.dim / Product::kDepth),
        waves_(sizes_, head_elems() * 2 * int64_t(sizeof(Elem)), sizes_.num_blocks, num_threads) {
    waves_.take(arena);
    forest_.take(sizes_, arena);
    turned_keys_ = arena.take<Elem>(waves_.num_slots() * head_elems());
    paired_values_ = arena.take<Elem>(waves_.num_slots() * head_elems());
    scratch_begin_ = arena.take<char>(0);
    Scratch scratch;
    Arena measured(nullptr);
    scratch.take(sizes_, length_, measured);
    scratch_bytes_ = measured.used();
    arena.take<char>(int64_t(scratch_bytes_) * num_threads);
  }

  void run(const Parallel& parallel) {
    forest_.fill(sizes_, call_.args.subtree_end);
    waves_.plan(sizes_, sizes_.num_panels, sizes_.num_blocks, 0);
    const auto task = [](void* pass, const Stage& stage, int64_t index, int thread) {
      static_cast<ForwardPass*>(pass)->run_task(stage, index, thread);
    };
    run_stages(parallel, waves_.stages, waves_.num_stages, task, this);
  }

 private:
  struct Scratch {
    Block block;
    Elem* queries;   // [block_rows, length]
    Elem* probs;     // [block_rows, kKeys / depth]
    float* sums;     // [block_rows, dim] of values, not yet divided
    float* top;      // [block_rows] running maximum of scores, base 2
    float* factor;   // [block_rows] what the sums are to be multiplied by
    float* weights;  // [block_rows, kWidth] sums of exponentials, by lanes
    Elem* panel;     // [kPanel, length]

    void take(const Sizes& sizes, int64_t length, Arena& arena) {
      block.take(sizes, arena);
      queries = arena.take<Elem>(sizes.block_rows * length);
      probs = arena.take<Elem>(sizes.block_rows * kKeys / Product::kDepth);
      sums = arena.take<float>(sizes.block_rows * sizes.dim);
      top = arena.take<float>(sizes.block_rows);
      factor = arena.take<float>(sizes.block_rows);
      weights = arena.take<float>(sizes.block_rows * kWidth);
      panel = arena.take<Elem>(kPanel * length);
    }
  };

  Scratch scratch(int thread) const {
    Arena arena(scratch_begin_ + size_t(thread) * scratch_bytes_);
    Scratch scratch;
    scratch.take(sizes_, length_, arena);
    return scratch;
  }

  int64_t head_elems() const { return sizes_.num_panels * kPanel * length_; }

  void run_task(const Stage& stage, int64_t task, int thread) const {
    const int64_t heads = stage.num_tasks / (stage.kind == Waves::kPack ? sizes_.num_panels : sizes_.num_blocks);
    const int64_t place = task % heads, group = waves_.group(stage.wave, place);
    const int64_t offset = waves_.slot(stage.wave, place) * head_elems();
    if (stage.kind == Waves::kPack) {
      pack_panel(group, offset, task / heads, thread);
    } else {  // the last blocks of a long tree see most keys: they go first
      attend(group, offset, sizes_.num_blocks - 1 - task / heads, thread);
    }
  }

  // `head` is where a head's keys and values begin in what is laid out.
  void pack_panel(int64_t group, int64_t head, int64_t panel, int thread) const {
    const Scratch s = scratch(thread);
    const int64_t offset = head + panel * kPanel * length_;
    Pack::read_panel(call_.args.k, sizes_, panel, group, s.panel);
    Pack::turn(s.panel, sizes_.dim, turned_keys_ + offset);
    Pack::read_panel(call_.args.v, sizes_, panel, group, s.panel);
    Pack::pair(s.panel, kPanel, sizes_.dim, paired_values_ + offset);
  }

  void attend(int64_t group, int64_t head, int64_t index, int thread) const {
    Scratch s = scratch(thread);
    s.block.open(sizes_, forest_, call_.args.position, index);
    const int64_t num_rows = round_up(s.block.num_rows, kTileRows);
    Pack::read_block(call_.args.q, sizes_, s.block, group, s.queries);
    memset(s.sums, 0, size_t(num_rows * sizes_.dim) * sizeof(float));
    memset(s.weights, 0, size_t(num_rows * kWidth) * sizeof(float));
    for (int64_t row = 0; row < num_rows; ++row) s.top[row] = -kInfinity;

    for (int64_t first = 0; first < s.block.num_visible; first += kGroup) {
      const int64_t count = smaller(kGroup, s.block.num_visible - first);
      const int32_t* panels = s.block.panels + first;
      const RowRange rows = s.block.rows_of(sizes_, forest_, first, count);
      for (int64_t row = rows.begin; row < rows.end; row += kTileRows) {
        alignas(64) float scores[kTileRows * kKeys];
        multiply_panels<Product>(s.queries + row * length_, length_, panels, count, turned_keys_ + head, scores, kKeys);
        if (first + count <= s.block.num_full) {
          softmax<false>(s, row, panels, count, scores);
        } else {
          softmax<true>(s, row, panels, count, scores);
        }
      }
      for (int64_t row = rows.begin; row < rows.end; row += kTileRows)
        add_rows<Product>(s.probs + row * (kKeys / Product::kDepth), kKeys / Product::kDepth, panels, count,
                          paired_values_ + head, s.factor + row, s.sums + row * sizes_.dim, sizes_.dim);
    }
    write(s, group);
  }

  template <bool kMasked>
  void softmax(const Scratch& s, int64_t first_row, const int32_t* panels, int64_t num_panels, float* scores) const {
    const Vec scale = splat(call_.args.scale * kLog2E);
    for (int64_t row = first_row; row < first_row + kTileRows; ++row, scores += kKeys) {
      Vec top = splat(-kInfinity);
      for (int64_t vec = 0; vec < num_panels * kPanelVecs; ++vec) {
        Vec score = load(scores + vec * kWidth) * scale;
        if constexpr (kMasked) {
          const int64_t key = int64_t(panels[vec / kPanelVecs]) * kPanel + vec % kPanelVecs * kWidth;
          score = where(visible_lanes(forest_, key, s.block.row_position[row]), score, splat(-kInfinity));
        }
        store(scores + vec * kWidth, score);
        top = larger(score, top);
      }
      const float before = s.top[row], here = largest_lane(top);
      const float now = here > before ? here : before;
      const Vec reference = splat(now == -kInfinity ? 0.0f : now);  // no key yet: every exponential is 0
      const float factor = now == before ? 1.0f : exp2(splat(before) - reference)[0];
      s.top[row] = now;
      s.factor[row] = factor;
      Vec weight = load(s.weights + row * kWidth) * splat(factor);
      for (int64_t vec = 0; vec < num_panels * kPanelVecs; ++vec) {
        const Vec prob = exp2(load(scores + vec * kWidth) - reference);
        weight += prob;
        Product::write(s.probs + (row * kKeys + vec * kWidth) / Product::kDepth, prob);
      }
      store(s.weights + row * kWidth, weight);
    }
  }

  void write(const Scratch& s, int64_t group) const {
    for (int64_t row = 0; row < s.block.num_rows; ++row) {
      const int64_t token = s.block.first + row / sizes_.heads_per_group;
      const int64_t head = group * sizes_.heads_per_group + row % sizes_.heads_per_group;
      const int64_t at = token * call_.args.num_heads + head;
      const float weight = sum_lanes(load(s.weights + row * kWidth));
      call_.lse[at] = s.top[row] * kLn2 + logf(weight);
      In* out = static_cast<In*>(call_.out) + at * sizes_.head_dim;
      for (int64_t d = 0; d < sizes_.head_dim; ++d) from_float(s.sums[row * sizes_.dim + d] / weight, out[d]);
    }
  }

  const AttentionForward& call_;
  const Sizes sizes_;
  const int64_t length_;
  Waves waves_;
  Forest forest_;
  Elem* turned_keys_;    // [slots, num_panels, length, kPanel]
  Elem* paired_values_;  // [slots, num_panels * kPanel / depth, dim]
  char* scratch_begin_;
  size_t scratch_bytes_;
};

}  // namespace
}  // namespace trace_megatron
