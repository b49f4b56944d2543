// One block for each problem; the best of every spend so far stays in shared memory, in place: spends are worked off from
// the highest, and a spend reads only itself and lower ones. On an H200, P = 512 rows, B = 1,024, K = 33, one problem:
//   bytes   8 P K read, 8 P (B + 1) written: 4.3 MB, 0.9 us at 4.8 TB/s
//   work    P B K = 17.3 M additions and maxima in float64, all on one SM: 64 a cycle, 0.31 ms at 1.75 GHz
//   shared  5 loads of 8 bytes for 4 entries, 16 lanes a cycle: 0.77 ms, which is the floor
//   expect  1.5 ms for one problem, the same for 132 at once: the traceback adds P dependent steps of about 0.8 us
#include "allocate_table.h"

#include "blocks.cuh"

namespace trace_megatron {
namespace {

constexpr int kSpends = 4;                    // of one thread at a time, kBlockThreads apart
constexpr double kAuthorsTolerance = 1e-12;   // the reference solver replaces an entry only by one better by more

__device__ double minus_infinity() { return -__longlong_as_double(0x7ff0000000000000); }

// best[s] for the spends first + threadIdx.x + i kBlockThreads becomes max over counts of best[s - count] + value[count].
__device__ void add_row(Shared<double> best, Shared<double> value, int64_t num_counts, int64_t first, int64_t budget) {
  double after[kSpends];
  for (int i = 0; i < kSpends; ++i) after[i] = minus_infinity();
  const int64_t spend = first + threadIdx.x, end = min(num_counts, first + kSpends * kBlockThreads);
  for (int64_t count = 0; count < end; ++count) {
    const double unit = value[count];
    for (int i = 0; i < kSpends; ++i) {
      const int64_t to = spend + i * kBlockThreads, from = to - count;
      if (from >= 0 && to <= budget) after[i] = max(after[i], best[from] + unit);
    }
  }
  __syncthreads();  // all have read what is written now
  for (int i = 0; i < kSpends; ++i) {
    const int64_t to = spend + i * kBlockThreads;
    if (to <= budget) best[to] = after[i];
  }
}

// The smallest count that reaches the best within the tolerance, by one warp. There is one.
__device__ int64_t smallest_count(Global<const double> value, int64_t num_counts, Global<double> before, int64_t spend,
                                  double reached) {
  const int64_t end = min(num_counts, spend + 1);
  for (int64_t base = 0;; base += kWarpSize) {
    const int64_t count = base + threadIdx.x;
    const bool reaches = count < end && before[spend - count] + value[count] >= reached - kAuthorsTolerance;
    const unsigned lanes = __ballot_sync(kAllLanes, reaches);
    if (lanes) return base + __ffs(int(lanes)) - 1;
    if (base >= end) return 0;
  }
}

__global__ void __launch_bounds__(kBlockThreads, 1) allocate_table_kernel(AllocateTableParams p) {
  BLOCK_SCRATCH(block);
  DYNAMIC_SHARED(memory);
  const Shared<double> best = pointer_cast<double>(memory), value = best + (p.budget + 1);
  const int64_t width = p.budget + 1;
  const Global<const double> values = p.values + int64_t(blockIdx.x) * p.num_rows * p.num_counts;
  const Global<double> table = p.table + int64_t(blockIdx.x) * p.num_rows * width;
  const Global<int64_t> counts = p.counts + int64_t(blockIdx.x) * p.num_rows;

  for (int64_t spend = threadIdx.x; spend < width; spend += kBlockThreads)
    best[spend] = spend == 0 ? 0.0 : minus_infinity();
  bool wrong = false;
  for (int64_t row = 0; row < p.num_rows; ++row) {
    for (int64_t count = threadIdx.x; count < p.num_counts; count += kBlockThreads) {
      const double unit = values[row * p.num_counts + count];
      wrong |= !(unit < -minus_infinity());
      value[count] = unit;
    }
    __syncthreads();
    for (int64_t spend = threadIdx.x; spend < width; spend += kBlockThreads) table[row * width + spend] = best[spend];
    constexpr int64_t kChunk = kSpends * kBlockThreads;
    for (int64_t first = p.budget / kChunk * kChunk; first >= 0; first -= kChunk)
      add_row(best, value, p.num_counts, first, p.budget);
    // no barrier: a thread copies the spends that it wrote, and all have read this row's values
  }
  Candidate end{0.0, -1};
  for (int64_t spend = threadIdx.x; spend <= p.budget; spend += kBlockThreads) {
    const Candidate mine{best[spend], spend};
    if ((spend == p.budget || !p.exact) && beats(mine, end)) end = mine;
  }
  end = block.best(end);
  wrong = __syncthreads_or(wrong) || end.value == minus_infinity();
  if (threadIdx.x >= kWarpSize) return;
  int64_t spend = end.index;
  double reached = end.value;
  for (int64_t row = p.num_rows - 1; row >= 0; --row) {
    const int64_t count =
        wrong ? -1
              : smallest_count(values + row * p.num_counts, p.num_counts, table + row * width, spend, reached);
    if (threadIdx.x == 0) counts[row] = count;
    if (wrong) continue;
    spend -= count;
    reached = table[row * width + spend];
  }
}

}  // namespace

extern "C" cudaError_t launch_allocate_table(const AllocateTableParams* params, cudaStream_t stream) {
  if (params->num_problems == 0 || params->num_rows == 0) return cudaSuccess;
  const int64_t bytes = allocate_table_shared_bytes(params->num_counts, params->budget);
  if (bytes > kMostTableSharedBytes) return cudaErrorInvalidValue;
  return launch(allocate_table_kernel, dim3(unsigned(params->num_problems)), dim3(kBlockThreads), size_t(bytes), stream,
                *params);
}

}  // namespace trace_megatron
