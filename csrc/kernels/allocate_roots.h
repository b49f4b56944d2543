// Stage 1 of arXiv 2606.11119, for any number of pools in one launch. Legend: P prompts, S segments (pools).
#pragma once

#include "launch.h"
#include "selection.h"

namespace trace_megatron {

struct AllocateRootsParams {
  Global<const float> float_probs;    // [P] success probabilities in [0, 1]; null where they are doubles
  Global<const double> double_probs;  // [P], or null
  Global<const int64_t> budgets;      // [S]
  Global<const int64_t> offsets;      // [S + 1]
  Global<SelectionRow> rows;          // [2, P] workspace
  Global<int64_t> counts;             // [P] bare rollouts; not written where a segment's input is wrong or infeasible
  int64_t num_rows, num_segments;
  int64_t max_rollouts;  // of one prompt; -1 for no cap
  bool exact;            // spend all of a budget; else at most, and no unit of zero value
};

// Deterministic. The same counts as csrc/cpu/allocate.cpp.
extern "C" cudaError_t launch_allocate_roots(const AllocateRootsParams* params, cudaStream_t stream);

}  // namespace trace_megatron
