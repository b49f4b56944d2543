// Nothing is read back between scores and plan, so wrong values cannot raise: their counts are -1.
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>

#include "../kernels/allocate_prefixes.h"
#include "../kernels/allocate_roots.h"
#include "../kernels/allocate_table.h"
#include "check.h"
#include "ops.h"

namespace trace_megatron::cuda {
namespace {

// Checks a batch of segments and fills what both kinds of params share. `counts` and `workspace` are made for it.
template <class Params>
Params batch_params(const Tensor& probs, const char* name, const Tensor& budgets, const Tensor& offsets,
                    Tensor& counts, Tensor& workspace) {
  check_device(probs, name);
  const bool is_float = probs.scalar_type() == at::kFloat;
  TORCH_CHECK_VALUE(probs.dim() == 1 && (is_float || probs.scalar_type() == at::kDouble), "expected ", name,
                    " as a vector of float32 or float64, found ", probs.scalar_type(), " ", probs.sizes());
  check_contiguous(probs, name);
  TORCH_CHECK_VALUE(budgets.dim() == 1, "expected budgets as a vector, found sizes ", budgets.sizes());
  const int64_t num_rows = probs.size(0), num_segments = budgets.size(0);
  check_at_most(num_rows, kMostInt32, "probabilities");
  check_at_most(num_segments, kMostInt32, "segments");
  const at::Device device = probs.device();
  counts = at::full({num_rows}, -1, probs.options().dtype(at::kLong));
  workspace = at::empty({2 * num_rows, int64_t(sizeof(SelectionRow))}, probs.options().dtype(at::kByte));
  Params params{};
  if (is_float)
    params.float_probs = probs.const_data_ptr<float>();
  else
    params.double_probs = probs.const_data_ptr<double>();
  params.budgets = checked<int64_t>(budgets, "budgets", at::kLong, {num_segments}, device);
  params.offsets = checked<int64_t>(offsets, "offsets", at::kLong, {num_segments + 1}, device);
  params.rows = reinterpret_cast<SelectionRow*>(workspace.mutable_data_ptr());
  params.counts = counts.mutable_data_ptr<int64_t>();
  params.num_rows = num_rows;
  params.num_segments = num_segments;
  return params;
}

}  // namespace

Tensor allocate_roots(const Tensor& success_probs, const Tensor& budgets, const Tensor& offsets,
                      std::optional<int64_t> max_rollouts, bool exact) {
  TORCH_CHECK_VALUE(!max_rollouts || *max_rollouts >= 0, "expected max_rollouts from 0 on, found ",
                    max_rollouts.value_or(0));
  const c10::DeviceGuard guard(success_probs.device());
  Tensor counts, workspace;
  AllocateRootsParams params =
      batch_params<AllocateRootsParams>(success_probs, "success_probs", budgets, offsets, counts, workspace);
  params.max_rollouts = max_rollouts.value_or(-1);
  params.exact = exact;
  check_launch(launch_allocate_roots(&params, current_stream(success_probs.device())), "allocate_roots");
  return counts;
}

Tensor allocate_prefixes(const Tensor& repeat_probs, const Tensor& budgets, const Tensor& offsets) {
  const c10::DeviceGuard guard(repeat_probs.device());
  Tensor counts, workspace;
  const auto params =
      batch_params<AllocatePrefixesParams>(repeat_probs, "repeat_probs", budgets, offsets, counts, workspace);
  check_launch(launch_allocate_prefixes(&params, current_stream(repeat_probs.device())), "allocate_prefixes");
  return counts;
}

Tensor allocate_table(const Tensor& values, int64_t budget, bool exact) {
  check_device(values, "values");
  TORCH_CHECK_VALUE(values.scalar_type() == at::kDouble && values.dim() == 2 && values.size(1) > 0,
                    "expected a table of values [P, cap + 1] as float64, found ", values.scalar_type(), " ",
                    values.sizes());
  check_contiguous(values, "values");
  const int64_t num_rows = values.size(0), num_counts = values.size(1);
  TORCH_CHECK_VALUE(budget >= 0 && budget < kMostInt32, "expected budget from 0 to ", kMostInt32 - 1, ", found ", budget);
  TORCH_CHECK_VALUE(num_counts <= kMostTableSharedBytes &&
                        allocate_table_shared_bytes(num_counts, budget) <= kMostTableSharedBytes,
                    "expected budget + values of a row of at most ", kMostTableSharedBytes / 8 - 1, ", found ", budget,
                    " + ", num_counts, ": a row must fit into shared memory; move the table to the cpu");
  TORCH_CHECK_VALUE(num_rows > 0 || budget == 0 || !exact, "expected a budget that the table can spend exactly, found ",
                    budget);
  const c10::DeviceGuard guard(values.device());
  Tensor counts = at::empty({num_rows}, values.options().dtype(at::kLong));
  Tensor table = at::empty({num_rows, budget + 1}, values.options());
  AllocateTableParams params{};
  params.values = values.const_data_ptr<double>();
  params.table = table.mutable_data_ptr<double>();
  params.counts = counts.mutable_data_ptr<int64_t>();
  params.num_problems = 1;
  params.num_rows = num_rows;
  params.num_counts = num_counts;
  params.budget = budget;
  params.exact = exact;
  check_launch(launch_allocate_table(&params, current_stream(values.device())), "allocate_table");
  return counts;
}

}  // namespace trace_megatron::cuda
