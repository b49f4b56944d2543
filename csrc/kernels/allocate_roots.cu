// One block for each pool. On an H200, one pool of P = 512 prompts and M = 1,024 rollouts, float32:
//   bytes   4 P read, 8 P written: 6 KB; the workspace (64 P = 32 KB) stays in L1 and L2
//   floor   no throughput: 20 to 45 dependent steps (counted by the CPU runner), each one barrier, ten shuffles and a pass
//           over two rows a thread, about 0.6 us
//   expect  15 to 30 us, launch included
#include "allocate_roots.h"

#include "selection.cuh"

namespace trace_megatron {
namespace {

// Marginals of the concave hull of 1 - v^m - (1 - v)^m, m = count + 1. With u = min(v, 1 - v) and p = u (1 - u) they are
// p, p, p, then p (u^(m-2) + (1-u)^(m-2)): the function lies on its hull except at m = 1, where it is 0.
struct RootUnits {
  const AllocateRootsParams& p;
  int64_t first;

  __device__ double rarer(int64_t row) const {
    const double v = read_prob(p, first + row);
    return min(v, 1.0 - v);
  }
  __device__ SelectionRow start(int64_t row) const {
    const double u = rarer(row);
    return {u, 1.0 - u, 0.0, 0};
  }
  __device__ double value(int64_t row, const SelectionRow& state) const {
    const double u = rarer(row), hull = u * (1.0 - u);
    return state.count < 3 ? hull : hull * (state.power + state.other_power);
  }
  __device__ void advance(int64_t row, SelectionRow& state) const {
    const double u = rarer(row);
    if (++state.count >= 3) state.power *= u, state.other_power *= 1.0 - u;
  }
  __device__ bool is_constant(int64_t row, const SelectionRow& state) const {
    const double u = rarer(row);
    return state.count >= 3 && state.power * u == state.power && state.other_power * (1.0 - u) == state.other_power;
  }
};

__device__ bool is_feasible(const AllocateRootsParams& p, const Segment& segment) {
  if (!p.exact || segment.budget == 0) return true;
  if (segment.num_rows == 0 || segment.budget < 2) return false;
  if (p.max_rollouts < 0) return true;
  return p.max_rollouts >= 2 && (segment.budget - 1) / p.max_rollouts + 1 <= segment.num_rows &&
         (p.max_rollouts != 2 || segment.budget % 2 == 0);
}

// Lifts the one prompt left at m = 1 to 2, or drops it to 0, whichever costs less.
__device__ void close_hole(const AllocateRootsParams& p, const RootUnits& units, const Segment& segment, int64_t limit,
                           Global<SelectionRow> rows, BlockScratch& block) {
  Candidate lone{0.0, -1}, receiver{0.0, -1}, giver{0.0, -1};
  for (int64_t row = threadIdx.x; row < segment.num_rows; row += kBlockThreads) {
    const SelectionRow state = rows[row];
    const Candidate gain{units.value(row, state), row}, loss{-state.last, row};
    if (state.count == 1) lone = gain;
    if (state.count >= 2 && state.count < limit && beats(gain, receiver)) receiver = gain;
    if (state.count >= 3 && beats(loss, giver)) giver = loss;
  }
  lone = block.best(lone);
  if (lone.index < 0) return;
  receiver = block.best(receiver), giver = block.best(giver);
  const bool has_gain = receiver.index >= 0 && (p.exact || receiver.value > 0.0);
  const bool must_lift = p.exact && receiver.index < 0;  // nobody else could take the unit
  const double hull = lone.value, best_gain = has_gain ? receiver.value : 0.0;
  const bool lift = giver.index >= 0 && (must_lift || -giver.value - hull < hull - best_gain);
  for (int64_t row = threadIdx.x; row < segment.num_rows; row += kBlockThreads) {
    SelectionRow state = rows[row];
    if (row == lone.index) state.count = lift ? 2 : 0;
    if (lift && row == giver.index) --state.count;
    if (!lift && has_gain && row == receiver.index) ++state.count;
    rows[row] = state;
  }
}

__global__ void __launch_bounds__(kBlockThreads, 1) allocate_roots_kernel(AllocateRootsParams p) {
  BLOCK_SCRATCH(block);
  Segment segment;
  if (!read_segment(p, segment) || !is_feasible(p, segment)) return;
  const int64_t limit = p.max_rollouts < 0 ? segment.budget : min(segment.budget, p.max_rollouts);
  const RootUnits units{p, segment.first};
  const Selection selection{segment.num_rows, limit < 2 ? 0 : segment.budget, limit < 2 ? 0 : limit, 2, !p.exact};
  const Global<SelectionRow> rows = p.rows + segment.first;
  Selector<RootUnits> selector(units, selection, rows, rows + p.num_rows, block);
  selector.select();
  close_hole(p, units, segment, limit, selector.taken(), block);
  write_counts(p, segment, selector.taken());
}

}  // namespace

extern "C" cudaError_t launch_allocate_roots(const AllocateRootsParams* params, cudaStream_t stream) {
  if (params->num_segments == 0) return cudaSuccess;
  return launch(allocate_roots_kernel, dim3(unsigned(params->num_segments)), dim3(kBlockThreads), 0, stream, *params);
}

}  // namespace trace_megatron
