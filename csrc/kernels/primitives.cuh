// What kernels are written with. Under nvcc: CUDA. With TRACE_SIMT defined: the same names on a CPU (csrc/simt).
//
// Kernels keep to sm_80: mma.sync, ldmatrix and cp.async run unchanged on sm_90a and sm_100.
#pragma once

#include "pointers.h"

#if defined(TRACE_SIMT)

#include "../simt/simt.h"

// A static array of shared memory, and the dynamic one. Both are Shared<T>.
#define SHARED_ARRAY(type, name, size)                                                      \
  static const char name##_tag = 0;                                                         \
  const Shared<type> name(reinterpret_cast<type*>(                                          \
      simt::machine.shared_array(&name##_tag, #name, (size) * sizeof(type), sizeof(type))))
#define DYNAMIC_SHARED(name) const Shared<unsigned char> name(reinterpret_cast<unsigned char*>(simt::machine.dynamic_shared()))

#else

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>

#define SHARED_ARRAY(type, name, size) __shared__ __align__(16) type name[size]
#define DYNAMIC_SHARED(name) extern __shared__ __align__(128) unsigned char name[]

#endif

namespace trace_megatron {

constexpr unsigned kAllLanes = 0xffffffff;
constexpr int kWarpSize = 32;

#if defined(TRACE_SIMT)

using simt::bf16;
using simt::f16;
using simt::pointer_cast;
using simt::to_bf16;
using simt::to_f16;
using simt::to_float;

inline void mma(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2], bf16,
                simt::Where where = simt::Where::current()) {
  simt::mma<bf16>(c, a, b, where);
}
inline void mma(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2], f16,
                simt::Where where = simt::Where::current()) {
  simt::mma<f16>(c, a, b, where);
}
template <class T>
SIMT_INLINE void ldmatrix_x4(uint32_t (&result)[4], Shared<T> row, simt::Where where = simt::Where::current()) {
  simt::ldmatrix(result, row.address(), false, simt::here(), where);
}
template <class T>
SIMT_INLINE void ldmatrix_x4_trans(uint32_t (&result)[4], Shared<T> row, simt::Where where = simt::Where::current()) {
  simt::ldmatrix(result, row.address(), true, simt::here(), where);
}
template <class To, class From>
SIMT_INLINE void cp_async_16(Shared<To> to, Global<From> from, bool valid = true) {
  simt::copy_async(to.address(), from.address(), 16, valid ? 16 : 0);
}
inline void cp_async_commit() { ++simt::machine.current->groups; }
template <int kStillOpen>
SIMT_INLINE void cp_async_wait(simt::Where where = simt::Where::current()) {
  simt::wait_for_copies(kStillOpen, where);
}

inline float exp2_approx(float x) { return std::exp2(x); }

template <class Params>
cudaError_t launch(void (*kernel)(Params), dim3 grid, dim3 block, size_t shared_bytes, cudaStream_t,
                   const Params& params) {
  return simt::launch(kernel, grid, block, shared_bytes, params);
}

#else

using bf16 = __nv_bfloat16;
using f16 = __half;

template <class To, class From>
__device__ __forceinline__ To* pointer_cast(From* from) {
  return reinterpret_cast<To*>(from);
}

__device__ __forceinline__ float to_float(bf16 x) { return __bfloat162float(x); }
__device__ __forceinline__ float to_float(f16 x) { return __half2float(x); }
__device__ __forceinline__ bf16 to_bf16(float x) { return __float2bfloat16_rn(x); }
__device__ __forceinline__ f16 to_f16(float x) { return __float2half_rn(x); }

// c += a b on the tensor cores, m16n8k16 with float32 sums; the last argument names the type of a and b. The layout of
// the fragments stands in simt/tensor.h.
#define TRACE_MMA(type)                                                                                              \
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." type "." type                                                \
               ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"                                \
               : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])                                                      \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]))
__device__ __forceinline__ void mma(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2], bf16) {
  TRACE_MMA("bf16");
}
__device__ __forceinline__ void mma(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2], f16) {
  TRACE_MMA("f16");
}
#undef TRACE_MMA

// Four 8 x 8 matrices of 16-bit values; lane l gives the address of row l % 8 of matrix l / 8, on 16 bytes.
template <class T>
__device__ __forceinline__ void ldmatrix_x4(uint32_t (&result)[4], T* row) {
  const unsigned address = static_cast<unsigned>(__cvta_generic_to_shared(row));
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(result[0]), "=r"(result[1]), "=r"(result[2]), "=r"(result[3])
               : "r"(address)
               : "memory");
}
template <class T>
__device__ __forceinline__ void ldmatrix_x4_trans(uint32_t (&result)[4], T* row) {
  const unsigned address = static_cast<unsigned>(__cvta_generic_to_shared(row));
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(result[0]), "=r"(result[1]), "=r"(result[2]), "=r"(result[3])
               : "r"(address)
               : "memory");
}

// 16 bytes from global to shared memory, both on 16 bytes; zeros where not valid, and then `from` is not read. They are
// there for this thread after cp_async_wait, for others after a barrier that follows it.
template <class To, class From>
__device__ __forceinline__ void cp_async_16(To* to, const From* from, bool valid = true) {
  const unsigned address = static_cast<unsigned>(__cvta_generic_to_shared(to));
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(address), "l"(from), "r"(valid ? 16 : 0)
               : "memory");
}
__device__ __forceinline__ void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Waits until at most this many of the thread's latest groups are still under way.
template <int kStillOpen>
__device__ __forceinline__ void cp_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kStillOpen) : "memory");
}

// 2^x in one instruction, to 2 units in the last place; 0 at -infinity.
__device__ __forceinline__ float exp2_approx(float x) {
  asm("ex2.approx.ftz.f32 %0, %0;" : "+f"(x));
  return x;
}

template <class Params>
cudaError_t launch(void (*kernel)(Params), dim3 grid, dim3 block, size_t shared_bytes, cudaStream_t stream,
                   const Params& params) {
  if (shared_bytes > 48 * 1024) {
    const cudaError_t error =
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, int(shared_bytes));
    if (error != cudaSuccess) return error;
  }
  kernel<<<grid, block, shared_bytes, stream>>>(params);
  return cudaGetLastError();
}

#endif

// For launch functions: whether vectors of this many bytes can be read from here.
template <class T>
bool is_aligned(Global<T> at, size_t bytes) {
#if defined(TRACE_SIMT)
  return reinterpret_cast<uintptr_t>(at.address()) % bytes == 0;
#else
  return reinterpret_cast<uintptr_t>(at) % bytes == 0;
#endif
}

// Two 16-bit floats in one register, the first in the low half.
__device__ __forceinline__ uint32_t pack(bf16 low, bf16 high) {
  uint16_t parts[2];
  memcpy(&parts[0], &low, 2), memcpy(&parts[1], &high, 2);
  return parts[0] | uint32_t(parts[1]) << 16;
}
__device__ __forceinline__ uint32_t pack(f16 low, f16 high) {
  uint16_t parts[2];
  memcpy(&parts[0], &low, 2), memcpy(&parts[1], &high, 2);
  return parts[0] | uint32_t(parts[1]) << 16;
}

}  // namespace trace_megatron
