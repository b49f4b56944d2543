// Tree attention on a CPU: query i at position p[i] sees key j if and only if j <= p[i] < subtree_end[j].
//
// Legend: Q queries, T keys, H query heads, G key/value heads, R = H / G, D head dim.
#pragma once

#include <cstddef>
#include <cstdint>

#include "parallel.h"

namespace trace_megatron {

enum class Storage { kFloat32, kBFloat16 };

// Element (token, head, d) lies at data + token * token_stride + head * head_stride + d, counted in elements.
struct Rows {
  const void* data;
  int64_t token_stride;
  int64_t head_stride;
};

struct AttentionArgs {
  int64_t num_queries, num_keys, num_heads, num_groups, head_dim;
  Storage storage;
  float scale;
  Rows q, k, v;
  const int32_t* position;     // [Q] increasing, in [0, T)
  const int32_t* subtree_end;  // [T]
};

struct AttentionForward {
  AttentionArgs args;
  void* out;   // [Q, H, D]
  float* lse;  // [Q, H] natural logarithm of the sum of exponentials
};

struct AttentionBackward {
  AttentionArgs args;
  Rows grad_out, out;
  const float* lse;
  void *grad_q, *grad_k, *grad_v;  // [Q, H, D], [T, G, D], [T, G, D]
};

// One build of the kernels for one instruction set. A workspace is 64-byte aligned memory, in any state.
struct AttentionKernels {
  const char* name;
  size_t (*forward_workspace)(const AttentionForward&, int num_threads);
  size_t (*backward_workspace)(const AttentionBackward&, int num_threads);
  void (*forward)(const AttentionForward&, const Parallel&, void* workspace);
  void (*backward)(const AttentionBackward&, const Parallel&, void* workspace);
};

// The fastest kernels that this processor runs, or those named (generic, avx2, avx512, avx512_bf16); null if it cannot.
const AttentionKernels* attention_kernels(const char* name = nullptr);

}  // namespace trace_megatron
