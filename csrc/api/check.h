// Checks that several ops share. Each failure says what was expected and what was found.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>

namespace trace_megatron {

template <class T>
const T* checked_vector(const at::Tensor& tensor, const char* name, at::ScalarType dtype) {
  TORCH_CHECK_VALUE(tensor.device().is_cpu() && tensor.scalar_type() == dtype && tensor.dim() == 1, "expected ", name,
                    " as a vector of ", dtype, " on the cpu, found ", tensor.scalar_type(), " ", tensor.sizes(), " on ",
                    tensor.device());
  TORCH_CHECK_VALUE(tensor.is_contiguous(), "expected ", name, " without gaps, found strides ", tensor.strides());
  return tensor.const_data_ptr<T>();
}

// An int32 vector of this size, in the words of the references.
inline const int32_t* checked_int32(const at::Tensor& tensor, const char* name, int64_t size) {
  TORCH_CHECK_VALUE(tensor.scalar_type() == at::kInt && tensor.dim() == 1 && tensor.size(0) == size, "expected ", name,
                    " as int32 [", size, "], found ", tensor.scalar_type(), " ", tensor.sizes());
  return checked_vector<int32_t>(tensor, name, at::kInt);
}

inline const int64_t* checked_int64(const at::Tensor& tensor, const char* name) {
  return checked_vector<int64_t>(tensor, name, at::kLong);
}

// 0 = offsets[0] <= offsets[1] <= ... = total
inline const int64_t* checked_offsets(const at::Tensor& tensor, const char* name, int64_t total) {
  const int64_t* offsets = checked_int64(tensor, name);
  const int64_t size = tensor.size(0);
  TORCH_CHECK_VALUE(size > 0 && offsets[0] == 0 && offsets[size - 1] == total, "expected ", name, " from 0 to ", total,
                    ", found ", size ? offsets[0] : -1, " to ", size ? offsets[size - 1] : -1);
  for (int64_t i = 1; i < size; ++i)
    TORCH_CHECK_VALUE(offsets[i - 1] <= offsets[i], "expected ", name, " that do not fall, found ", offsets[i],
                      " after ", offsets[i - 1], " at place ", i);
  return offsets;
}

// Raises unless subtree_end [num_tokens] describes a forest in preorder.
void check_forest_of(const int32_t* subtree_end, int64_t num_tokens);

}  // namespace trace_megatron
