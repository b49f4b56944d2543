// Attention of new tokens over a paged cache of shared prefixes and over the tree that they form: prefix_attention.h.
//
// A block takes up to 64 or 128 rows (a token's R heads that share keys are R rows) and walks over the tiles of 64 keys
// that they see: the prefix's pages, then the listed tiles of new tokens. Keys and values of the next tile come by
// cp.async while this one is multiplied. Softmax is online, in float32; the probabilities are rounded to bfloat16 for the
// second product. The order of all sums is fixed: equal calls give equal bits.
//
// On paper, per layer. Let V be the pairs (token, key) that are seen, a prefix's included.
//   operations  4 V H D, on the tensor cores
//   bytes       2 D (2 T H + 2 T G + 2 G S), S prefix tokens, each read from memory once, then from L2
//   H200        989 TFLOP/s dense bfloat16, 4.8 TB/s
// T = 8,192: 16 prompts of 512 known tokens, each with 8 branches of 64 new ones, V = 4.5 M, H = 32, G = 8, D = 128:
// 73 GFLOP, floor 0.074 ms; 0.20 GB, 0.042 ms. mma.sync reaches about 60% of an H200's peak (0.12 ms), and the V H
// exponentials take 0.04 ms at 16 a clock and SM, part of which is hidden: expected 0.14 to 0.2 ms.
// Shared memory of a block: 41 KB (D 64, 64 rows) to 99 KB (D 128, 128 rows), so that two blocks share an SM of 228 KB.
#include "prefix_attention.h"

#include "primitives.cuh"

namespace trace_megatron {
namespace attention {

constexpr int kWarps = 4;
constexpr int kThreads = kWarps * kWarpSize;
constexpr float kLog2E = 1.44269504f;
constexpr float kHidden = -INFINITY;

// Shared memory: rows of D values in chunks of 16 bytes, permuted so that eight rows of one column meet no bank twice.
template <int kHeadDim>
__device__ __forceinline__ int place(int row, int chunk) {
  return row * kHeadDim + (chunk ^ (row & 7)) * 8;
}

template <int kHeadDim, int kRowTiles>
struct Tiles {
  // Keys whose scores a warp holds at a time: what is left beside the output in 255 registers.
  static constexpr int kKeys = kHeadDim * kRowTiles > 128 ? kAttentionKeys / 2 : kAttentionKeys;
  static constexpr int kRows = kWarps * kRowTiles * 16;
  static constexpr int kValues = kAttentionKeys * kHeadDim;
  static constexpr int kChunks = kHeadDim / 8;
  static constexpr int kEndsAt = (kRows * kHeadDim + 4 * kValues) * 2;
  static constexpr int kBytes = kEndsAt + 2 * kAttentionKeys * int(sizeof(int32_t));
};

struct Item {
  int first_row, num_rows, prefix, pages, tiles, num_tiles;
  int num_prefix_tiles;

