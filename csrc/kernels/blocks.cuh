// Sums, scans and best candidates over the threads of one block. Each call has one barrier; scratch is used in turns, so
// that a call need not wait until all have read the result of the one before.
#pragma once

#include "primitives.cuh"

namespace trace_megatron {

constexpr int kBlockThreads = 256;
constexpr int kBlockWarps = kBlockThreads / kWarpSize;

// A candidate of an argmax: the larger value wins, of equal ones the lower index; index -1 for none.
struct Candidate {
  double value;
  int64_t index;
};

__device__ inline bool beats(const Candidate& a, const Candidate& b) {
  if (a.index < 0 || b.index < 0) return b.index < 0 && a.index >= 0;
  return a.value > b.value || (a.value == b.value && a.index < b.index);
}

// Use by all kBlockThreads threads together.
class BlockScratch {
 public:
  __device__ BlockScratch(Shared<int64_t> sums, Shared<Candidate> candidates) : sums_(sums), candidates_(candidates) {}

  __device__ int64_t sum(int64_t x) {
    int64_t before;
    return scan(x, before);
  }

  // `before`: what the threads of lower index have together. Returns the sum of all.
  __device__ int64_t scan(int64_t x, int64_t& before) {
    const int lane = int(threadIdx.x) % kWarpSize, warp = int(threadIdx.x) / kWarpSize;
    int64_t inclusive = x;
    for (int delta = 1; delta < kWarpSize; delta *= 2) {
      const int64_t other = __shfl_up_sync(kAllLanes, inclusive, delta);
      if (lane >= delta) inclusive += other;
    }
    const Shared<int64_t> sums = sums_ + turn_ * kBlockWarps;
    if (lane == kWarpSize - 1) sums[warp] = inclusive;
    __syncthreads();
    turn_ ^= 1;
    int64_t total = 0, below = 0;
    for (int i = 0; i < kBlockWarps; ++i) {
      const int64_t part = sums[i];
      below += i < warp ? part : 0;
      total += part;
    }
    before = below + inclusive - x;
    return total;
  }

  __device__ Candidate best(Candidate mine) {
    const int lane = int(threadIdx.x) % kWarpSize, warp = int(threadIdx.x) / kWarpSize;
    for (int step = kWarpSize / 2; step > 0; step /= 2) {
      const Candidate other{__shfl_xor_sync(kAllLanes, mine.value, step), __shfl_xor_sync(kAllLanes, mine.index, step)};
      if (beats(other, mine)) mine = other;
    }
    const Shared<Candidate> candidates = candidates_ + turn_ * kBlockWarps;
    if (lane == 0) candidates[warp] = mine;
    __syncthreads();
    turn_ ^= 1;
    Candidate winner = candidates[0];
    for (int i = 1; i < kBlockWarps; ++i) {
      const Candidate other = candidates[i];
      if (beats(other, winner)) winner = other;
    }
    return winner;
  }

 private:
  Shared<int64_t> sums_;
  Shared<Candidate> candidates_;
  int turn_ = 0;
};

#define BLOCK_SCRATCH(name)                                     \
  SHARED_ARRAY(int64_t, name##_sums, 2 * kBlockWarps);          \
  SHARED_ARRAY(Candidate, name##_candidates, 2 * kBlockWarps);  \
  BlockScratch name(name##_sums, name##_candidates)

}  // namespace trace_megatron
