// How both passes of tree attention lay out their operands, and the products of what is laid out.
#pragma once

#include "attention_plan.h"
#include "bfloat16.h"

namespace trace_megatron {
namespace {

constexpr int64_t kRowsAhead = 8;  // whose memory is asked for early

// Reading and reordering rows of q, k, v and grad_out. Elem rows are [dim / depth]: what lies together along d.
template <class Product, class In>
struct Packing {
  typedef typename Product::Elem Elem;
  static constexpr int kDepth = Product::kDepth;

  static const In* row(const Rows& rows, int64_t token, int64_t head) {
    return static_cast<const In*>(rows.data) + token * rows.token_stride + head * rows.head_stride;
  }

  static void read(const In* from, int64_t head_dim, int64_t dim, Elem* to) {
    if constexpr (kDepth == 1) {
      for (int64_t d = 0; d < head_dim; ++d) to[d] = to_float(from[d]);
    } else {
      memcpy(to, from, size_t(head_dim) * sizeof(In));
    }
    const size_t width = kDepth == 1 ? sizeof(float) : sizeof(In);
    memset(reinterpret_cast<char*>(to) + size_t(head_dim) * width, 0, size_t(dim - head_dim) * width);
  }

  // Rows of one head lie far apart in memory: the processor does not see the next ones coming.
  static void prefetch(const In* row, int64_t ahead, int64_t head_dim) {
#if defined(__GNUC__)
    const uintptr_t from = reinterpret_cast<uintptr_t>(row) + uintptr_t(ahead) * sizeof(In);  // may lie beyond the end
    for (uintptr_t byte = 0; byte < uintptr_t(head_dim) * sizeof(In); byte += 64)
      __builtin_prefetch(reinterpret_cast<const void*>(from + byte));
#endif
  }

  static float dot(const In* a, const In* b, int64_t head_dim) {
    float sums[kPanel] = {};
    int64_t d = 0;
    for (; d + kPanel <= head_dim; d += kPanel)
      for (int64_t i = 0; i < kPanel; ++i) sums[i] += to_float(a[d + i]) * to_float(b[d + i]);
    for (int64_t i = 0; d + i < head_dim; ++i) sums[i] += to_float(a[d + i]) * to_float(b[d + i]);
    float sum = 0.0f;
    for (int64_t i = 0; i < kPanel; ++i) sum += sums[i];
    return sum;
  }

  // Rows that follow each other along k, where k counts rows: two by two where an Elem holds two.
  static void pair(const Elem* rows, int64_t num_rows, int64_t dim, Elem* to) {
    if constexpr (kDepth == 1) {
      memcpy(to, rows, size_t(num_rows * dim) * sizeof(Elem));
    } else {
      for (int64_t row = 0; row < num_rows; row += 2) {
        const char* even = reinterpret_cast<const char*>(rows + row * dim / 2);
        const char* odd = even + dim * 2;
        for (int64_t d = 0; d < dim; ++d) {
          uint16_t low, high;
          memcpy(&low, even + 2 * d, 2);
          memcpy(&high, odd + 2 * d, 2);
          to[row / 2 * dim + d] = low | uint32_t(high) << 16;
        }
      }
    }
  }

  // A panel's rows [16, dim / depth] turned to [dim / depth, 16].
  static void turn(const Elem* rows, int64_t dim, Elem* to) {
    const int64_t length = dim / kDepth;
    for (int64_t k = 0; k < length; ++k)
      for (int64_t key = 0; key < kPanel; ++key) to[k * kPanel + key] = rows[key * length + k];
  }

  static void read_panel(const Rows& rows, const Sizes& sizes, int64_t panel, int64_t head, Elem* to) {
    const int64_t length = sizes.dim / kDepth;
    for (int64_t i = 0; i < kPanel; ++i) {
      const int64_t token = panel * kPanel + i;
      if (token < sizes.num_keys) {
        read(row(rows, token, head), sizes.head_dim, sizes.dim, to + i * length);
      } else {
        memset(to + i * length, 0, size_t(length) * sizeof(Elem));
      }
    }
  }

  // All rows of a block, the padding of the last tile included, which is zero.
  static void read_block(const Rows& rows, const Sizes& sizes, const Block& block, int64_t group, Elem* to) {
    const int64_t length = sizes.dim / kDepth;
    const int64_t tokens_ahead = (kRowsAhead + sizes.heads_per_group - 1) / sizes.heads_per_group;
    for (int64_t i = 0; i < block.num_rows; ++i) {
      const int64_t head = group * sizes.heads_per_group + i % sizes.heads_per_group;
      const In* from = row(rows, block.first + i / sizes.heads_per_group, head);
      prefetch(from, tokens_ahead * rows.token_stride, sizes.head_dim);
      read(from, sizes.head_dim, sizes.dim, to + i * length);
    }
    memset(to + block.num_rows * length, 0,
           size_t((round_up(block.num_rows, kTileRows) - block.num_rows) * length) * sizeof(Elem));
  }
};

// to[4 rows, num_panels * 16 keys] = left[4 rows, dim] times the turned panels.
template <class Product>
TRACE_INLINE void multiply_panels(const typename Product::Elem* left, int64_t length, const int32_t* panels,
                                  int64_t num_panels, const typename Product::Elem* turned, float* to, int64_t stride) {
  for_vec_tiles(num_panels * kPanelVecs, [&](int64_t vec, auto count) TRACE_INLINE_LAMBDA {
    constexpr int kVecs = decltype(count)::value;
    const typename Product::Elem* right[kVecs];
    for (int j = 0; j < kVecs; ++j)
      right[j] = turned + panels[(vec + j) / kPanelVecs] * length * kPanel + (vec + j) % kPanelVecs * kWidth;
    Tile<kVecs> tile;
    tile.clear();
    for (int64_t k = 0; k < length; ++k) tile.template step<Product>(left + k, length, right, k * kPanel);
    tile.write(to + vec * kWidth, stride);
  });
}

// to[4 rows, dim] = factor[4 rows] * to + left[4 rows, num_panels * 16 keys] times the panels' rows, paired.
template <class Product>
TRACE_INLINE void add_rows(const typename Product::Elem* left, int64_t left_stride, const int32_t* panels,
                           int64_t num_panels, const typename Product::Elem* paired, const float* factor, float* to,
                           int64_t dim) {
  constexpr int kSteps = kPanel / Product::kDepth;
  for_vec_tiles(dim / kWidth, [&](int64_t vec, auto count) TRACE_INLINE_LAMBDA {
    constexpr int kVecs = decltype(count)::value;
    Tile<kVecs> tile;
    tile.read(to + vec * kWidth, dim);
    if (factor) tile.scale_rows(factor);
    for (int64_t i = 0; i < num_panels; ++i) {
      const typename Product::Elem* right[kVecs];
      for (int j = 0; j < kVecs; ++j) right[j] = paired + panels[i] * kSteps * dim + (vec + j) * kWidth;
      for (int64_t k = 0; k < kSteps; ++k)
        tile.template step<Product>(left + i * kSteps + k, left_stride, right, k * dim);
    }
    tile.write(to + vec * kWidth, dim);
  });
}

}  // namespace
}  // namespace trace_megatron
