// The backward pass: scores computed again, five products for each block and group of panels.
//
// A task is a run of blocks of one key/value head. It owns its rows of grad_q; grad_k and grad_v it sums up in memory
// of its own, and the sums of a head's tasks are added in their order at the end: results depend on the number of
// threads, never on their timing.
#pragma once

#include "attention_layout.h"

namespace trace_megatron {
namespace {

template <class Product, class In>
class BackwardPass {
 public:
  typedef typename Product::Elem Elem;
  typedef Packing<Product, In> Pack;
  static constexpr int kDepth = Product::kDepth;
  static constexpr int64_t kGroup = 4;  // panels: their probabilities and score gradients stay in cache
  static constexpr int64_t kKeys = kGroup * kPanel;

  BackwardPass(const AttentionBackward& call, int num_threads, Arena& arena)
      : call_(call),
        sizes_(call.args),
        length_(sizes_.dim / kDepth),
        num_runs_(count_runs(sizes_, num_threads)),
        waves_(sizes_, bytes_per_head(), num_runs_, num_threads) {
    waves_.take(arena);
    forest_.take(sizes_, arena);
    turned_keys_ = arena.take<Elem>(waves_.num_slots() * head_elems());
    turned_values_ = arena.take<Elem>(waves_.num_slots() * head_elems());
    paired_keys_ = arena.take<Elem>(waves_.num_slots() * head_elems());
    run_begin_ = arena.take<int64_t>(num_runs_ + 1);
    run_panels_ = arena.take<int64_t>(num_runs_);
    key_sums_ = arena.take<float>(waves_.num_slots() * num_runs_ * run_size());
    value_sums_ = arena.take<float>(waves_.num_slots() * num_runs_ * run_size());
    scratch_begin_ = arena.take<char>(0);
    Scratch scratch;
    Arena measured(nullptr);
    scratch.take(sizes_, length_, measured);
    scratch_bytes_ = measured.used();
    arena.take<char>(int64_t(scratch_bytes_) * num_threads);
  }

  void run(const Parallel& parallel) {
    forest_.fill(sizes_, call_.args.subtree_end);
    divide_blocks();
    waves_.plan(sizes_, sizes_.num_panels, num_runs_, sizes_.num_panels);
    const auto task = [](void* pass, const Stage& stage, int64_t index, int thread) {
      static_cast<BackwardPass*>(pass)->run_task(stage, index, thread);
    };
    run_stages(parallel, waves_.stages, waves_.num_stages, task, this);
  }

 private:
  struct Scratch {
    Block block;
    Elem *queries, *paired_queries;  // [block_rows, length], [block_rows / depth, dim]
    Elem *grads, *paired_grads;      // the same of grad_out
    Elem* probs;                     // [block_rows / depth, kKeys], rows along k
    Elem* score_grads;               // [block_rows / depth, kKeys], rows along k
    Elem* score_grads_by_key;        // [block_rows, kKeys / depth], keys along k
    float* query_sums;               // [block_rows, dim]
    float* lse;                      // [block_rows], base 2
    float* delta;                    // [block_rows] sum over d of grad_out * out
    Elem* panel;                     // [kPanel, length]

    void take(const Sizes& sizes, int64_t length, Arena& arena) {
      block.take(sizes, arena);
      queries = arena.take<Elem>(sizes.block_rows * length);
      grads = arena.take<Elem>(sizes.block_rows * length);
      probs = arena.take<Elem>(sizes.block_rows / kDepth * kKeys);
      score_grads = arena.take<Elem>(sizes.block_rows / kDepth * kKeys);
      if constexpr (kDepth == 1) {  // both orders are one
        paired_queries = queries;
        paired_grads = grads;
        score_grads_by_key = score_grads;
      } else {
        paired_queries = arena.take<Elem>(sizes.block_rows / kDepth * sizes.dim);
        paired_grads = arena.take<Elem>(sizes.block_rows / kDepth * sizes.dim);
        score_grads_by_key = arena.take<Elem>(sizes.block_rows * kKeys / kDepth);
      }
      query_sums = arena.take<float>(sizes.block_rows * sizes.dim);
      lse = arena.take<float>(sizes.block_rows);
      delta = arena.take<float>(sizes.block_rows);
      panel = arena.take<Elem>(kPanel * length);
    }
  };

