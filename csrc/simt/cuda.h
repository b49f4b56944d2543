// CUDA's words in kernels and launch functions: barriers, warps, atomics, arithmetic, errors.
#pragma once

#include <algorithm>
#include <bit>
#include <climits>
#include <cmath>
#include <cstdint>

#include "pointer.h"
#include "types.h"

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __launch_bounds__(...)

using dim3 = simt::Index;
using cudaStream_t = void*;
enum cudaError_t { cudaSuccess = 0, cudaErrorInvalidValue = 1, cudaErrorInvalidConfiguration = 9, cudaErrorLaunchFailure = 719 };

namespace simt {

using Where = std::source_location;

template <class Slot, void (*Work)(Slot* const lanes[kWarp])>
void warp_work(size_t, void* const slots[kWarp]) {
  Slot* lanes[kWarp];
  for (size_t i = 0; i < kWarp; ++i) lanes[i] = static_cast<Slot*>(slots[i]);
  Work(lanes);
}

// All lanes of the mask meet here; the last one's arrival lets Work see every lane's slot.
template <class Slot, void (*Work)(Slot* const lanes[kWarp])>
void with_warp(const Where& where, uint32_t mask, Slot& slot) {
  machine.wait_for_warp(where, mask, &warp_work<Slot, Work>, &slot);
}

template <class T>
struct Shuffle {
  T value;
  int source;
  T result;
};

template <class T>
void shuffle_lanes(Shuffle<T>* const lanes[kWarp]) {
  for (size_t i = 0; i < kWarp; ++i) {
    if (!lanes[i]) continue;
    if (lanes[lanes[i]->source])
      lanes[i]->result = lanes[lanes[i]->source]->value;
    else
      std::memset(static_cast<void*>(&lanes[i]->result), kPoison, sizeof(T));  // that lane has nothing to say
  }
}

inline int lane() { return int(machine.current->linear % kWarp); }

template <class T>
T shuffle(const Where& where, uint32_t mask, T value, int source, int width) {
  const int first = lane() / width * width;
  Shuffle<T> slot{value, source < first || source >= first + width ? lane() : source, value};
  with_warp<Shuffle<T>, shuffle_lanes<T>>(where, mask, slot);
  return slot.result;
}

struct Vote {
  bool yes;
  uint32_t result;
};
inline void count_votes(Vote* const lanes[kWarp]) {
  uint32_t votes = 0;
  for (size_t i = 0; i < kWarp; ++i) votes |= uint32_t(lanes[i] && lanes[i]->yes) << i;
  for (size_t i = 0; i < kWarp; ++i)
    if (lanes[i]) lanes[i]->result = votes;
}

}  // namespace simt

inline void __syncthreads(simt::Where where = simt::Where::current()) {
  if (!simt::machine.is_dropped(where)) simt::machine.wait_for_block(where, false);
}
inline int __syncthreads_count(int predicate, simt::Where where = simt::Where::current()) {
  simt::machine.wait_for_block(where, predicate != 0);
  return int(simt::machine.barrier_votes());
}
inline int __syncthreads_or(int predicate, simt::Where where = simt::Where::current()) {
  return __syncthreads_count(predicate, where) != 0;
}
inline void __syncwarp(unsigned mask = 0xffffffff, simt::Where where = simt::Where::current()) {
  if (simt::machine.is_dropped(where)) return;
  const simt::Together join = [](size_t first, void* const slots[]) { simt::machine.join_clocks(first, slots); };
  simt::machine.wait_for_warp(where, mask, join, &mask);
}
inline void __threadfence() {}

template <class T>
T __shfl_sync(unsigned mask, T value, int source, int width = 32, simt::Where where = simt::Where::current()) {
  return simt::shuffle(where, mask, value, simt::lane() / width * width + (source & (width - 1)), width);
}
template <class T>
T __shfl_xor_sync(unsigned mask, T value, int lanes, int width = 32, simt::Where where = simt::Where::current()) {
  return simt::shuffle(where, mask, value, simt::lane() ^ lanes, width);
}
template <class T>
T __shfl_up_sync(unsigned mask, T value, int delta, int width = 32, simt::Where where = simt::Where::current()) {
  return simt::shuffle(where, mask, value, simt::lane() - delta, width);
}
template <class T>
T __shfl_down_sync(unsigned mask, T value, int delta, int width = 32, simt::Where where = simt::Where::current()) {
  return simt::shuffle(where, mask, value, simt::lane() + delta, width);
}
inline unsigned __ballot_sync(unsigned mask, int predicate, simt::Where where = simt::Where::current()) {
  simt::Vote vote{predicate != 0, 0};
  simt::with_warp<simt::Vote, simt::count_votes>(where, mask, vote);
  return vote.result;
}
inline int __any_sync(unsigned mask, int predicate, simt::Where where = simt::Where::current()) {
  return __ballot_sync(mask, predicate, where) != 0;
}
inline int __all_sync(unsigned mask, int predicate, simt::Where where = simt::Where::current()) {
  return __ballot_sync(mask, !predicate, where) == 0;
}

template <class T, class Change>
SIMT_INLINE T simt_atomic(simt::Pointer<T> at, Change change) {
  simt::touch(simt::Access::kAtomic, at.address(), sizeof(T));
  const T old = *at.address();
  *at.address() = change(old);
  return old;
}
template <class T>
SIMT_INLINE T atomicAdd(simt::Pointer<T> at, std::type_identity_t<T> x) {
  return simt_atomic(at, [=](T old) { return T(old + x); });
}
template <class T>
SIMT_INLINE T atomicMax(simt::Pointer<T> at, std::type_identity_t<T> x) {
  return simt_atomic(at, [=](T old) { return old < x ? x : old; });
}
template <class T>
SIMT_INLINE T atomicMin(simt::Pointer<T> at, std::type_identity_t<T> x) {
  return simt_atomic(at, [=](T old) { return x < old ? x : old; });
}
template <class T>
SIMT_INLINE T atomicOr(simt::Pointer<T> at, std::type_identity_t<T> x) {
  return simt_atomic(at, [=](T old) { return T(old | x); });
}
template <class T>
SIMT_INLINE T atomicExch(simt::Pointer<T> at, std::type_identity_t<T> x) {
  return simt_atomic(at, [=](T) { return x; });
}
template <class T>
SIMT_INLINE T atomicCAS(simt::Pointer<T> at, std::type_identity_t<T> expected, std::type_identity_t<T> x) {
  return simt_atomic(at, [=](T old) { return old == expected ? x : old; });
}

using std::max;
using std::min;
inline int __popc(unsigned x) { return std::popcount(x); }
inline int __popcll(unsigned long long x) { return std::popcount(x); }
inline int __clz(int x) { return std::countl_zero(unsigned(x)); }
inline int __ffs(int x) { return x ? std::countr_zero(unsigned(x)) + 1 : 0; }
inline float rsqrtf(float x) { return 1.0f / std::sqrt(x); }
inline float __expf(float x) { return std::exp(x); }
inline float __fdividef(float x, float y) { return x / y; }
inline unsigned __float_as_uint(float x) { return std::bit_cast<unsigned>(x); }
inline float __uint_as_float(unsigned x) { return std::bit_cast<float>(x); }
inline long long __double_as_longlong(double x) { return std::bit_cast<long long>(x); }
inline double __longlong_as_double(long long x) { return std::bit_cast<double>(x); }
