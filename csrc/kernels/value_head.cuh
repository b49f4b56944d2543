// One row of the value head, by one warp: shared by the forward and the backward pass.
#pragma once

#include "primitives.cuh"
#include "value_head.h"

namespace trace_megatron {

constexpr int kHeadWarps = 4;  // of a block

// What a row leaves for the backward pass: r and sum(c x).
struct RowSums {
  float inverse_rms, product;
};

__device__ inline float warp_sum(float x) {
  for (int step = kWarpSize / 2; step > 0; step /= 2) x += __shfl_xor_sync(kAllLanes, x, step);
  return x;
}

// Rows of float32 or bfloat16; each lane reads 16 bytes at a time where `is_vectorized`.
template <class Params>
struct HiddenRows {
  const Params& p;

  __device__ float at(int64_t row, int64_t channel) const {
    const int64_t place = row * p.num_channels + channel;
    return p.float_hidden ? float(p.float_hidden[place]) : to_float(bf16_at(place));
  }
  __device__ bf16 bf16_at(int64_t place) const { return pointer_cast<const bf16>(p.bf16_hidden)[place]; }

  __device__ RowSums sums(int64_t row, bool is_vectorized) const {
    float squares = 0.0f, products = 0.0f;
    const int lane = int(threadIdx.x) % kWarpSize;
    const int64_t first = row * p.num_channels;
    const auto add = [&](float x, int64_t channel) {
      squares += x * x;
      products += p.norm_weight[channel] * p.weight[channel] * x;
    };
    if (is_vectorized && p.float_hidden) {
      for (int64_t i = 4 * lane; i < p.num_channels; i += 4 * kWarpSize) {
        const float4 x = pointer_cast<const float4>(p.float_hidden + first + i)[0];
        add_four(x, i, squares, products);
      }
    } else if (is_vectorized) {
      for (int64_t i = 8 * lane; i < p.num_channels; i += 8 * kWarpSize) {
        const uint4 pairs = pointer_cast<const uint4>(p.bf16_hidden + first + i)[0];
        add_four({low_of(pairs.x), high_of(pairs.x), low_of(pairs.y), high_of(pairs.y)}, i, squares, products);
        add_four({low_of(pairs.z), high_of(pairs.z), low_of(pairs.w), high_of(pairs.w)}, i + 4, squares, products);
      }
    } else {
      for (int64_t i = lane; i < p.num_channels; i += kWarpSize) add(at(row, i), i);
    }
    squares = warp_sum(squares), products = warp_sum(products);
    return {1.0f / sqrtf(squares / float(p.num_channels) + p.eps), products};
  }

  __device__ void add_four(float4 x, int64_t channel, float& squares, float& products) const {
    const float4 norm = pointer_cast<const float4>(p.norm_weight + channel)[0];
    const float4 weight = pointer_cast<const float4>(p.weight + channel)[0];
    squares += x.x * x.x + x.y * x.y + (x.z * x.z + x.w * x.w);
    products += norm.x * weight.x * x.x + norm.y * weight.y * x.y +
                (norm.z * weight.z * x.z + norm.w * weight.w * x.w);
  }
  __device__ static float low_of(unsigned pair) { return __uint_as_float(pair << 16); }
  __device__ static float high_of(unsigned pair) { return __uint_as_float(pair & 0xffff0000u); }
};

// Whether rows and weights can be read 16 bytes at a time.
template <class Params>
bool can_vectorize(const Params& p) {
  const int64_t width = p.float_hidden ? 4 : 8;
  return p.num_channels % width == 0 && is_aligned(p.float_hidden, 16) && is_aligned(p.bf16_hidden, 16) &&
         is_aligned(p.norm_weight, 16) && is_aligned(p.weight, 16);
}

// A launch's params, and what its host side found out.
template <class Params>
struct HeadLaunch {
  Params p;
  bool is_vectorized;
};

inline dim3 grid_of_warps(int64_t warps) { return dim3(unsigned((warps + kHeadWarps - 1) / kHeadWarps)); }

__device__ inline int64_t anchor_of_warp() { return int64_t(blockIdx.x) * kHeadWarps + threadIdx.x / kWarpSize; }

}  // namespace trace_megatron
