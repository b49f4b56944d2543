// Budgets divided over prompts and over prefixes: arXiv 2606.11119, stages 1 and 2.
//
// Both take units in order of falling marginal value; of equal ones, first units before second ones (breadth), earlier
// rows before later ones.
#pragma once

#include <cstdint>

namespace trace_megatron {

struct RootBudget {
  int64_t num_rollouts;
  int64_t max_rollouts;  // of one prompt
  bool exact;            // spend all of it; else at most, and no unit of zero value
};

// counts[i] in {0, 2, 3, ...} of n prompts that maximise the sum of 1 - v^m - (1 - v)^m; the budget must be feasible.
void allocate_roots(const double* success_probs, int64_t num_prompts, const RootBudget& budget, int64_t* counts);

// counts[i] >= 0 of n prefixes that sum to the budget and maximise the sum of 1 - q^k.
void allocate_prefixes(const double* repeat_probs, int64_t num_prefixes, int64_t budget, int64_t* counts);

// The best counts for any table of values [num_rows, cap + 1], -infinity where an entry is forbidden: a dynamic
// program. Of entries within 1e-12 of the best the smallest count is taken, the last row first. Returns false where the
// budget cannot be spent. `table` holds num_rows * (budget + 1) values.
bool allocate_table(const double* values, int64_t num_rows, int64_t cap, int64_t budget, bool exact, double* table,
                    int64_t* counts);

}  // namespace trace_megatron