  // Runs per head: few, for each has sums of its own, yet so many that all threads have about equal work.
  static int64_t count_runs(const Sizes& sizes, int num_threads) {
    int64_t runs = 1;
    while ((sizes.num_groups * runs) % num_threads != 0 && sizes.num_groups * runs < 4 * num_threads) ++runs;
    return smaller(runs, sizes.num_blocks > 0 ? sizes.num_blocks : 1);
  }

  int64_t head_elems() const { return sizes_.num_panels * kPanel * length_; }
  int64_t run_size() const { return sizes_.num_panels * kPanel * sizes_.dim; }
  int64_t bytes_per_head() const {
    return head_elems() * 3 * int64_t(sizeof(Elem)) + num_runs_ * run_size() * 2 * int64_t(sizeof(float));
  }

  Scratch scratch(int thread) const {
    Arena arena(scratch_begin_ + size_t(thread) * scratch_bytes_);
    Scratch scratch;
    scratch.take(sizes_, length_, arena);
    return scratch;
  }

  // Cuts the blocks into runs of about equally many visible panels.
  void divide_blocks() const {
    Scratch s = scratch(0);
    int64_t total = 0, seen = 0, run = 0;
    if (num_runs_ > 1) {
      for (int64_t index = 0; index < sizes_.num_blocks; ++index) {
        s.block.open(sizes_, forest_, call_.args.position, index);
        total += s.block.num_visible;
      }
    }
    run_begin_[0] = 0;
    for (int64_t index = 0; index < sizes_.num_blocks && num_runs_ > 1; ++index) {
      while (run + 1 < num_runs_ && seen * num_runs_ >= total * (run + 1)) run_begin_[++run] = index;
      s.block.open(sizes_, forest_, call_.args.position, index);
      seen += s.block.num_visible;
    }
    while (run < num_runs_) run_begin_[++run] = sizes_.num_blocks;
    for (run = 0; run < num_runs_; ++run) {
      const int64_t last = smaller(run_begin_[run + 1] * sizes_.block_tokens, sizes_.num_queries) - 1;
      const bool empty = run_begin_[run] == run_begin_[run + 1];
      run_panels_[run] = empty ? 0 : call_.args.position[last] / kPanel + 1;
    }
  }

  void run_task(const Stage& stage, int64_t task, int thread) const {
    const int64_t heads = stage.num_tasks / (stage.kind == Waves::kCompute ? num_runs_ : sizes_.num_panels);
    const int64_t place = task % heads, part = task / heads;
    const int64_t group = waves_.group(stage.wave, place), slot = waves_.slot(stage.wave, place);
    switch (stage.kind) {
      case Waves::kPack:
        return pack_panel(group, slot, part, thread);
      case Waves::kCompute:
        return differentiate_run(group, slot, part, thread);
      default:
        return write_panel(group, slot, part);
    }
  }

  // `slot` is the head's place in what is laid out and in the sums.
  void pack_panel(int64_t group, int64_t slot, int64_t panel, int thread) const {
    const Scratch s = scratch(thread);
    const int64_t offset = slot * head_elems() + panel * kPanel * length_;
    Pack::read_panel(call_.args.k, sizes_, panel, group, s.panel);
    Pack::turn(s.panel, sizes_.dim, turned_keys_ + offset);
    Pack::pair(s.panel, kPanel, sizes_.dim, paired_keys_ + offset);
    Pack::read_panel(call_.args.v, sizes_, panel, group, s.panel);
    Pack::turn(s.panel, sizes_.dim, turned_values_ + offset);
  }

  void differentiate_run(int64_t group, int64_t slot, int64_t run, int thread) const {
    float* key_sums = key_sums_ + (slot * num_runs_ + run) * run_size();
    float* value_sums = value_sums_ + (slot * num_runs_ + run) * run_size();
    const size_t used = size_t(run_panels_[run] * kPanel * sizes_.dim) * sizeof(float);
    memset(key_sums, 0, used);
    memset(value_sums, 0, used);
    Scratch s = scratch(thread);
    for (int64_t index = run_begin_[run]; index < run_begin_[run + 1]; ++index) {
      s.block.open(sizes_, forest_, call_.args.position, index);
      read_block(s, group);
      differentiate_block(s, slot * head_elems(), key_sums, value_sums);
      write_block(s, group);
    }
  }

