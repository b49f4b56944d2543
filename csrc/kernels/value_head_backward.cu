// Four launches: scales of each anchor, rows of the hidden gradient, shares of the weights' gradients, their sums. No
// atomics: a row that several anchors chose is written by the first of them. On an H200, A = 10,000, C = 1,024, bfloat16:
//   bytes   6 A C read (three passes over the chosen rows), 2 A C + 4 C A / 64 written twice: 83 MB, 17 us at 4.8 TB/s;
//           the caller zeroes 2 T C before
//   work    12 A C = 0.12 GFLOP; the search for repeats compares A^2 = 1e8 pairs, 32 a step, from L2: about 25 us
//   expect  60 us, launches included
#include "value_head.cuh"

namespace trace_megatron {
namespace {

using Backward = HeadLaunch<ValueHeadBackwardParams>;
constexpr int kChannels = 128;  // of one block, one a thread

// With g the gradient of r sum(c x) + bias: scales[0] = g r, of c; scales[1] = g r^3 sum(c x) / C, of -x; scales[2] = g.
__global__ void __launch_bounds__(kHeadWarps* kWarpSize, 1) head_scales_kernel(Backward l) {
  const ValueHeadBackwardParams& p = l.p;
  const int64_t anchor = anchor_of_warp();
  if (anchor >= p.num_anchors) return;
  const int64_t row = p.index[anchor];
  float direct = 0.0f, through_norm = 0.0f, logit = 0.0f;
  if (row >= 0 && row < p.num_tokens) {
    const RowSums sums = HiddenRows<ValueHeadBackwardParams>{p}.sums(row, l.is_vectorized);
    const float prob = p.probs[anchor], r = sums.inverse_rms;
    logit = p.grad_probs[anchor] * prob * (1.0f - prob);
    direct = logit * r;
    through_norm = logit * r * r * r * sums.product / float(p.num_channels);
  }
  if (threadIdx.x % kWarpSize != 0) return;
  p.scales[anchor] = direct;
  p.scales[p.num_anchors + anchor] = through_norm;
  p.scales[2 * p.num_anchors + anchor] = logit;
}

__device__ void write_grad(const ValueHeadBackwardParams& p, int64_t place, float grad) {
  if (p.float_grad_hidden)
    p.float_grad_hidden[place] = grad;
  else
    pointer_cast<bf16>(p.bf16_grad_hidden)[place] = to_bf16(grad);
}

__global__ void __launch_bounds__(kHeadWarps* kWarpSize, 1) head_rows_kernel(Backward l) {
  const ValueHeadBackwardParams& p = l.p;
  const int64_t anchor = anchor_of_warp();
  if (anchor >= p.num_anchors) return;
  const int lane = int(threadIdx.x) % kWarpSize;
  const int64_t row = p.index[anchor];
  if (row < 0 || row >= p.num_tokens) return;
  float direct = 0.0f, through_norm = 0.0f;
  for (int64_t base = 0; base < p.num_anchors; base += kWarpSize) {
    const int64_t other = base + lane;
    const bool same = other < p.num_anchors && p.index[other] == row;
    if (__any_sync(kAllLanes, same && other < anchor)) return;  // that one writes the row
    if (same) direct += p.scales[other], through_norm += p.scales[p.num_anchors + other];
  }
  direct = warp_sum(direct), through_norm = warp_sum(through_norm);
  const HiddenRows<ValueHeadBackwardParams> rows{p};
  for (int64_t i = lane; i < p.num_channels; i += kWarpSize)
    write_grad(p, row * p.num_channels + i,
               direct * p.norm_weight[i] * p.weight[i] - through_norm * rows.at(row, i));
}

// partial_sums[chunk] = sum of g r x over the anchors of the chunk.
__global__ void __launch_bounds__(kChannels, 1) head_weights_kernel(Backward l) {
  const ValueHeadBackwardParams& p = l.p;
  const int64_t channel = int64_t(blockIdx.x) * kChannels + threadIdx.x;
  if (channel >= p.num_channels) return;
  const int64_t first = int64_t(blockIdx.y) * kValueHeadChunk, end = min(first + kValueHeadChunk, p.num_anchors);
  const HiddenRows<ValueHeadBackwardParams> rows{p};
  float sum = 0.0f;
  for (int64_t anchor = first; anchor < end; ++anchor) {
    const int64_t row = p.index[anchor];
    if (row >= 0 && row < p.num_tokens) sum += p.scales[anchor] * rows.at(row, channel);
  }
  p.partial_sums[blockIdx.y * p.num_channels + channel] = sum;
}

__global__ void __launch_bounds__(kChannels, 1) head_sums_kernel(Backward l) {
  const ValueHeadBackwardParams& p = l.p;
  if (blockIdx.x == 0 && threadIdx.x < kWarpSize) {
    float bias = 0.0f;
    for (int64_t anchor = threadIdx.x; anchor < p.num_anchors; anchor += kWarpSize)
      bias += p.scales[2 * p.num_anchors + anchor];
    bias = warp_sum(bias);
    if (threadIdx.x == 0) p.grad_bias[0] = bias;
  }
  const int64_t channel = int64_t(blockIdx.x) * kChannels + threadIdx.x;
  if (channel >= p.num_channels) return;
  float sum = 0.0f;
  for (int64_t chunk = 0; chunk * kValueHeadChunk < p.num_anchors; ++chunk)
    sum += p.partial_sums[chunk * p.num_channels + channel];
  p.grad_norm_weight[channel] = sum * p.weight[channel];
  p.grad_weight[channel] = sum * p.norm_weight[channel];
}

}  // namespace

extern "C" cudaError_t launch_value_head_backward(const ValueHeadBackwardParams* params, cudaStream_t stream) {
  const Backward l{*params, can_vectorize(*params)};
  const dim3 warps = grid_of_warps(params->num_anchors), block(kHeadWarps * kWarpSize);
  const unsigned columns = unsigned((params->num_channels + kChannels - 1) / kChannels);
  const int64_t chunks = (params->num_anchors + kValueHeadChunk - 1) / kValueHeadChunk;
  if (columns == 0) return cudaErrorInvalidValue;
  if (chunks > 65535) return cudaErrorInvalidValue;  // of the grid's second dimension: 4,194,240 anchors
  if (params->num_anchors > 0) {
    cudaError_t error = launch(head_scales_kernel, warps, block, 0, stream, l);
    if (error == cudaSuccess) error = launch(head_rows_kernel, warps, block, 0, stream, l);
    if (error == cudaSuccess)
      error = launch(head_weights_kernel, dim3(columns, unsigned(chunks)), dim3(kChannels), 0, stream, l);
    if (error != cudaSuccess) return error;
  }
  return launch(head_sums_kernel, dim3(columns), dim3(kChannels), 0, stream, l);
}

}  // namespace trace_megatron
