// Pointers to a device's memory: raw ones, or checked ones of the same size where a CPU runs the kernels (csrc/simt).
#pragma once

#if defined(TRACE_SIMT)
#include "../simt/pointer.h"
namespace trace_megatron {
template <class T>
using Global = simt::Pointer<T>;
template <class T>
using Shared = simt::Pointer<T>;
}  // namespace trace_megatron
#else
namespace trace_megatron {
template <class T>
using Global = T*;
template <class T>
using Shared = T*;
}  // namespace trace_megatron
#endif
