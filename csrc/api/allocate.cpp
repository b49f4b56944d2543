#include "../cpu/allocate.h"

#include <ATen/ops/empty.h>

#include <cmath>
#include <limits>

#include "check.h"
#include "ops.h"

namespace trace_megatron {
namespace {

constexpr int64_t kMostUnits = std::numeric_limits<int32_t>::max();

// Probabilities in float64, with the segments that they fall into.
struct Batch {
  Tensor probs;
  const double* data;
  const int64_t *budgets, *offsets;
  int64_t num_segments;
};

Batch check_batch(const Tensor& probs, const char* name, const Tensor& budgets, const Tensor& offsets) {
  TORCH_CHECK_VALUE(probs.device().is_cpu() && probs.dim() == 1 &&
                        (probs.scalar_type() == at::kFloat || probs.scalar_type() == at::kDouble),
                    "expected ", name, " as a vector of float32 or float64 on the cpu, found ", probs.scalar_type(),
                    " ", probs.sizes(), " on ", probs.device());
  Batch batch;
  batch.probs = probs.to(at::kDouble).contiguous();
  batch.data = batch.probs.const_data_ptr<double>();
  for (int64_t i = 0; i < probs.size(0); ++i)
    TORCH_CHECK_VALUE(batch.data[i] >= 0.0 && batch.data[i] <= 1.0, "expected ", name, " in [0, 1], found ",
                      batch.data[i]);
  batch.budgets = checked_int64(budgets, "budgets");
  batch.offsets = checked_offsets(offsets, "offsets", probs.size(0));
  batch.num_segments = offsets.size(0) - 1;
  TORCH_CHECK_VALUE(budgets.size(0) == batch.num_segments, "expected one budget for each of ", batch.num_segments,
                    " segments, found ", budgets.size(0));
  for (int64_t i = 0; i < batch.num_segments; ++i)
    TORCH_CHECK_VALUE(batch.budgets[i] >= 0 && batch.budgets[i] <= kMostUnits, "expected a budget from 0 to ",
                      kMostUnits, ", found ", batch.budgets[i]);
  return batch;
}

void check_root_budget(int64_t num_prompts, const RootBudget& budget, bool capped) {
  const int64_t wanted = budget.num_rollouts;
  if (!budget.exact || wanted == 0) return;
  TORCH_CHECK_VALUE(num_prompts > 0, "expected prompts to spend ", wanted, " rollouts on, found none");
  TORCH_CHECK_VALUE(wanted >= 2, "expected a budget of 0 or at least 2 rollouts, found 1: a prompt gets none or at ",
                    "least two");
  if (!capped) return;
  const int64_t most = budget.max_rollouts;
  TORCH_CHECK_VALUE(most >= 2, "expected max_rollouts of at least 2, found ", most, ": one rollout shows no contrast");
  TORCH_CHECK_VALUE((wanted - 1) / most + 1 <= num_prompts, "expected a budget of at most ", num_prompts, " prompts x ",
                    most, " rollouts, found ", wanted,
                    ": raise max_rollouts or the number of prompts, or spend at most the budget (exact=False)");
  TORCH_CHECK_VALUE(most != 2 || wanted % 2 == 0, "expected an even budget where max_rollouts is 2, found ", wanted);
}

}  // namespace

Tensor allocate_roots_op(const Tensor& success_probs, const Tensor& budgets, const Tensor& offsets,
                         std::optional<int64_t> max_rollouts, bool exact) {
  const Batch batch = check_batch(success_probs, "success_probs", budgets, offsets);
  TORCH_CHECK_VALUE(!max_rollouts || *max_rollouts >= 0, "expected max_rollouts from 0 on, found ",
                    max_rollouts.value_or(0));
  Tensor counts = at::empty({success_probs.size(0)}, at::kLong);
  for (int64_t i = 0; i < batch.num_segments; ++i) {
    const int64_t first = batch.offsets[i], size = batch.offsets[i + 1] - first;
    const RootBudget budget{batch.budgets[i], max_rollouts.value_or(std::numeric_limits<int64_t>::max()), exact};
    check_root_budget(size, budget, max_rollouts.has_value());
    allocate_roots(batch.data + first, size, budget, counts.mutable_data_ptr<int64_t>() + first);
  }
  return counts;
}

Tensor allocate_prefixes_op(const Tensor& repeat_probs, const Tensor& budgets, const Tensor& offsets) {
  const Batch batch = check_batch(repeat_probs, "repeat_probs", budgets, offsets);
  Tensor counts = at::empty({repeat_probs.size(0)}, at::kLong);
  for (int64_t i = 0; i < batch.num_segments; ++i) {
    const int64_t first = batch.offsets[i], size = batch.offsets[i + 1] - first;
    TORCH_CHECK_VALUE(size > 0 || batch.budgets[i] == 0, "expected an anchor to spend ", batch.budgets[i],
                      " continuations on, found none");
    allocate_prefixes(batch.data + first, size, batch.budgets[i], counts.mutable_data_ptr<int64_t>() + first);
  }
  return counts;
}

Tensor allocate_table_op(const Tensor& values, int64_t budget, bool exact) {
  TORCH_CHECK_VALUE(
      values.device().is_cpu() && values.scalar_type() == at::kDouble && values.dim() == 2 && values.size(1) > 0,
      "expected a table of values [P, cap + 1] as float64 on the cpu, found ", values.scalar_type(), " ",
      values.sizes(), " on ", values.device());
  const Tensor dense = values.contiguous();
  const double* data = dense.const_data_ptr<double>();
  for (int64_t i = 0; i < values.numel(); ++i)
    TORCH_CHECK_VALUE(data[i] < std::numeric_limits<double>::infinity(),
                      "expected a table of values [P, cap + 1] below infinity, found ", data[i]);
  TORCH_CHECK_VALUE(budget >= 0 && budget < std::numeric_limits<int32_t>::max(), "expected budget from 0 to ",
                    std::numeric_limits<int32_t>::max() - 1, ", found ", budget);
  Tensor counts = at::empty({values.size(0)}, at::kLong);
  Tensor table = at::empty({values.size(0), budget + 1}, at::kDouble);
  TORCH_CHECK_VALUE(allocate_table(data, values.size(0), values.size(1) - 1, budget, exact,
                                   table.mutable_data_ptr<double>(), counts.mutable_data_ptr<int64_t>()),
                    "expected a budget that the table can spend exactly, found ", budget);
  return counts;
}

}  // namespace trace_megatron
