// What the declarations of launch functions need, without CUDA's own compiler.
#pragma once

#include <cstdint>

#include "pointers.h"

#if defined(TRACE_SIMT)
#include "../simt/cuda.h"
#else
#include <cuda_runtime_api.h>
#endif
