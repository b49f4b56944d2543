// One warp for each block of tokens, then one warp for each row of the lists. On an H200, T = 131,072, blocks of 128:
//   bytes   4 T read, 16 N^2 = 16.8 MB written: 17.3 MB, 3.6 us at 4.8 TB/s
//   work    N / 32 = 32 steps a warp, two ballots each, 1,024 warps on 132 SMs: below the writes
//   expect  12 us, two launches included; create_block_mask would evaluate 1.7e10 pairs
#include "tree_block_mask.h"

#include "primitives.cuh"

namespace trace_megatron {
namespace {

constexpr int kWarps = 4;  // of a block

__device__ int64_t warp_index() { return int64_t(blockIdx.x) * kWarps + threadIdx.x / kWarpSize; }

// Blocks of queries in [i + 1, full_end) see all keys of block i, those in [full_end, seen_end) some.
__global__ void __launch_bounds__(kWarps* kWarpSize, 1) block_ends_kernel(TreeBlockMaskParams p) {
  const int64_t num_blocks = (p.num_tokens + p.block_size - 1) / p.block_size, i = warp_index();
  if (i >= num_blocks) return;
  int64_t low = p.num_tokens, high = 0;
  const int64_t end = min((i + 1) * p.block_size, p.num_tokens);
  for (int64_t token = i * p.block_size + threadIdx.x % kWarpSize; token < end; token += kWarpSize) {
    const int64_t value = min(max(int64_t(p.subtree_end[token]), int64_t(0)), p.num_tokens);
    low = min(low, value), high = max(high, value);
  }
  for (int step = kWarpSize / 2; step > 0; step /= 2) {
    low = min(low, __shfl_xor_sync(kAllLanes, low, step));
    high = max(high, __shfl_xor_sync(kAllLanes, high, step));
  }
  if (threadIdx.x % kWarpSize != 0) return;
  p.ends[i] = int32_t(max(low / p.block_size, i + 1));
  p.ends[num_blocks + i] = int32_t((high + p.block_size - 1) / p.block_size);
}

// A row whose blocks are at most two runs [a, b) and [c, d), b <= c; empty runs have their end at or below their begin.
__device__ void write_runs(Global<int32_t> count, Global<int32_t> index, int64_t row, int64_t num_blocks, int64_t a,
                           int64_t b, int64_t c, int64_t d) {
  b = max(a, b), d = max(c, d);
  const int64_t total = b - a + d - c;
  if (threadIdx.x % kWarpSize == 0) count[row] = int32_t(total);
  for (int64_t i = threadIdx.x % kWarpSize; i < num_blocks; i += kWarpSize) {
    const bool first = a <= i && i < b, second = c <= i && i < d;
    const int64_t listed = min(max(i - a, int64_t(0)), b - a) + min(max(i - c, int64_t(0)), d - c);  // below i
    index[row * num_blocks + (first || second ? listed : total + i - listed)] = int32_t(i);
  }
}

// The blocks i up to `row` for which `is_listed(i)`, by ballots: how many there are, then where each one goes.
template <class IsListed>
__device__ void write_chosen(Global<int32_t> count, Global<int32_t> index, int64_t row, int64_t num_blocks,
                             const IsListed& is_listed) {
  const int lane = int(threadIdx.x) % kWarpSize;
  int64_t total = 0;
  for (int64_t base = 0; base <= row; base += kWarpSize)
    total += __popc(__ballot_sync(kAllLanes, base + lane <= row && is_listed(base + lane)));
  if (lane == 0) count[row] = int32_t(total);
  int64_t before = 0;
  for (int64_t base = 0; base < num_blocks; base += kWarpSize) {
    const int64_t i = base + lane;
    const bool listed = i <= row && is_listed(i);
    const unsigned lanes = __ballot_sync(kAllLanes, listed);
    const int64_t below = before + __popc(lanes & ((1u << lane) - 1));
    if (i < num_blocks) index[row * num_blocks + (listed ? below : total + i - below)] = int32_t(i);
    before += __popc(lanes);
  }
}

__global__ void __launch_bounds__(kWarps* kWarpSize, 1) block_lists_kernel(TreeBlockMaskParams p) {
  const int64_t num_blocks = (p.num_tokens + p.block_size - 1) / p.block_size, row = warp_index();
  if (row >= num_blocks) return;
  // Its own queries see some of a block's keys, or all where the only query sees itself: blocks of one token.
  const int64_t own_is_full = p.block_size == 1;
  const int64_t full_end = p.ends[row], seen_end = p.ends[num_blocks + row];
  write_runs(p.full_query_count, p.full_query_index, row, num_blocks, row, row + own_is_full, row + 1, full_end);
  write_runs(p.partial_query_count, p.partial_query_index, row, num_blocks, row, row + 1 - own_is_full, full_end,
             seen_end);
  const auto is_full = [&](int64_t i) { return i == row ? own_is_full != 0 : row < p.ends[i]; };
  const auto is_partial = [&](int64_t i) {
    return i == row ? own_is_full == 0 : row >= p.ends[i] && row < p.ends[num_blocks + i];
  };
  write_chosen(p.full_key_count, p.full_key_index, row, num_blocks, is_full);
  write_chosen(p.partial_key_count, p.partial_key_index, row, num_blocks, is_partial);
}

}  // namespace

extern "C" cudaError_t launch_tree_block_mask(const TreeBlockMaskParams* params, cudaStream_t stream) {
  if (params->num_tokens == 0) return cudaSuccess;
  const int64_t num_blocks = (params->num_tokens + params->block_size - 1) / params->block_size;
  const dim3 grid(unsigned((num_blocks + kWarps - 1) / kWarps)), block(kWarps * kWarpSize);
  const cudaError_t error = launch(block_ends_kernel, grid, block, 0, stream, *params);
  return error != cudaSuccess ? error : launch(block_lists_kernel, grid, block, 0, stream, *params);
}

}  // namespace trace_megatron