  void read_block(const Scratch& s, int64_t group) const {
    const int64_t num_rows = round_up(s.block.num_rows, kTileRows);
    Pack::read_block(call_.args.q, sizes_, s.block, group, s.queries);
    Pack::read_block(call_.grad_out, sizes_, s.block, group, s.grads);
    if constexpr (kDepth != 1) {
      Pack::pair(s.queries, num_rows, sizes_.dim, s.paired_queries);
      Pack::pair(s.grads, num_rows, sizes_.dim, s.paired_grads);
    }
    memset(s.query_sums, 0, size_t(num_rows * sizes_.dim) * sizeof(float));
    for (int64_t row = 0; row < num_rows; ++row) {
      s.lse[row] = s.delta[row] = 0.0f;
      if (row >= s.block.num_rows) continue;
      const int64_t token = s.block.first + row / sizes_.heads_per_group;
      const int64_t head = group * sizes_.heads_per_group + row % sizes_.heads_per_group;
      s.delta[row] =
          Pack::dot(Pack::row(call_.grad_out, token, head), Pack::row(call_.out, token, head), sizes_.head_dim);
      s.lse[row] = call_.lse[token * call_.args.num_heads + head] * kLog2E;
    }
  }

  void differentiate_block(const Scratch& s, int64_t head, float* key_sums, float* value_sums) const {
    for (int64_t first = 0; first < s.block.num_visible; first += kGroup) {
      const int64_t count = smaller(kGroup, s.block.num_visible - first);
      const int32_t* panels = s.block.panels + first;
      const RowRange rows = s.block.rows_of(sizes_, forest_, first, count);
      for (int64_t row = rows.begin; row < rows.end; row += kTileRows) {
        alignas(64) float scores[kTileRows * kKeys], prob_grads[kTileRows * kKeys];
        multiply_panels<Product>(s.queries + row * length_, length_, panels, count, turned_keys_ + head, scores, kKeys);
        multiply_panels<Product>(s.grads + row * length_, length_, panels, count, turned_values_ + head, prob_grads,
                                 kKeys);
        if (first + count <= s.block.num_full) {
          differentiate_softmax<false>(s, row, panels, count, scores, prob_grads);
        } else {
          differentiate_softmax<true>(s, row, panels, count, scores, prob_grads);
        }
      }
      for (int64_t i = 0; i < count; ++i) {
        const int64_t at = panels[i] * kPanel * sizes_.dim;
        add_outer(s.probs + i * kPanel, s.paired_grads, rows, value_sums + at);
        add_outer(s.score_grads + i * kPanel, s.paired_queries, rows, key_sums + at);
      }
      for (int64_t row = rows.begin; row < rows.end; row += kTileRows)
        add_rows<Product>(s.score_grads_by_key + row * (kKeys / kDepth), kKeys / kDepth, panels, count,
                          paired_keys_ + head, nullptr, s.query_sums + row * sizes_.dim, sizes_.dim);
    }
  }

  // prob = 2^(score - lse), score_grad = prob * (prob_grad - delta) * scale, both 0 where a key is hidden.
  template <bool kMasked>
  void differentiate_softmax(const Scratch& s, int64_t row, const int32_t* panels, int64_t num_panels,
                             const float* scores, const float* prob_grads) const {
    const Vec scale = splat(call_.args.scale), scale2 = splat(call_.args.scale * kLog2E);
    for (int64_t vec = 0; vec < num_panels * kPanelVecs; ++vec) {
      const int64_t column = vec * kWidth;
      Vec probs[kTileRows], grads[kTileRows];
      TRACE_UNROLL
      for (int i = 0; i < kTileRows; ++i) {
        probs[i] = exp2(load(scores + i * kKeys + column) * scale2 - splat(s.lse[row + i]));
        grads[i] = probs[i] * (load(prob_grads + i * kKeys + column) - splat(s.delta[row + i])) * scale;
        if constexpr (kMasked) {
          const int64_t key = int64_t(panels[vec / kPanelVecs]) * kPanel + vec % kPanelVecs * kWidth;
          const IntVec visible = visible_lanes(forest_, key, s.block.row_position[row + i]);
          probs[i] = where(visible, probs[i], splat(0.0f));
          grads[i] = where(visible, grads[i], splat(0.0f));
        }
        if constexpr (kDepth != 1)
          Product::write(s.score_grads_by_key + ((row + i) * kKeys + column) / kDepth, grads[i]);
      }
      Product::write_turned(s.probs + row / kDepth * kKeys + column, kKeys, probs);
      Product::write_turned(s.score_grads + row / kDepth * kKeys + column, kKeys, grads);
    }
  }

