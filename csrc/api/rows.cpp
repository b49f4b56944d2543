#include "../cpu/rows.h"

#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <cstdlib>
#include <vector>

#include "check.h"
#include "ops.h"

namespace trace_megatron {
namespace {

constexpr int64_t kGrain = 1 << 14;  // elements that are worth a thread

const RowOps& ops_of(const Tensor& x, const char* name) {
  TORCH_CHECK_VALUE(x.device().is_cpu() && (x.scalar_type() == at::kFloat || x.scalar_type() == at::kBFloat16) &&
                        x.is_contiguous() && x.dim() > 0,
                    "expected ", name, " as float32 or bfloat16 on the cpu without gaps, found ", x.scalar_type(), " ",
                    x.sizes(), " on ", x.device());
  const char* isa = std::getenv("TRACE_CPU_ISA");
  const RowKernels* found = row_kernels(isa && *isa ? isa : nullptr);
  TORCH_CHECK_VALUE(found, "expected TRACE_CPU_ISA as generic, avx2, avx512 or avx512_bf16, one that this processor ",
                    "has, found '", isa, "'");
  return x.scalar_type() == at::kFloat ? found->float32 : found->bfloat16;
}

void check_like(const Tensor& x, const char* name, const Tensor& like, at::IntArrayRef sizes) {
  TORCH_CHECK_VALUE(x.device().is_cpu() && x.scalar_type() == like.scalar_type() && x.sizes() == sizes &&
                        x.is_contiguous(),
                    "expected ", name, " as ", like.scalar_type(), " ", sizes, " on the cpu without gaps, found ",
                    x.scalar_type(), " ", x.sizes(), " on ", x.device());
}

// Rows of the last dimension.
struct RowsOf {
  char* data;
  int64_t size, count, bytes;

  explicit RowsOf(const Tensor& x)
      : data(static_cast<char*>(x.data_ptr())),
        size(x.size(-1)),
        count(size ? x.numel() / size : 0),
        bytes(size * x.element_size()) {}
  char* operator[](int64_t row) const { return data + row * bytes; }
};

template <class F>
void each_row(int64_t count, int64_t size, const F& f) {
  at::parallel_for(0, count, std::max<int64_t>(kGrain / std::max<int64_t>(size, 1), 1), [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) f(row);
  });
}

const float* checked_floats(const Tensor& x, const char* name, int64_t size) {
  const float* data = checked_vector<float>(x, name, at::kFloat);
  TORCH_CHECK_VALUE(x.size(0) == size, "expected ", name, " of size ", size, ", found ", x.sizes());
  return data;
}

const int64_t* checked_labels(const Tensor& logits, const Tensor& labels) {
  const int64_t* data = checked_int64(labels, "labels");
  TORCH_CHECK_VALUE(logits.dim() == 2 && labels.size(0) == logits.size(0), "expected logits [E, V] and labels [E], ",
                    "found ", logits.sizes(), " and ", labels.sizes());
  return data;
}

}  // namespace

Tensor softmax_statistics(const Tensor& logits, const Tensor& labels, double scale) {
  const RowOps& ops = ops_of(logits, "logits");
  const int64_t* label = checked_labels(logits, labels);
  const int64_t num_rows = logits.size(0), size = logits.size(1);
  Tensor out = at::empty({4, num_rows}, at::kFloat);
  float* to = out.mutable_data_ptr<float>();
  const RowsOf rows(logits);
  each_row(num_rows, size, [&](int64_t i) {
    const SoftmaxStatistics row = ops.softmax_statistics(rows[i], size, label[i], float(scale));
    to[i] = row.highest;
    to[num_rows + i] = row.sum;
    to[2 * num_rows + i] = row.weighted;
    to[3 * num_rows + i] = row.label;
  });
  return out;
}

