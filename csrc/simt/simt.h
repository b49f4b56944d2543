// Runs a CUDA kernel's own source on a CPU: see README.md in this folder. One translation unit per library.
#pragma once

#include "cuda.h"
#include "tensor.h"

namespace simt {

template <class Params>
cudaError_t launch(void (*kernel)(Params), Index grid, Index block, size_t shared_bytes, const Params& params) {
  if (!machine.error.empty()) return cudaErrorLaunchFailure;
  const bool fits = grid.count() > 0 && grid.x <= INT_MAX && grid.y <= 65535 && grid.z <= 65535 && block.count() > 0 &&
                    block.count() <= kMostThreads && block.z <= 64 && shared_bytes <= kMostShared;
  if (!fits) return cudaErrorInvalidConfiguration;
  return machine.run(grid, block, shared_bytes, [=] { kernel(params); }) ? cudaSuccess : cudaErrorLaunchFailure;
}

inline std::string answer;  // what a C caller was last given

}  // namespace simt

// For tests, by ctypes.
extern "C" {

[[gnu::used]] inline void simt_reset(uint64_t seed) {
  simt::machine.random = simt::Random(seed);
  simt::machine.globals.clear();
  simt::machine.dropped.clear();
  simt::machine.error.clear();
  simt::machine.bytes_read = simt::machine.bytes_written = simt::machine.tensor_products = simt::machine.barriers = 0;
}

// Memory that the kernel may touch, in elements of `granule` bytes.
[[gnu::used]] inline void simt_region(const char* name, void* begin, size_t bytes, size_t granule, int is_writable,
                                      int is_written) {
  simt::Region region(name, static_cast<char*>(begin), bytes, granule);
  region.is_writable = is_writable, region.starts_written = is_written;
  auto& globals = simt::machine.globals;
  const auto place = std::upper_bound(globals.begin(), globals.end(), region.begin,
                                      [](const char* at, const simt::Region& other) { return at < other.begin; });
  globals.insert(place, std::move(region));
}

// Whether memory outside all regions may be touched, unchecked: for ops that make tensors of their own.
[[gnu::used]] inline void simt_trust_unknown(int trusts) { simt::machine.trusts_unknown = trusts; }

// The synchronisation at this file:line does nothing until the next reset.
[[gnu::used]] inline void simt_drop(const char* place) { simt::machine.dropped = place; }

[[gnu::used]] inline const char* simt_error() { return simt::machine.error.c_str(); }

// Every synchronisation met since the library was loaded: file:line, one a line.
[[gnu::used]] inline const char* simt_syncs() {
  simt::answer.clear();
  for (const std::string& sync : simt::machine.syncs) simt::answer += sync + "\n";
  return simt::answer.c_str();
}

// Bytes of global memory read and written, m16n8k16 products, barriers.
[[gnu::used]] inline void simt_counts(uint64_t* counts) {
  counts[0] = simt::machine.bytes_read, counts[1] = simt::machine.bytes_written;
  counts[2] = simt::machine.tensor_products, counts[3] = simt::machine.barriers;
}
}
