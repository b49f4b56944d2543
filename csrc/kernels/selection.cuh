// The best units of many rows, by one block. A row offers units of falling value; of equal ones lower levels come first,
// then lower rows: the order of csrc/cpu/allocate.cpp, unit for unit.
//
// The B best are found by halving the interval in which the value of the B-th lies, on the bit patterns of doubles: at
// most 62 probes, each of which counts the units of at least some value, and far fewer where values differ, because a
// probe that counts exactly B is the last one. In a narrow interval few values are left, and the largest of them is tried
// as well: where it is that of the B-th, which ties with others, the search is over. Ties are divided by level, then by row.
//
// Rows go on from where the last probe that was not too generous left them, at most kStride units at a time between two
// sums, so that a probe costs O((B + kStride rows) / threads) whatever the values are.
#pragma once

#include "blocks.cuh"
#include "selection.h"

namespace trace_megatron {

struct Selection {
  int64_t num_rows, budget, limit;  // limit: most units of one row
  int opening;                      // a row's first units that share level 0
  bool paid_only;                   // no unit of zero value
};

constexpr int64_t kStride = 32;
constexpr long long kNarrow = 1ll << 42;  // a relative width of 1/1024, after 20 probes
constexpr int64_t kMostUnits = 0x7fffffff;  // a budget is an int32

__device__ inline int64_t between(int64_t x, int64_t low, int64_t high) { return min(max(x, low), high); }

// Units is the kind of row: start(row), value(row, state) of the next unit, advance(row, state) past it,
// is_constant(row, state): the next unit and all after it are worth the same.
template <class Units>
class Selector {
 public:
  __device__ Selector(const Units& units, const Selection& selection, Global<SelectionRow> rows,
                      Global<SelectionRow> other_rows, BlockScratch& block)
      : units_(units), selection_(selection), taken_(rows), trial_(other_rows), block_(block) {}

  // Each thread goes over rows threadIdx.x, threadIdx.x + kBlockThreads, ... and finds their final state in
  // taken()[row], without a barrier.
  __device__ void select() {
    for (int64_t row = threadIdx.x; row < selection_.num_rows; row += kBlockThreads) taken_[row] = units_.start(row);
    long long low = selection_.paid_only, high = 0x3ff0000000000001;  // no unit is worth more than 1
    if (probe(__longlong_as_double(low))) return;
    while (high - low > 1) {
      const long long middle = low + (high - low) / 2;
      if (probe(__longlong_as_double(middle)))
        high = middle;
      else
        low = middle;
      if (num_taken_ == selection_.budget) return;
      if (high - low >= kNarrow) continue;
      const double largest = largest_next();
      if (!probe(largest)) return divide_ties(largest);
      if (num_taken_ == selection_.budget) return;
    }
    divide_ties(__longlong_as_double(low));
  }
  __device__ Global<SelectionRow> taken() const { return taken_; }

 private:
  // Moves a row on over at most `most` units of at least this value, up to `limit` in all. False where there are more.
  __device__ __forceinline__ bool advance(int64_t row, SelectionRow& state, double value, int64_t most, int64_t limit) const {
    for (int64_t i = 0; i < most; ++i) {
      const double next = units_.value(row, state);
      if (state.count >= limit || !(next >= value)) return true;
      if (next == 0.0 || units_.is_constant(row, state)) {
        state.last = next, state.count = limit;
        return true;
      }
      units_.advance(row, state);
      state.last = next;
    }
    return false;
  }

  // Of all units that are not taken.
  __device__ __forceinline__ double largest_next() {
    Candidate mine{0.0, -1};
    for (int64_t row = threadIdx.x; row < selection_.num_rows; row += kBlockThreads) {
      const SelectionRow state = taken_[row];
      const Candidate next{units_.value(row, state), row};
      if (state.count < selection_.limit && beats(next, mine)) mine = next;
    }
    return block_.best(mine).value;
  }

  // Takes all units of at least this value, if they are not more than the budget.
  __device__ __forceinline__ bool probe(double value) {
    constexpr int64_t kOpen = int64_t(1) << 48;  // above it a sum counts the threads with rows that go on
    Global<SelectionRow> from = taken_;
    for (;;) {
      int64_t units = 0;
      bool is_open = false;
      for (int64_t row = threadIdx.x; row < selection_.num_rows; row += kBlockThreads) {
        SelectionRow state = from[row];
        is_open |= !advance(row, state, value, kStride, selection_.limit);
        trial_[row] = state;
        units = min(units + state.count, selection_.budget + 1);
      }
      const int64_t sum = block_.sum(units + (is_open ? kOpen : 0)), total = sum % kOpen;
      if (total > selection_.budget) return false;
      if (sum == total) {
        num_taken_ = total;
        break;
      }
      from = trial_;
    }
    const Global<SelectionRow> old = taken_;
    taken_ = trial_, trial_ = old;
    return true;
  }

