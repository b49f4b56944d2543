// The best counts of any table of values: an exact dynamic program. Legend: N problems, P rows, B budget, K = cap + 1.
#pragma once

#include "launch.h"

namespace trace_megatron {

struct AllocateTableParams {
  Global<const double> values;  // [N, P, K], -infinity where an entry is forbidden
  Global<double> table;         // [N, P, B + 1] workspace: the best of each spend before each row
  Global<int64_t> counts;       // [N, P]; -1 where the budget cannot be spent or a value is not below infinity
  int64_t num_problems, num_rows, num_counts, budget;  // num_counts: K
  bool exact;                                          // spend all of the budget; else at most
};

// Bytes of shared memory that a block needs; sm_80 gives 163 KiB, sm_90 and sm_100 227 KiB.
constexpr int64_t allocate_table_shared_bytes(int64_t num_counts, int64_t budget) {
  return (budget + 1 + num_counts) * int64_t(sizeof(double));
}
constexpr int64_t kMostTableSharedBytes = 160 * 1024;

// Deterministic. The same counts as csrc/cpu/allocate.cpp: of entries within 1e-12 of the best the smallest count, the
// last row first.
extern "C" cudaError_t launch_allocate_table(const AllocateTableParams* params, cudaStream_t stream);

}  // namespace trace_megatron