  __device__ __forceinline__ explicit Item(Global<const int32_t> fields) {
    first_row = fields[0], num_rows = fields[1], prefix = fields[2], pages = fields[3], tiles = fields[4];
    num_prefix_tiles = (prefix + kAttentionKeys - 1) / kAttentionKeys;
    num_tiles = num_prefix_tiles + fields[5] - tiles;
  }
};

// Starts the copies of key tile `index` of the item into one of the two stages.
template <int kHeadDim>
__device__ __forceinline__ void load_keys(const PrefixAttentionParams& p, const Item& item, int index, int group,
                                          Shared<uint16_t> keys, Shared<uint16_t> values, Shared<int32_t> ends) {
  constexpr int kChunks = kHeadDim / 8;
  const bool known = index < item.num_prefix_tiles;
  const int tile = known ? index : int(p.key_tiles[item.tiles + index - item.num_prefix_tiles]) >> 1;
#pragma unroll 2
  for (int i = int(threadIdx.x); i < kAttentionKeys * kChunks; i += kThreads) {
    const int row = i / kChunks, chunk = i % kChunks, key = tile * kAttentionKeys + row;
    const int to = place<kHeadDim>(row, chunk);
    if (known) {
      const bool valid = key < item.prefix;
      int64_t slot = 0;
      if (valid) slot = int64_t(p.page_table[item.pages + key / kPageTokens]) * kPageTokens + key % kPageTokens;
      const int64_t from = slot * p.slot_stride + group * kHeadDim + chunk * 8;
      cp_async_16(keys + to, p.key_pages + from, valid);
      cp_async_16(values + to, p.value_pages + from, valid);
    } else {
      const bool valid = key < p.num_tokens;
      const int64_t token = valid ? key : 0;
      cp_async_16(keys + to, p.k + token * p.k_token_stride + group * p.k_head_stride + chunk * 8, valid);
      cp_async_16(values + to, p.v + token * p.v_token_stride + group * p.v_head_stride + chunk * 8, valid);
    }
  }
  if (!known && int(threadIdx.x) < kAttentionKeys) {
    const int key = tile * kAttentionKeys + int(threadIdx.x);
    ends[threadIdx.x] = key < p.num_tokens ? int(p.subtree_end[key]) : 0;
  }
}

template <int kHeadDim>
__device__ __forceinline__ void load_queries(const PrefixAttentionParams& p, const Item& item, int group, int num_rows,
                                             Shared<uint16_t> queries) {
  constexpr int kChunks = kHeadDim / 8;
  for (int i = int(threadIdx.x); i < num_rows * kChunks; i += kThreads) {
    const int row = i / kChunks, chunk = i % kChunks;
    const bool valid = row < item.num_rows;
    const int flat = item.first_row + (valid ? row : 0);
    const int64_t token = flat / p.heads_per_group, head = group * p.heads_per_group + flat % p.heads_per_group;
    cp_async_16(queries + place<kHeadDim>(row, chunk), p.q + token * p.q_token_stride + head * p.q_head_stride + chunk * 8,
                valid);
  }
}

// Of the rows of a warp, 16 kRowTiles of them: the running maximum, sum and output of the softmax, and where they stand.
// A thread holds rows g and g + 8 of each tile of 16, with g = lane / 4.
template <int kHeadDim, int kRowTiles>
struct Rows {
  float out[kRowTiles][kHeadDim / 8][4];
  float most[kRowTiles][2], sum[kRowTiles][2];
  int token[kRowTiles][2];

  __device__ __forceinline__ void clear(const PrefixAttentionParams& p, const Item& item, int first) {
#pragma unroll
    for (int tile = 0; tile < kRowTiles; ++tile) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = first + tile * 16 + half * 8 + int(threadIdx.x) % kWarpSize / 4;
        token[tile][half] = (item.first_row + min(row, item.num_rows - 1)) / p.heads_per_group;
        most[tile][half] = kHidden;
        sum[tile][half] = 0.0f;
      }
#pragma unroll
      for (int n = 0; n < kHeadDim / 8; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) out[tile][n][i] = 0.0f;
    }
  }
};

template <int kRowTiles, int kKeys>
using Scores = float[kRowTiles][kKeys / 8][4];

