// A bfloat16 number in memory, and its conversions. No standard header with inline functions: see simd.h.
#pragma once

#include "simd.h"

namespace trace_megatron {
namespace {

struct BFloat16 {
  uint16_t bits;
};

TRACE_INLINE float to_float(float x) { return x; }
TRACE_INLINE float to_float(BFloat16 x) {
  const uint32_t word = uint32_t(x.bits) << 16;
  float value;
  memcpy(&value, &word, sizeof value);
  return value;
}
TRACE_INLINE void from_float(float x, float& to) { to = x; }
TRACE_INLINE void from_float(float x, BFloat16& to) {  // to nearest, ties to even
  uint32_t word;
  memcpy(&word, &x, sizeof word);
  to.bits = uint16_t(x != x ? 0x7fc0u : (word + 0x7fffu + ((word >> 16) & 1u)) >> 16);
}

#if defined(__GNUC__) && !defined(TRACE_PLAIN_LANES)

typedef uint16_t HalfVec __attribute__((vector_size(kWidth * 2)));

TRACE_INLINE Vec load(const BFloat16* p) {
  HalfVec half;
  memcpy(&half, p, sizeof half);
  return (Vec)(__builtin_convertvector(half, BitVec) << 16);
}
TRACE_INLINE void store(BFloat16* p, Vec v) {
  const BitVec word = (BitVec)v, is_nan = (BitVec)(v != v);
  const BitVec rounded = (word + 0x7fffu + ((word >> 16) & 1u)) >> 16;
  const HalfVec half = __builtin_convertvector((is_nan & 0x7fc0u) | (~is_nan & rounded), HalfVec);
  memcpy(p, &half, sizeof half);
}

#else

TRACE_INLINE Vec load(const BFloat16* p) {
  Vec v;
  for (int i = 0; i < kWidth; ++i) v[i] = to_float(p[i]);
  return v;
}
TRACE_INLINE void store(BFloat16* p, Vec v) {
  for (int i = 0; i < kWidth; ++i) from_float(v[i], p[i]);
}

#endif

// The first `count` < kWidth elements; the other lanes are `fill`.
template <class T>
TRACE_INLINE Vec load_part(const T* p, int64_t count, float fill) {
  float lanes[kWidth];
  for (int i = 0; i < kWidth; ++i) lanes[i] = i < count ? to_float(p[i]) : fill;
  return load(lanes);
}
template <class T>
TRACE_INLINE void store_part(T* p, int64_t count, Vec v) {
  float lanes[kWidth];
  store(lanes, v);
  for (int i = 0; i < count; ++i) from_float(lanes[i], p[i]);
}

}  // namespace
}  // namespace trace_megatron
