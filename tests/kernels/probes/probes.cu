// Small kernels with known faults and known results, which try the runner itself.
#include "kernels/primitives.cuh"

namespace trace_megatron {

struct ProbeParams {
  Global<const float> from;
  Global<const bf16> halves;
  Global<float> to;
  Global<int> counts;
  int64_t size;
  int fault;  // 0: none
};

constexpr int kThreads = 128;

// to[i] = sum of from, by a tree in shared memory. Fault 1: no barrier in the tree; 2: one step beyond the array.
__global__ void sum_kernel(ProbeParams p) {
  SHARED_ARRAY(float, parts, kThreads);
  float sum = 0.0f;
  for (int64_t i = threadIdx.x; i < p.size + (p.fault == 2); i += kThreads) sum += p.from[i];
  parts[threadIdx.x] = sum;
  for (int half = kThreads / 2; half > 0; half /= 2) {
    __syncthreads();
    if (int(threadIdx.x) < half) parts[threadIdx.x] += parts[threadIdx.x + half];
  }
  __syncthreads();
  if (threadIdx.x == 1) p.to[blockIdx.x] = parts[0];
}

// Neighbours in a warp exchange through shared memory.
__global__ void warp_kernel(ProbeParams p) {
  SHARED_ARRAY(float, values, kThreads);
  const int other = int(threadIdx.x) ^ 1;
  values[threadIdx.x] = float(threadIdx.x);
  __syncwarp();
  const float seen = values[other];
  const float through_shuffle = __shfl_xor_sync(kAllLanes, float(threadIdx.x), 1);
  const unsigned odd = __ballot_sync(kAllLanes, threadIdx.x & 1);
  p.to[threadIdx.x] = seen == through_shuffle && odd == 0xaaaaaaaa ? seen : -1.0f;
}

// Two copies under way at a time; the order of groups matters. Fault 1: it reads the one that is not waited for.
__global__ void copy_kernel(ProbeParams p) {
  DYNAMIC_SHARED(memory);
  const Shared<float> tile = pointer_cast<float>(memory);
  const int lane = int(threadIdx.x);
  cp_async_16(tile + 4 * lane, p.from + 4 * lane);
  cp_async_commit();
  for (int64_t step = 0; step < p.size; ++step) {
    const Shared<float> now = tile + step % 2 * 4 * kThreads, next = tile + (step + 1) % 2 * 4 * kThreads;
    if (step + 1 < p.size) cp_async_16(next + 4 * lane, p.from + (step + 1) * 4 * kThreads + 4 * lane, lane != 3);
    cp_async_commit();
    cp_async_wait<1>();
    __syncthreads();
    const Shared<float> read = p.fault == 1 ? next : now;
    for (int i = 0; i < 4; ++i) p.to[step * 4 * kThreads + i * kThreads + lane] = read[i * kThreads + lane];
    __syncthreads();
  }
}

// to [16, 8] = halves [16, 16] halves[256..] [8, 16]^T through ldmatrix, the right side transposed or not.
__global__ void product_kernel(ProbeParams p) {
  DYNAMIC_SHARED(memory);
  const Shared<bf16> tile = pointer_cast<bf16>(memory);
  const int lane = int(threadIdx.x);
  for (int i = lane; i < 512; i += kWarpSize) tile[i] = p.halves[i];
  __syncwarp();
  uint32_t a[4], b[4];
  ldmatrix_x4(a, tile + (lane % 16) * 16 + lane / 16 * 8);
  // fault 0: rows are columns of B, [8, 16] twice; fault 3: rows are rows of B, [16, 16]
  if (p.fault == 3)
    ldmatrix_x4_trans(b, tile + 256 + (lane % 16) * 16 + lane / 16 * 8);
  else
    ldmatrix_x4(b, tile + 256 + lane % 8 * 16 + lane / 8 % 2 * 8);
  float c[4] = {};
  mma(c, a, {b[0], b[1]}, bf16());
  for (int i = 0; i < 4; ++i) p.to[(lane / 4 + i / 2 * 8) * 8 + lane % 4 * 2 + i % 2] = c[i];
}

// What goes wrong in a way that only the runner can see.
__global__ void fault_kernel(ProbeParams p) {
  SHARED_ARRAY(float, values, kThreads);
  SHARED_ARRAY(int, ticket, 1);
  const int me = int(threadIdx.x);
  if (me == 0) ticket[0] = 0;
  __syncthreads();
  atomicAdd(&ticket[0], 1);
  if (p.fault == 0) {
    __syncthreads();
    if (me == 0) p.counts[blockIdx.x] = ticket[0];
  }
  if (p.fault == 1 && me == 5) values[kThreads] = 0.0f;
  if (p.fault == 2 && me == 5) p.to[0] = values[7];
  if (p.fault == 3 && me == 5) p.to[0] = p.to[1];
  if (p.fault == 4) p.counts[0] = 1;
  if (p.fault == 5) {
    if (me < 64)
      __syncthreads();
    else
      __syncthreads();
  }
  if (p.fault == 6 && me == 5) p.to[0] = pointer_cast<const float2>(p.from + 1)[0].x;
  if (p.fault == 7 && me == 5) cp_async_16(Shared<float>(values), p.from);
  if (p.fault == 8) {
    if (me < 7) __syncthreads();
    values[me] = __shfl_sync(kAllLanes, 1.0f, 0);
  }
  if (p.fault == 9 && me == 0) p.counts[0] = ticket[0];
  if (p.fault == 10) atomicMax(&p.counts[0], me);
}

#define PROBE(name, blocks, threads, bytes)                                       \
  extern "C" cudaError_t name(const ProbeParams* params, cudaStream_t stream) {  \
    return launch(name##_kernel, {blocks}, {threads}, bytes, stream, *params);   \
  }
PROBE(sum, 3, kThreads, 0)
PROBE(warp, 1, kThreads, 0)
PROBE(copy, 1, kThreads, 2 * 4 * kThreads * sizeof(float))
PROBE(product, 1, kWarpSize, 512 * sizeof(bf16))
PROBE(fault, 2, kThreads, 0)


}  // namespace trace_megatron