// scores = queries keys^T
template <int kHeadDim, int kKeys, int kRowTiles>
__device__ __forceinline__ void multiply_keys(Shared<uint16_t> queries, Shared<uint16_t> keys,
                                              Scores<kRowTiles, kKeys>& scores) {
  const int lane = int(threadIdx.x) % kWarpSize;
#pragma unroll
  for (int tile = 0; tile < kRowTiles; ++tile)
#pragma unroll
    for (int n = 0; n < kKeys / 8; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) scores[tile][n][i] = 0.0f;
#pragma unroll 2
  for (int step = 0; step < kHeadDim / 16; ++step) {
    uint32_t a[kRowTiles][4];
#pragma unroll
    for (int tile = 0; tile < kRowTiles; ++tile)
      ldmatrix_x4(a[tile], queries + place<kHeadDim>(tile * 16 + lane % 16, 2 * step + lane / 16));
#pragma unroll
    for (int pair = 0; pair < kKeys / 16; ++pair) {
      uint32_t b[4];
      ldmatrix_x4(b, keys + place<kHeadDim>(pair * 16 + lane / 16 * 8 + lane % 8, 2 * step + lane / 8 % 2));
#pragma unroll
      for (int tile = 0; tile < kRowTiles; ++tile) {
        mma(scores[tile][2 * pair], a[tile], {b[0], b[1]}, bf16());
        mma(scores[tile][2 * pair + 1], a[tile], {b[2], b[3]}, bf16());
      }
    }
  }
}

// Scores to weights 2^(factor (score - most)), after the output so far was brought to the new maximum.
template <int kKeys, int kHeadDim, int kRowTiles>
__device__ __forceinline__ void weigh(Rows<kHeadDim, kRowTiles>& rows, float factor,
                                      Scores<kRowTiles, kKeys>& scores) {
#pragma unroll
  for (int tile = 0; tile < kRowTiles; ++tile)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float most = rows.most[tile][half];
#pragma unroll
      for (int n = 0; n < kKeys / 8; ++n)
        most = fmaxf(most, fmaxf(scores[tile][n][2 * half], scores[tile][n][2 * half + 1]));
      most = fmaxf(most, __shfl_xor_sync(kAllLanes, most, 1));
      most = fmaxf(most, __shfl_xor_sync(kAllLanes, most, 2));
      const float base = most == kHidden ? 0.0f : most * factor;  // a row that has seen no key so far
      const float shrink = exp2_approx(fmaf(rows.most[tile][half], factor, -base));
      rows.most[tile][half] = most;
      float sum = 0.0f;
#pragma unroll
      for (int n = 0; n < kKeys / 8; ++n)
#pragma unroll
        for (int i = 2 * half; i < 2 * half + 2; ++i) {
          scores[tile][n][i] = exp2_approx(fmaf(scores[tile][n][i], factor, -base));
          sum += scores[tile][n][i];
        }
      rows.sum[tile][half] = fmaf(rows.sum[tile][half], shrink, sum);
      if (!__any_sync(kAllLanes, shrink != 1.0f)) continue;
#pragma unroll
      for (int n = 0; n < kHeadDim / 8; ++n) {
        rows.out[tile][n][2 * half] *= shrink;
        rows.out[tile][n][2 * half + 1] *= shrink;
      }
    }
}

// out += weights values
template <int kKeys, int kHeadDim, int kRowTiles>
__device__ __forceinline__ void add_values(Shared<uint16_t> values,
                                           const Scores<kRowTiles, kKeys>& weights,
                                           Rows<kHeadDim, kRowTiles>& rows) {
  const int lane = int(threadIdx.x) % kWarpSize;
#pragma unroll
  for (int step = 0; step < kKeys / 16; ++step) {
    uint32_t a[kRowTiles][4];
#pragma unroll
    for (int tile = 0; tile < kRowTiles; ++tile)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float(&from)[4] = weights[tile][2 * step + i / 2];
        a[tile][i] = pack(to_bf16(from[i % 2 * 2]), to_bf16(from[i % 2 * 2 + 1]));
      }
#pragma unroll
    for (int pair = 0; pair < kHeadDim / 16; ++pair) {
      uint32_t b[4];
      ldmatrix_x4_trans(b, values + place<kHeadDim>(step * 16 + lane % 16, 2 * pair + lane / 16));
#pragma unroll
      for (int tile = 0; tile < kRowTiles; ++tile) {
        mma(rows.out[tile][2 * pair], a[tile], {b[0], b[1]}, bf16());
        mma(rows.out[tile][2 * pair + 1], a[tile], {b[2], b[3]}, bf16());
      }
    }
  }
}

