// FlexAttention's block mask of a forest, on the device. Legend: T tokens, N = ceil(T / block_size) blocks of them.
#pragma once

#include "launch.h"

namespace trace_megatron {

struct TreeBlockMaskParams {
  Global<const int32_t> subtree_end;  // [T]; not checked: values beyond [0, T] count as the nearest
  Global<int32_t> ends;               // [2, N] workspace
  Global<int32_t> partial_key_count, full_key_count, partial_query_count, full_query_count;  // [N]
  Global<int32_t> partial_key_index, full_key_index, partial_query_index, full_query_index;  // [N, N]
  int64_t num_tokens, block_size;
};

// Deterministic. The same lists as csrc/cpu/block_mask.cpp: a row's blocks ascending, then all others ascending.
extern "C" cudaError_t launch_tree_block_mask(const TreeBlockMaskParams* params, cudaStream_t stream);

}  // namespace trace_megatron
