// The only file that needs torch's CUDA headers, which a CPU build of torch lacks in part.
#include <c10/cuda/CUDAStream.h>

#include "check.h"

namespace trace_megatron::cuda {

cudaStream_t current_stream(at::Device device) { return c10::cuda::getCurrentCUDAStream(device.index()).stream(); }

}  // namespace trace_megatron::cuda