// Hides what the mask excludes.
template <int kKeys, int kHeadDim, int kRowTiles>
__device__ __forceinline__ void hide(const Rows<kHeadDim, kRowTiles>& rows, int first_key, Shared<int32_t> ends,
                                     Scores<kRowTiles, kKeys>& scores) {
  const int column = int(threadIdx.x) % 4 * 2;
#pragma unroll
  for (int n = 0; n < kKeys / 8; ++n)
#pragma unroll
    for (int next = 0; next < 2; ++next) {
      const int key = first_key + n * 8 + column + next, end = ends[n * 8 + column + next];
#pragma unroll
      for (int tile = 0; tile < kRowTiles; ++tile)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int token = rows.token[tile][half];
          if (key > token || token >= end) scores[tile][n][2 * half + next] = kHidden;
        }
    }
}

template <int kKeys, int kRowTiles>
__device__ __forceinline__ void hide_beyond(int num_keys, Scores<kRowTiles, kKeys>& scores) {
  const int column = int(threadIdx.x) % 4 * 2;
#pragma unroll
  for (int n = 0; n < kKeys / 8; ++n)
#pragma unroll
    for (int i = 0; i < 4; ++i)
#pragma unroll
      for (int tile = 0; tile < kRowTiles; ++tile)
        if (n * 8 + column + i % 2 >= num_keys) scores[tile][n][i] = kHidden;
}

// The rows of a warp, divided by their sums, to memory; `queries` is the warp's, and nobody needs it any more.
template <int kHeadDim, int kRowTiles>
__device__ __forceinline__ void write_rows(const PrefixAttentionParams& p, const Item& item, int group, int first,
                                           const Rows<kHeadDim, kRowTiles>& rows, Shared<uint16_t> queries) {
  const int lane = int(threadIdx.x) % kWarpSize;
#pragma unroll
  for (int tile = 0; tile < kRowTiles; ++tile)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float sum = rows.sum[tile][half];
      sum += __shfl_xor_sync(kAllLanes, sum, 1);
      sum += __shfl_xor_sync(kAllLanes, sum, 2);
      const float inverse = 1.0f / sum;
#pragma unroll
      for (int n = 0; n < kHeadDim / 8; ++n) {
        const int to = place<kHeadDim>(tile * 16 + half * 8 + lane / 4, n) + lane % 4 * 2;
        pointer_cast<uint32_t>(queries + to)[0] = pack(to_bf16(rows.out[tile][n][2 * half] * inverse),
                                                       to_bf16(rows.out[tile][n][2 * half + 1] * inverse));
      }
    }
  __syncwarp();
  constexpr int kChunks = kHeadDim / 8;
  for (int i = lane; i < kRowTiles * 16 * kChunks; i += kWarpSize) {
    const int row = i / kChunks, chunk = i % kChunks;
    if (first + row >= item.num_rows) break;
    const int flat = item.first_row + first + row;
    const int64_t token = flat / p.heads_per_group, head = group * p.heads_per_group + flat % p.heads_per_group;
    const uint4 values = pointer_cast<uint4>(queries + place<kHeadDim>(row, chunk))[0];
    const int64_t to = (token * p.num_groups * p.heads_per_group + head) * kHeadDim + chunk * 8;
    pointer_cast<uint4>(p.out + to)[0] = values;
  }
}

