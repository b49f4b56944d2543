// Vectors of floats at the width of the instruction set that a translation unit is compiled for.
//
// Everything is in an unnamed namespace, and no standard header with inline functions is used: the linker must not
// merge code of one instruction set into another's.
#pragma once

#include <cstdint>
#include <cstring>
#if defined(TRACE_AVX512) || defined(TRACE_AVX2)
#include <immintrin.h>
#endif

#if defined(__GNUC__)
#define TRACE_INLINE inline __attribute__((always_inline))
#define TRACE_INLINE_LAMBDA __attribute__((always_inline))
#if defined(__clang__)
#define TRACE_UNROLL _Pragma("clang loop unroll(full)")
#else
#define TRACE_UNROLL _Pragma("GCC unroll 16")
#endif
#else
#define TRACE_INLINE inline
#define TRACE_INLINE_LAMBDA
#define TRACE_UNROLL
#endif

namespace trace_megatron {
namespace {

#if defined(TRACE_AVX512)
constexpr int kWidth = 16;
#elif defined(TRACE_AVX2)
constexpr int kWidth = 8;
#else
constexpr int kWidth = 4;
#endif

#if defined(__GNUC__) && !defined(TRACE_PLAIN_LANES)  // GCC and Clang

typedef float Vec __attribute__((vector_size(kWidth * 4)));
typedef int32_t IntVec __attribute__((vector_size(kWidth * 4)));
typedef uint32_t BitVec __attribute__((vector_size(kWidth * 4)));

TRACE_INLINE Vec splat(float x) { return x - Vec{}; }  // a bare broadcast: + 0 would have to turn -0 into 0
TRACE_INLINE IntVec splat(int32_t x) { return IntVec{} + x; }
TRACE_INLINE Vec where(IntVec mask, Vec yes, Vec no) { return mask ? yes : no; }
// x * 2^n, where n stands in the low bits of the number `exponent`; no overflow is looked for.
TRACE_INLINE Vec scale_by_exponent(Vec x, Vec exponent) { return (Vec)((BitVec)x + ((BitVec)exponent << 23)); }

#else  // a compiler without vector extensions: plain arrays, which it may vectorise

template <class T>
struct Lanes {
  T lane[kWidth];
  T& operator[](int i) { return lane[i]; }
  T operator[](int i) const { return lane[i]; }
};
typedef Lanes<float> Vec;
typedef Lanes<int32_t> IntVec;

#define TRACE_LANES(expr)                            \
  for (int i = 0; i < kWidth; ++i) r.lane[i] = expr; \
  return r
TRACE_INLINE Vec splat(float x) {
  Vec r;
  TRACE_LANES(x);
}
TRACE_INLINE IntVec splat(int32_t x) {
  IntVec r;
  TRACE_LANES(x);
}
TRACE_INLINE Vec operator+(Vec a, Vec b) {
  Vec r;
  TRACE_LANES(a[i] + b[i]);
}
TRACE_INLINE Vec operator-(Vec a, Vec b) {
  Vec r;
  TRACE_LANES(a[i] - b[i]);
}
TRACE_INLINE Vec operator*(Vec a, Vec b) {
  Vec r;
  TRACE_LANES(a[i] * b[i]);
}
TRACE_INLINE Vec operator/(Vec a, Vec b) {
  Vec r;
  TRACE_LANES(a[i] / b[i]);
}
TRACE_INLINE Vec& operator+=(Vec& a, Vec b) { return a = a + b; }
TRACE_INLINE IntVec operator<(Vec a, Vec b) {
  IntVec r;
  TRACE_LANES(-(a[i] < b[i]));
}
TRACE_INLINE IntVec operator>(Vec a, Vec b) {
  IntVec r;
  TRACE_LANES(-(a[i] > b[i]));
}
TRACE_INLINE IntVec operator<=(IntVec a, IntVec b) {
  IntVec r;
  TRACE_LANES(-(a[i] <= b[i]));
}
TRACE_INLINE IntVec operator>(IntVec a, IntVec b) {
  IntVec r;
  TRACE_LANES(-(a[i] > b[i]));
}
TRACE_INLINE IntVec operator+(IntVec a, IntVec b) {
  IntVec r;
  TRACE_LANES(a[i] + b[i]);
}
TRACE_INLINE IntVec operator&(IntVec a, IntVec b) {
  IntVec r;
  TRACE_LANES(a[i] & b[i]);
}
TRACE_INLINE Vec where(IntVec mask, Vec yes, Vec no) {
  Vec r;
  TRACE_LANES(mask[i] ? yes[i] : no[i]);
}
TRACE_INLINE Vec scale_by_exponent(Vec x, Vec exponent) {
  uint32_t a[kWidth], b[kWidth];
  memcpy(a, &x, sizeof a);
  memcpy(b, &exponent, sizeof b);
  for (int i = 0; i < kWidth; ++i) a[i] += b[i] << 23;
  memcpy(&x, a, sizeof a);
  return x;
}
#undef TRACE_LANES

#endif

TRACE_INLINE Vec load(const float* p) {
  Vec v;
  memcpy(&v, p, sizeof v);
  return v;
}
TRACE_INLINE IntVec load(const int32_t* p) {
  IntVec v;
  memcpy(&v, p, sizeof v);
  return v;
}
// first, first + 1, ...
TRACE_INLINE IntVec count_from(int32_t first) {
  static const int32_t kLanes[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  return load(kLanes) + splat(first);
}
TRACE_INLINE void store(float* p, Vec v) { memcpy(p, &v, sizeof v); }

TRACE_INLINE Vec larger(Vec a, Vec b) { return where(a > b, a, b); }

TRACE_INLINE float largest_lane(Vec v) {
#if defined(TRACE_AVX512)
  return _mm512_reduce_max_ps((__m512)v);
#else
  float best = v[0];
  for (int i = 1; i < kWidth; ++i) best = v[i] > best ? v[i] : best;
  return best;
#endif
}

TRACE_INLINE float sum_lanes(Vec v) {
  float half[kWidth];
  store(half, v);
  for (int n = kWidth / 2; n > 0; n /= 2)
    for (int i = 0; i < n; ++i) half[i] += half[i + n];
  return half[0];
}

// 2^x for x <= 127, relative error 1e-7; 0 below -126, which stands for -infinity too.
TRACE_INLINE Vec exp2(Vec x) {
  const Vec round = splat(12582912.0f);  // 1.5 * 2^23: the sum's last bits are the nearest integer
  const Vec shifted = x + round;
  const Vec r = x - (shifted - round);  // in [-1/2, 1/2]
  Vec p = splat(1.5345812e-4f);         // least largest relative error, degree 6: 2e-9 before rounding
  p = p * r + splat(1.3399931e-3f);
  p = p * r + splat(9.6184890e-3f);
  p = p * r + splat(5.5503288e-2f);
  p = p * r + splat(2.4022647e-1f);
  p = p * r + splat(6.9314721e-1f);
  p = p * r + splat(1.0f);
  return where(x < splat(-126.0f), splat(0.0f), scale_by_exponent(p, shifted));
}

}  // namespace
}  // namespace trace_megatron
