// Stage 2 of arXiv 2606.11119 for all prompts in one launch. Legend: P prefixes, S segments (prompts).
#pragma once

#include "launch.h"
#include "selection.h"

namespace trace_megatron {

struct AllocatePrefixesParams {
  Global<const float> float_probs;    // [P] chances to repeat the factual ending in [0, 1]; null where they are doubles
  Global<const double> double_probs;  // [P], or null
  Global<const int64_t> budgets;      // [S]
  Global<const int64_t> offsets;      // [S + 1]
  Global<SelectionRow> rows;          // [2, P] workspace
  Global<int64_t> counts;             // [P] continuations; not written where a segment's input is wrong
  int64_t num_rows, num_segments;
};

// Deterministic. The same counts as csrc/cpu/allocate.cpp.
extern "C" cudaError_t launch_allocate_prefixes(const AllocatePrefixesParams* params, cudaStream_t stream);

}  // namespace trace_megatron