template <int kHeadDim, int kRowTiles>
__global__ void __launch_bounds__(kThreads) prefix_attention_kernel(PrefixAttentionParams p) {
  using Sizes = Tiles<kHeadDim, kRowTiles>;
  constexpr int kKeys = Sizes::kKeys;
  DYNAMIC_SHARED(memory);
  const Shared<uint16_t> all_queries = pointer_cast<uint16_t>(memory);
  const Shared<uint16_t> keys = all_queries + Sizes::kRows * kHeadDim, values = keys + 2 * Sizes::kValues;
  const Shared<int32_t> ends = pointer_cast<int32_t>(memory + Sizes::kEndsAt);
  const Item item(p.items + int64_t(blockIdx.x) * kItemFields);
  const int group = int(blockIdx.y), lane = int(threadIdx.x) % kWarpSize;
  const int first = int(threadIdx.x) / kWarpSize * kRowTiles * 16;
  const Shared<uint16_t> queries = all_queries + first * kHeadDim;

  Rows<kHeadDim, kRowTiles> rows;
  rows.clear(p, item, first);
  const int last = min(first + kRowTiles * 16, item.num_rows) - 1;
  const int lowest = (item.first_row + first) / p.heads_per_group, highest = (item.first_row + last) / p.heads_per_group;

  load_queries<kHeadDim>(p, item, group, Sizes::kRows, all_queries);
  load_keys<kHeadDim>(p, item, 0, group, keys, values, ends);
  cp_async_commit();
  for (int index = 0; index < item.num_tiles; ++index) {
    const int now = index % 2, next = 1 - now;
    if (index + 1 < item.num_tiles)
      load_keys<kHeadDim>(p, item, index + 1, group, keys + next * Sizes::kValues, values + next * Sizes::kValues,
                          ends + next * kAttentionKeys);
    cp_async_commit();
    cp_async_wait<1>();
    __syncthreads();
    const bool known = index < item.num_prefix_tiles;
    const int listed = known ? 0 : int(p.key_tiles[item.tiles + index - item.num_prefix_tiles]);
    const int first_key = (known ? index : listed >> 1) * kAttentionKeys;
    const Shared<int32_t> tile_ends = ends + now * kAttentionKeys;
    bool sees = first <= last;
    if (sees && listed & 1) {
      bool any = false;
      for (int i = lane; i < kAttentionKeys; i += kWarpSize)
        any = any || (first_key + i <= highest && int(tile_ends[i]) > lowest);
      sees = __any_sync(kAllLanes, any);
    }
    if (sees) {
#pragma unroll 1
      for (int part = 0; part < kAttentionKeys; part += kKeys) {
        Scores<kRowTiles, kKeys> scores;
        const int from = now * Sizes::kValues + part * kHeadDim, key = first_key + part;
        multiply_keys<kHeadDim, kKeys, kRowTiles>(queries, keys + from, scores);
        if (listed & 1) hide<kKeys>(rows, key, tile_ends + part, scores);
        if (known && key + kKeys > item.prefix) hide_beyond<kKeys, kRowTiles>(item.prefix - key, scores);
        weigh<kKeys>(rows, p.scale * kLog2E, scores);
        add_values<kKeys>(values + from, scores, rows);
      }
    }
    __syncthreads();
  }
  if (first <= last) write_rows(p, item, group, first, rows, queries);
}

template <int kHeadDim, int kRowTiles>
cudaError_t launch_attention(const PrefixAttentionParams& p, cudaStream_t stream) {
  return launch(prefix_attention_kernel<kHeadDim, kRowTiles>, {unsigned(p.num_items), unsigned(p.num_groups)},
                {unsigned(kThreads)}, Tiles<kHeadDim, kRowTiles>::kBytes, stream, p);
}

}  // namespace attention

extern "C" cudaError_t launch_prefix_attention(const PrefixAttentionParams* params, cudaStream_t stream) {
  const PrefixAttentionParams& p = *params;
  if (p.num_items == 0 || p.num_groups == 0) return cudaSuccess;
  if (p.head_dim == 64 && p.rows == 64) return attention::launch_attention<64, 1>(p, stream);
  if (p.head_dim == 64 && p.rows == 128) return attention::launch_attention<64, 2>(p, stream);
  if (p.head_dim == 128 && p.rows == 64) return attention::launch_attention<128, 1>(p, stream);
  if (p.head_dim == 128 && p.rows == 128) return attention::launch_attention<128, 2>(p, stream);
  return cudaErrorInvalidValue;
}

}  // namespace trace_megatron