  // Units of a run of ties that starts after `first` units and lie at levels up to this one.
  __device__ __forceinline__ int64_t share(int64_t first, int64_t run, int64_t level) const {
    return level < 0 ? 0 : between(level + selection_.opening - first, 0, run);
  }

  __device__ __forceinline__ int64_t ties_up_to(int64_t level) {
    int64_t units = 0;
    for (int64_t row = threadIdx.x; row < selection_.num_rows; row += kBlockThreads) {
      const SelectionRow start = taken_[row], run = trial_[row];
      units = min(units + share(start.count, run.count, level), selection_.budget + 1);
    }
    return block_.sum(units);
  }

  __device__ __forceinline__ void divide_ties(double value) {
    const int64_t left = selection_.budget - num_taken_;
    for (int64_t row = threadIdx.x; row < selection_.num_rows; row += kBlockThreads) {
      SelectionRow state = taken_[row];
      const int64_t first = state.count;
      advance(row, state, value, kMostUnits, min(selection_.limit, first + left));
      trial_[row] = SelectionRow{0.0, 0.0, 0.0, state.count - first};
    }
    int64_t below = -1, level = selection_.budget, num_below = 0;  // the level that is not taken whole
    while (level - below > 1) {
      const int64_t middle = below + (level - below) / 2, units = ties_up_to(middle);
      if (units >= left)
        level = middle;
      else
        below = middle, num_below = units;
    }
    int64_t room = left - num_below;
    for (int64_t base = 0; base < selection_.num_rows; base += kBlockThreads) {
      const int64_t row = base + threadIdx.x;
      SelectionRow state{}, run{};
      if (row < selection_.num_rows) state = taken_[row], run = trial_[row];
      const int64_t lower = share(state.count, run.count, below);
      const int64_t here = share(state.count, run.count, level) - lower;
      int64_t before;
      const int64_t total = block_.scan(here, before);
      if (row < selection_.num_rows) {
        advance(row, state, value, kMostUnits, state.count + lower + between(room - before, 0, here));
        taken_[row] = state;
      }
      room = max(room - total, int64_t(0));
    }
  }

  const Units units_;
  const Selection selection_;
  Global<SelectionRow> taken_, trial_;
  BlockScratch& block_;
  int64_t num_taken_ = 0;
};

// Rows of a segment; false where its offsets, its budget or its probabilities are wrong, for all threads alike.
struct Segment {
  int64_t first, num_rows, budget;
};
template <class Params>
__device__ bool read_segment(const Params& p, Segment& segment) {
  bool wrong = p.offsets[0] != 0 || p.offsets[p.num_segments] != p.num_rows;
  for (int64_t i = threadIdx.x; i < p.num_segments; i += kBlockThreads) wrong |= p.offsets[i] > p.offsets[i + 1];
  if (__syncthreads_or(wrong)) {
    segment = {0, 0, 0};
    return false;
  }
  segment.first = p.offsets[blockIdx.x];
  segment.num_rows = p.offsets[blockIdx.x + 1] - segment.first;
  segment.budget = p.budgets[blockIdx.x];
  wrong = segment.budget < 0 || segment.budget > kMostUnits;
  for (int64_t row = threadIdx.x; row < segment.num_rows; row += kBlockThreads) {
    const double prob = read_prob(p, segment.first + row);
    wrong |= !(prob >= 0.0 && prob <= 1.0);
  }
  return !__syncthreads_or(wrong);
}

template <class Params>
__device__ double read_prob(const Params& p, int64_t row) {
  return p.float_probs ? double(p.float_probs[row]) : p.double_probs[row];
}

template <class Params>
__device__ void write_counts(const Params& p, const Segment& segment, Global<SelectionRow> rows) {
  for (int64_t row = threadIdx.x; row < segment.num_rows; row += kBlockThreads) {
    const SelectionRow state = rows[row];
    p.counts[segment.first + row] = state.count;
  }
}

}  // namespace trace_megatron
