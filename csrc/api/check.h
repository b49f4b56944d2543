// Checks that several ops share. Each failure says what was expected and what was found.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>

namespace trace_megatron {

// A 1-D int32 tensor on the CPU without gaps.
inline const int32_t* checked_int32(const at::Tensor& tensor, const char* name, int64_t size) {
  TORCH_CHECK_VALUE(tensor.device().is_cpu() && tensor.scalar_type() == at::kInt && tensor.dim() == 1 &&
                        tensor.size(0) == size,
                    "expected ", name, " as int32 [", size, "] on the cpu, found ", tensor.scalar_type(), " ",
                    tensor.sizes(), " on ", tensor.device());
  TORCH_CHECK_VALUE(tensor.is_contiguous(), "expected ", name, " without gaps, found strides ", tensor.strides());
  return tensor.const_data_ptr<int32_t>();
}

}  // namespace trace_megatron
