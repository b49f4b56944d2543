// One block for each prompt. On an H200, S = 170 prompts of 60 prefixes and 12 units each, float32:
//   bytes   4 P + 16 S read, 8 P written: 0.12 MB, 0.03 us at 4.8 TB/s; the workspace (64 P = 0.65 MB) stays in L2
//   floor   no throughput: about 20 dependent steps a block (counted by the CPU runner; up to 45 with ties), each one
//           barrier, ten shuffles and a pass over the rows, about 0.5 us
//   expect  15 us, launch included
#include "allocate_prefixes.h"

#include "selection.cuh"

namespace trace_megatron {
namespace {

// Unit k + 1 of a prefix is worth q^k (1 - q).
struct PrefixUnits {
  const AllocatePrefixesParams& p;
  int64_t first;

  __device__ double prob(int64_t row) const { return read_prob(p, first + row); }
  __device__ SelectionRow start(int64_t) const { return {1.0, 0.0, 0.0, 0}; }
  __device__ double value(int64_t row, const SelectionRow& state) const { return state.power * (1.0 - prob(row)); }
  __device__ void advance(int64_t row, SelectionRow& state) const { state.power *= prob(row), ++state.count; }
  __device__ bool is_constant(int64_t row, const SelectionRow& state) const {
    return state.power * prob(row) == state.power;
  }
};

__global__ void __launch_bounds__(kBlockThreads, 1) allocate_prefixes_kernel(AllocatePrefixesParams p) {
  BLOCK_SCRATCH(block);
  Segment segment;
  if (!read_segment(p, segment) || (segment.num_rows == 0 && segment.budget > 0)) return;
  const Selection selection{segment.num_rows, segment.budget, segment.budget, 1, false};
  const Global<SelectionRow> rows = p.rows + segment.first;
  Selector<PrefixUnits> selector({p, segment.first}, selection, rows, rows + p.num_rows, block);
  selector.select();
  write_counts(p, segment, selector.taken());
}

}  // namespace

extern "C" cudaError_t launch_allocate_prefixes(const AllocatePrefixesParams* params, cudaStream_t stream) {
  if (params->num_segments == 0) return cudaSuccess;
  return launch(allocate_prefixes_kernel, dim3(unsigned(params->num_segments)), dim3(kBlockThreads), 0, stream, *params);
}

}  // namespace trace_megatron
