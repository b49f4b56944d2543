// The table of one instruction set. Included by one translation unit for each, after it has chosen the set.
#pragma once

#include "bfloat16.h"
#include "rows.h"

namespace trace_megatron {
namespace {

constexpr float kLowest = -3.402823466e38f, kLog2E = 1.44269504f;
constexpr int64_t kBlock = 32 * kWidth;  // columns whose float32 sum is taken by itself, so that long rows stay exact

// f(column, count) for every vector of [begin, end): whole ones, then what is left.
template <class F>
TRACE_INLINE void each_vector(int64_t begin, int64_t end, const F& f) {
  int64_t j = begin;
  for (; j + kWidth <= end; j += kWidth) f(j, int64_t(kWidth));
  if (j < end) f(j, end - j);
}
#define TRACE_VECTOR [&](int64_t j, int64_t count) TRACE_INLINE_LAMBDA

template <class T>
TRACE_INLINE Vec read(const T* p, int64_t count, float fill = 0.0f) {
  return count == kWidth ? load(p) : load_part(p, count, fill);
}
template <class T>
TRACE_INLINE void write(T* p, int64_t count, Vec v) {
  count == kWidth ? store(p, v) : store_part(p, count, v);
}
TRACE_INLINE Vec exponential(Vec x) { return exp2(x * splat(kLog2E)); }
TRACE_INLINE Vec sigmoid(Vec x) {
  const Vec power = splat(-kLog2E) * x, bound = splat(126.0f);
  return splat(1.0f) / (splat(1.0f) + exp2(where(power > bound, bound, power)));
}

template <class T>
SoftmaxStatistics softmax_statistics(const void* logits, int64_t size, int64_t label, float scale) {
  const T* row = static_cast<const T*>(logits);
  Vec best = splat(kLowest);
  each_vector(0, size, TRACE_VECTOR { best = larger(best, read(row + j, count, kLowest)); });
  const float highest = size ? largest_lane(best) * scale : kLowest;
  Vec sums = splat(0.0f), weighted = splat(0.0f);
  for (int64_t begin = 0; begin < size; begin += kBlock) {
    const int64_t end = begin + kBlock < size ? begin + kBlock : size;
    Vec block_sums = splat(0.0f), block_weighted = splat(0.0f);
    each_vector(begin, end, TRACE_VECTOR {
      // in this order, so that a NaN is kept
      const Vec x = larger(splat(-1e30f), read(row + j, count, kLowest) * splat(scale) - splat(highest));
      const Vec e = exponential(x);
      block_sums += e;
      block_weighted += e * x;
    });
    sums += block_sums;
    weighted += block_weighted;
  }
  const bool is_here = label >= 0 && label < size;
  return {highest, sum_lanes(sums), sum_lanes(weighted), is_here ? to_float(row[label]) * scale : 0.0f};
}

template <class T>
void softmax_gradient(void* logits, int64_t size, int64_t label, float scale, float log_normalizer, float slope) {
  T* row = static_cast<T*>(logits);
  const bool is_here = label >= 0 && label < size;
  const float chosen = is_here ? to_float(row[label]) * scale - log_normalizer : 0.0f;
  each_vector(0, size, TRACE_VECTOR {
    const Vec x = read(row + j, count) * splat(scale) - splat(log_normalizer);
    write(row + j, count, exponential(x) * splat(-slope));
  });
  if (is_here) from_float(slope * (1.0f - exponential(splat(chosen))[0]), row[label]);
}

template <class T>
float rms_norm(const void* x, const void* weight, int64_t size, float eps, void* out) {
  const T *row = static_cast<const T*>(x), *w = static_cast<const T*>(weight);
  T* to = static_cast<T*>(out);
  Vec squares = splat(0.0f);
  each_vector(0, size, TRACE_VECTOR {
    const Vec v = read(row + j, count);
    squares += v * v;
  });
  const float r = 1.0f / __builtin_sqrtf(sum_lanes(squares) / float(size) + eps);
  each_vector(0, size, TRACE_VECTOR { write(to + j, count, read(row + j, count) * splat(r) * read(w + j, count)); });
  return r;
}

template <class T>
void rms_norm_gradient(const void* grad, const void* x, const void* weight, int64_t size, float r, void* grad_x) {
  const T *row = static_cast<const T*>(x), *w = static_cast<const T*>(weight), *g = static_cast<const T*>(grad);
  T* to = static_cast<T*>(grad_x);
  Vec products = splat(0.0f);
  each_vector(0, size, TRACE_VECTOR { products += read(g + j, count) * read(w + j, count) * read(row + j, count); });
  const Vec direct = splat(r), through = splat(r * r * r * sum_lanes(products) / float(size));
  each_vector(0, size, TRACE_VECTOR {
    const Vec v = read(g + j, count) * read(w + j, count) * direct - read(row + j, count) * through;
    write(to + j, count, v);
  });
}

template <class T>
void rms_norm_weight_gradient(const void* grad, const void* x, int64_t size, float r, float* sums) {
  const T *row = static_cast<const T*>(x), *g = static_cast<const T*>(grad);
  each_vector(0, size, TRACE_VECTOR {
    const Vec v = read(sums + j, count) + read(g + j, count) * read(row + j, count) * splat(r);
    write(sums + j, count, v);
  });
}

template <class T>
void swiglu(const void* x, int64_t size, void* out) {
  const T *gate = static_cast<const T*>(x), *up = gate + size;
  T* to = static_cast<T*>(out);
  each_vector(0, size, TRACE_VECTOR {
    const Vec a = read(gate + j, count);
    write(to + j, count, a * sigmoid(a) * read(up + j, count));
  });
}

template <class T>
void swiglu_gradient(const void* grad, const void* x, int64_t size, void* grad_x) {
  const T *gate = static_cast<const T*>(x), *up = gate + size, *g = static_cast<const T*>(grad);
  T *to_gate = static_cast<T*>(grad_x), *to_up = to_gate + size;
  each_vector(0, size, TRACE_VECTOR {
    const Vec a = read(gate + j, count), s = sigmoid(a), d = read(g + j, count);
    write(to_up + j, count, d * a * s);
    write(to_gate + j, count, d * read(up + j, count) * s * (splat(1.0f) + a * (splat(1.0f) - s)));
  });
}

template <class T>
constexpr RowOps row_ops() {
  return {softmax_statistics<T>,          softmax_gradient<T>, rms_norm<T>,       rms_norm_gradient<T>,
          rms_norm_weight_gradient<T>, swiglu<T>,           swiglu_gradient<T>};
}

}  // namespace
}  // namespace trace_megatron