void softmax_gradient_(Tensor& logits, const Tensor& labels, const Tensor& log_normalizers, const Tensor& slopes,
                       double scale) {
  const RowOps& ops = ops_of(logits, "logits");
  const int64_t* label = checked_labels(logits, labels);
  const float* log_normalizer = checked_floats(log_normalizers, "log_normalizers", logits.size(0));
  const float* slope = checked_floats(slopes, "slopes", logits.size(0));
  const RowsOf rows(logits);
  each_row(rows.count, rows.size, [&](int64_t i) {
    ops.softmax_gradient(rows[i], rows.size, label[i], float(scale), log_normalizer[i], slope[i]);
  });
}

std::tuple<Tensor, Tensor> rms_norm_forward(const Tensor& x, const Tensor& weight, double eps) {
  const RowOps& ops = ops_of(x, "x");
  check_like(weight, "weight", x, {x.size(-1)});
  Tensor out = at::empty_like(x), inverse = at::empty(x.sizes().slice(0, x.dim() - 1), at::kFloat);
  const RowsOf from(x), to(out);
  float* r = inverse.mutable_data_ptr<float>();
  each_row(from.count, from.size,
           [&](int64_t i) { r[i] = ops.rms_norm(from[i], weight.const_data_ptr(), from.size, float(eps), to[i]); });
  return {out, inverse};
}

std::tuple<Tensor, Tensor> rms_norm_backward(const Tensor& grad, const Tensor& x, const Tensor& weight,
                                             const Tensor& inverse) {
  const RowOps& ops = ops_of(x, "x");
  check_like(grad, "grad", x, x.sizes());
  check_like(weight, "weight", x, {x.size(-1)});
  check_like(inverse, "inverse", inverse, x.sizes().slice(0, x.dim() - 1));
  const RowsOf grads(grad), from(x);
  const float* r = inverse.const_data_ptr<float>();
  Tensor grad_x = at::empty_like(x);
  const RowsOf to(grad_x);
  each_row(from.count, from.size, [&](int64_t i) {
    ops.rms_norm_gradient(grads[i], from[i], weight.const_data_ptr(), from.size, r[i], to[i]);
  });
  // Each thread sums a part of the columns over all rows, in one order whatever the number of threads.
  Tensor sums = at::zeros({from.size}, at::kFloat);
  const int64_t part = 64, width = x.element_size();
  each_row((from.size + part - 1) / part, part * from.count, [&](int64_t block) {
    const int64_t begin = block * part, count = std::min(part, from.size - begin);
    for (int64_t i = 0; i < from.count; ++i)
      ops.rms_norm_weight_gradient(grads[i] + begin * width, from[i] + begin * width, count, r[i],
                                   sums.mutable_data_ptr<float>() + begin);
  });
  return {grad_x, sums.to(weight.scalar_type())};
}

Tensor swiglu_forward(const Tensor& x) {
  const RowOps& ops = ops_of(x, "x");
  TORCH_CHECK_VALUE(x.size(-1) % 2 == 0, "expected gate and up of equal size side by side, found ", x.sizes());
  std::vector<int64_t> sizes = x.sizes().vec();
  sizes.back() /= 2;
  Tensor out = at::empty(sizes, x.options());
  const RowsOf from(x), to(out);
  each_row(from.count, from.size, [&](int64_t i) { ops.swiglu(from[i], to.size, to[i]); });
  return out;
}

Tensor swiglu_backward(const Tensor& grad, const Tensor& x) {
  const RowOps& ops = ops_of(x, "x");
  std::vector<int64_t> sizes = x.sizes().vec();
  sizes.back() /= 2;
  check_like(grad, "grad", x, sizes);
  Tensor grad_x = at::empty_like(x);
  const RowsOf grads(grad), from(x), to(grad_x);
  each_row(from.count, from.size, [&](int64_t i) { ops.swiglu_gradient(grads[i], from[i], grads.size, to[i]); });
  return grad_x;
}

}  // namespace trace_megatron