  // to[16 keys, dim] += left[rows, 16 keys] turned, times right[rows, dim].
  void add_outer(const Elem* left, const Elem* right, RowRange rows, float* to) const {
    const int64_t dim = sizes_.dim, begin = rows.begin / kDepth, end = rows.end / kDepth;
    for (int64_t key = 0; key < kPanel; key += kTileRows)
      for_vec_tiles(dim / kWidth, [&](int64_t vec, auto count) TRACE_INLINE_LAMBDA {
        constexpr int kVecs = decltype(count)::value;
        const Elem* columns[kVecs];
        for (int j = 0; j < kVecs; ++j) columns[j] = right + (vec + j) * kWidth;
        Tile<kVecs> tile;
        tile.read(to + key * dim + vec * kWidth, dim);
        for (int64_t k = begin; k < end; ++k) tile.template step<Product>(left + k * kKeys + key, 1, columns, k * dim);
        tile.write(to + key * dim + vec * kWidth, dim);
      });
  }

  void write_block(const Scratch& s, int64_t group) const {
    for (int64_t row = 0; row < s.block.num_rows; ++row) {
      const int64_t token = s.block.first + row / sizes_.heads_per_group;
      const int64_t head = group * sizes_.heads_per_group + row % sizes_.heads_per_group;
      In* to = static_cast<In*>(call_.grad_q) + (token * call_.args.num_heads + head) * sizes_.head_dim;
      for (int64_t d = 0; d < sizes_.head_dim; ++d) from_float(s.query_sums[row * sizes_.dim + d], to[d]);
    }
  }

  void write_panel(int64_t group, int64_t slot, int64_t panel) const {
    for (int64_t token = panel * kPanel; token < smaller((panel + 1) * kPanel, sizes_.num_keys); ++token) {
      const int64_t at = (token * sizes_.num_groups + group) * sizes_.head_dim;
      write_sum(key_sums_, slot, panel, token, static_cast<In*>(call_.grad_k) + at);
      write_sum(value_sums_, slot, panel, token, static_cast<In*>(call_.grad_v) + at);
    }
  }

  // Adds up, in the first run's memory, what the runs found for one key; runs of lower blocks may not reach it.
  void write_sum(float* sums, int64_t slot, int64_t panel, int64_t token, In* to) const {
    float* total = sums + slot * num_runs_ * run_size() + token * sizes_.dim;
    if (panel >= run_panels_[0]) memset(total, 0, size_t(sizes_.head_dim) * sizeof(float));
    for (int64_t run = 1; run < num_runs_; ++run) {
      const float* sum = total + run * run_size();
      if (panel < run_panels_[run])
        for (int64_t d = 0; d < sizes_.head_dim; ++d) total[d] += sum[d];
    }
    for (int64_t d = 0; d < sizes_.head_dim; ++d) from_float(total[d], to[d]);
  }

  const AttentionBackward& call_;
  const Sizes sizes_;
  const int64_t length_, num_runs_;
  Waves waves_;
  Forest forest_;
  Elem *turned_keys_, *turned_values_;  // [slots, num_panels, length, kPanel]
  Elem* paired_keys_;                   // [slots, num_panels * kPanel / depth, dim]
  int64_t* run_begin_;                  // [num_runs + 1] first block of each run
  int64_t* run_panels_;                 // [num_runs] panels that a run may see
  float *key_sums_, *value_sums_;       // [slots, num_runs, num_panels * kPanel, dim]
  char* scratch_begin_;
  size_t scratch_bytes_;
};

}  // namespace
}  // namespace trace_megatron
