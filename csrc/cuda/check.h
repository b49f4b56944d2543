// Checks before a launch, which say what was expected and what was found. They read sizes and addresses, no values:
// nothing waits for the device. What a kernel does where values are wrong stands in its header.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/DeviceGuard.h>
#include <c10/util/Exception.h>

#include <limits>

#include "../kernels/launch.h"

namespace trace_megatron::cuda {

using at::Tensor;

#if defined(TRACE_SIMT)
constexpr at::DeviceType kDevice = at::kCPU;  // tests run these files with the kernels on a CPU
#else
constexpr at::DeviceType kDevice = at::kCUDA;
#endif

constexpr int64_t kMostInt32 = std::numeric_limits<int32_t>::max();

// Torch's current stream of this device.
cudaStream_t current_stream(at::Device device);

inline void check_device(const Tensor& tensor, const char* name) {
  TORCH_CHECK_VALUE(tensor.device().type() == kDevice, "expected ", name, " on a ", at::DeviceTypeName(kDevice, true),
                    " device, found ", tensor.device());
}

inline void check_contiguous(const Tensor& tensor, const char* name) {
  TORCH_CHECK_VALUE(tensor.is_contiguous(), "expected ", name, " without gaps, found sizes ", tensor.sizes(),
                    " and strides ", tensor.strides());
  const auto misplaced = reinterpret_cast<uintptr_t>(tensor.const_data_ptr()) % uintptr_t(tensor.element_size());
  TORCH_CHECK_VALUE(misplaced == 0, "expected ", name, " at a multiple of ", tensor.element_size(), " bytes, found ",
                    misplaced, " bytes beyond one");
}

// A tensor of this type and shape on this device.
inline void check_tensor(const Tensor& tensor, const char* name, at::ScalarType dtype, at::IntArrayRef sizes,
                         at::Device device) {
  TORCH_CHECK_VALUE(tensor.device() == device && tensor.scalar_type() == dtype && tensor.sizes() == sizes, "expected ",
                    name, " as ", dtype, " ", sizes, " on ", device, ", found ", tensor.scalar_type(), " ",
                    tensor.sizes(), " on ", tensor.device());
  check_contiguous(tensor, name);
}

template <class T>
const T* checked(const Tensor& tensor, const char* name, at::ScalarType dtype, at::IntArrayRef sizes,
                 at::Device device) {
  check_tensor(tensor, name, dtype, sizes, device);
  return tensor.const_data_ptr<T>();
}

inline void check_at_most(int64_t found, int64_t most, const char* what) {
  TORCH_CHECK_VALUE(found <= most, "expected at most ", most, " ", what, ", found ", found);
}

// Raises where a launch failed: CUDA's own words, and the op.
inline void check_launch(cudaError_t error, const char* name) {
#if defined(TRACE_SIMT)
  TORCH_CHECK(error == cudaSuccess, "expected ", name, " to be launched, found CUDA error ", int(error));
#else
  TORCH_CHECK(error == cudaSuccess, "expected ", name, " to be launched, found CUDA error ", int(error), ": ",
              cudaGetErrorString(error));
#endif
}

}  // namespace trace_megatron::cuda
