#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>

#include <cstdlib>
#include <limits>
#include <thread>
#include <vector>

#include "../cpu/attention.h"
#include "../cpu/forest.h"
#include "check.h"
#include "ops.h"

namespace trace_megatron {
namespace {

// The processor's best kernels, or those that TRACE_CPU_ISA names.
const AttentionKernels& kernels() {
  const char* name = std::getenv("TRACE_CPU_ISA");
  const AttentionKernels* found = attention_kernels(name && *name ? name : nullptr);
  TORCH_CHECK_VALUE(found, "expected TRACE_CPU_ISA as generic, avx2, avx512 or avx512_bf16, one that this processor ",
                    "has, found '", name, "'");
  return *found;
}

// Rows of a [tokens, heads, D] tensor; copied only where the last dimension has gaps.
struct HeldRows {
  Tensor tensor;
  Rows rows;
};

HeldRows hold(const Tensor& x) {
  const Tensor dense = x.size(2) == 1 || x.stride(2) == 1 ? x : x.contiguous();
  return {dense, {dense.const_data_ptr(), dense.stride(0), dense.stride(1)}};
}

void check_dense(const Tensor& x, const char* name, const Tensor& q, at::IntArrayRef sizes) {
  TORCH_CHECK_VALUE(x.device().is_cpu() && x.scalar_type() == q.scalar_type() && x.sizes() == sizes, "expected ", name,
                    " as ", q.scalar_type(), " ", sizes, " on the cpu, found ", x.scalar_type(), " ", x.sizes(), " on ",
                    x.device());
}

const int32_t* check_query_index(const Tensor& query_index, int64_t num_queries, int64_t num_keys) {
  const int32_t* index = checked_int32(query_index, "query_index", num_queries);
  for (int64_t i = 0; i < num_queries; ++i)
    TORCH_CHECK_VALUE(index[i] >= 0 && index[i] < num_keys && (i == 0 || index[i - 1] < index[i]),
                      "expected query_index increasing within [0, ", num_keys, "), found ", index[i], " at place ", i);
  return index;
}

struct Call {
  AttentionArgs args;
  std::vector<HeldRows> held;
  std::vector<int32_t> identity;
};

Call check(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& subtree_end,
           const OptionalTensor& query_index, double scale) {
  TORCH_CHECK_VALUE(q.dim() == 3 && k.dim() == 3 && k.sizes() == v.sizes() && q.size(2) == k.size(2) &&
                        (query_index || q.size(0) == k.size(0)),
                    "expected q [T, H, D] and k, v [T, G, D], found q ", q.sizes(), ", k ", k.sizes(), ", v ",
                    v.sizes());
  TORCH_CHECK_VALUE(k.size(1) > 0 && q.size(1) % k.size(1) == 0, "expected query heads a multiple of key heads, found ",
                    q.size(1), " and ", k.size(1));
  TORCH_CHECK_VALUE(q.scalar_type() == k.scalar_type() && q.scalar_type() == v.scalar_type(),
                    "expected q, k, v of one float dtype, found ", q.scalar_type(), ", ", k.scalar_type(), ", ",
                    v.scalar_type());
  TORCH_CHECK_VALUE(q.scalar_type() == at::kFloat || q.scalar_type() == at::kBFloat16,
                    "expected q, k, v as float32 or bfloat16, found ", q.scalar_type());
  TORCH_CHECK_VALUE(q.device().is_cpu(), "expected q on the cpu, found ", q.device());
  check_dense(k, "k", q, k.sizes());
  check_dense(v, "v", q, k.sizes());
  // positions are int32, and the last panel of keys is padded
  constexpr int64_t kMostTokens = std::numeric_limits<int32_t>::max() - 64;
  TORCH_CHECK_VALUE(k.size(0) <= kMostTokens, "expected at most ", kMostTokens, " tokens, found ", k.size(0));
  Call call;
  call.args.subtree_end = checked_int32(subtree_end, "subtree_end", k.size(0));
  check_forest_of(call.args.subtree_end, k.size(0));
  if (query_index) {
    call.args.position = check_query_index(*query_index, q.size(0), k.size(0));
  } else {
    call.identity.resize(q.size(0));
    for (int64_t i = 0; i < q.size(0); ++i) call.identity[i] = int32_t(i);
    call.args.position = call.identity.data();
  }
  for (const Tensor& x : {q, k, v}) call.held.push_back(hold(x));
  call.args.num_queries = q.size(0);
  call.args.num_keys = k.size(0);
  call.args.num_heads = q.size(1);
  call.args.num_groups = k.size(1);
  call.args.head_dim = q.size(2);
  call.args.storage = q.scalar_type() == at::kFloat ? Storage::kFloat32 : Storage::kBFloat16;
  call.args.scale = float(scale);
  call.args.q = call.held[0].rows;
  call.args.k = call.held[1].rows;
  call.args.v = call.held[2].rows;
  return call;
}

struct Workspace {
  Tensor memory;
  void* begin;
};

// torch's CPU allocator aligns to 64 bytes
Workspace take_workspace(size_t bytes) {
  const Tensor memory = at::empty({int64_t(bytes)}, at::kByte);
  return {memory, memory.mutable_data_ptr()};
}

}  // namespace

void check_forest_of(const int32_t* subtree_end, int64_t num_tokens) {
  std::vector<int32_t> stack(num_tokens);
  const ForestError error = check_forest(subtree_end, num_tokens, stack.data());
  TORCH_CHECK_VALUE(error.kind != ForestError::kRange, "expected ", error.token, " < subtree_end[", error.token,
                    "] <= ", num_tokens, ", found ", subtree_end[error.token]);
  TORCH_CHECK_VALUE(error.kind != ForestError::kCrossing, "expected nested subtrees, found subtree [", error.token,
                    ", ", subtree_end[error.token], ") crossing [", error.inside, ", ", subtree_end[error.inside],
                    "): lay the forest out in preorder");
}

Parallel torch_threads() {
  const int num_threads = at::in_parallel_region() ? 1 : at::get_num_threads();
  return {num_threads, [](int count, void (*work)(void*, int), void* context) {
#ifdef _OPENMP
            at::parallel_for(0, count, 1, [&](int64_t begin, int64_t end) {
              for (int64_t thread = begin; thread < end; ++thread) work(context, int(thread));
            });
#else  // parallel_for would run on this thread alone: torch's workers belong to an OpenMP that this compiler has not
            std::vector<std::thread> others;
            for (int thread = 1; thread < count; ++thread) others.emplace_back(work, context, thread);
            work(context, 0);
            for (std::thread& other : others) other.join();
#endif
          }};
}

std::tuple<Tensor, Tensor> tree_attention_forward(const Tensor& q, const Tensor& k, const Tensor& v,
                                                  const Tensor& subtree_end, const OptionalTensor& query_index,
                                                  double scale) {
  const Call call = check(q, k, v, subtree_end, query_index, scale);
  Tensor out = at::empty(q.sizes(), q.options());
  Tensor lse = at::empty({q.size(0), q.size(1)}, q.options().dtype(at::kFloat));
  if (out.numel() == 0) return {out, lse.fill_(0)};
  const AttentionForward forward{call.args, out.mutable_data_ptr(), lse.mutable_data_ptr<float>()};
  const Parallel parallel = torch_threads();
  const Workspace workspace = take_workspace(kernels().forward_workspace(forward, parallel.num_threads));
  kernels().forward(forward, parallel, workspace.begin);
  return {out, lse};
}

std::tuple<Tensor, Tensor, Tensor> tree_attention_backward(const Tensor& grad_out, const Tensor& q, const Tensor& k,
                                                           const Tensor& v, const Tensor& subtree_end,
                                                           const OptionalTensor& query_index, const Tensor& out,
                                                           const Tensor& lse, double scale) {
  const Call call = check(q, k, v, subtree_end, query_index, scale);
  check_dense(grad_out, "grad_out", q, q.sizes());
  check_dense(out, "out", q, q.sizes());
  TORCH_CHECK_VALUE(lse.device().is_cpu() && lse.scalar_type() == at::kFloat && lse.is_contiguous() &&
                        lse.sizes() == q.sizes().slice(0, 2),
                    "expected lse as float32 ", q.sizes().slice(0, 2), " on the cpu without gaps, found ",
                    lse.scalar_type(), " ", lse.sizes());
  Tensor grad_q = at::empty(q.sizes(), q.options());
  Tensor grad_k = at::empty(k.sizes(), k.options());
  Tensor grad_v = at::empty(v.sizes(), v.options());
  if (q.numel() == 0) return {grad_q, grad_k.zero_(), grad_v.zero_()};
  const HeldRows held_grad = hold(grad_out), held_out = hold(out);
  const AttentionBackward backward{call.args,
                                   held_grad.rows,
                                   held_out.rows,
                                   lse.const_data_ptr<float>(),
                                   grad_q.mutable_data_ptr(),
                                   grad_k.mutable_data_ptr(),
                                   grad_v.mutable_data_ptr()};
  const Parallel parallel = torch_threads();
  const Workspace workspace = take_workspace(kernels().backward_workspace(backward, parallel.num_threads));
  kernels().backward(backward, parallel, workspace.begin);
  return {grad_q, grad_k, grad_v};
}

}  // namespace trace_megatron
