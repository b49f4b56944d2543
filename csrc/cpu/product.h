// Block products with float32 sums, in the two forms that processors have: of floats, and of pairs of bfloat16.
//
// A product sums over k. Its operands are arrays of Elem, 32 bits each: one float, or two bfloat16 that follow each
// other along k. Every form is the same loop: broadcast one Elem of the left operand, multiply it by kWidth Elems of
// the right one. Rows of results are kept in registers, kTileRows x kTileVecs vectors at a time.
#pragma once

#include "simd.h"

namespace trace_megatron {
namespace {

constexpr int kTileRows = 4;
constexpr int kTileVecs = kWidth == 16 ? 4 : 2;  // 16 sums of 32 registers, 8 sums of 16

struct FloatProduct {
  typedef float Elem;
  static constexpr int kDepth = 1;  // values of k in one Elem
  static TRACE_INLINE Vec multiply_add(Vec sum, Elem left, const Elem* right) {
    return sum + splat(left) * load(right);
  }
  // kWidth values that follow each other along k.
  static TRACE_INLINE void write(Elem* to, Vec values) { store(to, values); }
  // Values of rows k, k + 1, ... of kTileRows, each kWidth columns; `stride` lies between steps of k.
  static TRACE_INLINE void write_turned(Elem* to, int64_t stride, const Vec (&rows)[kTileRows]) {
    for (int i = 0; i < kTileRows; ++i) store(to + i * stride, rows[i]);
  }
};

#if defined(TRACE_AVX512_BF16)
struct PairProduct {
  typedef uint32_t Elem;
  static constexpr int kDepth = 2;
  static TRACE_INLINE Vec multiply_add(Vec sum, Elem left, const Elem* right) {
    return (Vec)_mm512_dpbf16_ps((__m512)sum, (__m512bh)_mm512_set1_epi32((int)left),
                                 (__m512bh)_mm512_loadu_si512(right));
  }
  static TRACE_INLINE void write(Elem* to, Vec values) {
    const __m256bh halves = _mm512_cvtneps_pbh((__m512)values);
    memcpy(to, &halves, sizeof halves);
  }
  static TRACE_INLINE void write_turned(Elem* to, int64_t stride, const Vec (&rows)[kTileRows]) {
    for (int i = 0; i < kTileRows; i += 2) {
      const __m512i low = _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh((__m512)rows[i]));
      const __m512i high = _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh((__m512)rows[i + 1]));
      _mm512_storeu_si512(to + i / 2 * stride, _mm512_or_si512(low, _mm512_slli_epi32(high, 16)));
    }
  }
};
#endif

template <int N>
struct Count {
  static constexpr int value = N;
};

// Calls f(first vector, Count of vectors) over `num_vecs` columns of vectors, kTileVecs at a time.
template <class F>
TRACE_INLINE void for_vec_tiles(int64_t num_vecs, const F& f) {
  int64_t vec = 0;
  for (; vec + kTileVecs <= num_vecs; vec += kTileVecs) f(vec, Count<kTileVecs>());
  switch (num_vecs - vec) {
    case 1:
      f(vec, Count<1>());
      break;
    case 2:
      f(vec, Count<2>());
      break;
    case 3:
      f(vec, Count<3>());
      break;
    default:
      break;
  }
}

// kTileRows x N vectors of sums, in registers.
template <int N>
struct Tile {
  Vec sum[kTileRows][N];

  TRACE_INLINE void clear() {
    each([&](int i, int j) TRACE_INLINE_LAMBDA { sum[i][j] = splat(0.0f); });
  }
  TRACE_INLINE void read(const float* from, int64_t stride) {
    each([&](int i, int j) TRACE_INLINE_LAMBDA { sum[i][j] = load(from + i * stride + j * kWidth); });
  }
  TRACE_INLINE void write(float* to, int64_t stride) const {
    each([&](int i, int j) TRACE_INLINE_LAMBDA { store(to + i * stride + j * kWidth, sum[i][j]); });
  }
  TRACE_INLINE void scale_rows(const float* factor) {
    each([&](int i, int j) TRACE_INLINE_LAMBDA { sum[i][j] = sum[i][j] * splat(factor[i]); });
  }
  // One step along k: left[i * left_stride] times N vectors, vector j at right[j].
  template <class Product>
  TRACE_INLINE void step(const typename Product::Elem* left, int64_t left_stride,
                         const typename Product::Elem* const (&right)[N], int64_t right_offset) {
    each([&](int i, int j) TRACE_INLINE_LAMBDA {
      sum[i][j] = Product::multiply_add(sum[i][j], left[i * left_stride], right[j] + right_offset);
    });
  }

 private:
  template <class F>
  static TRACE_INLINE void each(const F& f) {
    TRACE_UNROLL
    for (int i = 0; i < kTileRows; ++i) {
      TRACE_UNROLL
      for (int j = 0; j < N; ++j) f(i, j);
    }
  }
};

}  // namespace
}  // namespace trace_megatron
