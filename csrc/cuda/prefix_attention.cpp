#include "../kernels/prefix_attention.h"

#include <ATen/ops/empty.h>

#include "check.h"
#include "ops.h"

namespace trace_megatron::cuda {
namespace {

constexpr int64_t kWidth = 8;  // values that the kernel moves at once, 16 bytes

// A tensor [tokens, heads, D] of bfloat16 whose rows of D begin on 16 bytes; tokens and heads may lie apart.
const uint16_t* checked_rows(const Tensor& x, const char* name, at::IntArrayRef sizes, at::Device device) {
  TORCH_CHECK_VALUE(x.device() == device && x.scalar_type() == at::kBFloat16 && x.sizes() == sizes, "expected ", name,
                    " as BFloat16 ", sizes, " on ", device, ", found ", x.scalar_type(), " ", x.sizes(), " on ",
                    x.device());
  const auto apart = [&](int64_t dim) { return x.size(dim) > 1 && x.stride(dim) % kWidth != 0; };
  TORCH_CHECK_VALUE(x.numel() == 0 || (x.stride(2) == 1 && !apart(0) && !apart(1)), "expected ", name,
                    " with strides of whole 16 bytes, its last dimension without gaps, found strides ", x.strides());
  const auto misplaced = reinterpret_cast<uintptr_t>(x.const_data_ptr()) % 16;
  TORCH_CHECK_VALUE(misplaced == 0, "expected ", name, " on 16 bytes, found ", misplaced, " bytes beyond");
  return static_cast<const uint16_t*>(x.const_data_ptr());
}

}  // namespace

// The lists come from ops/prefix_plan.py, which has checked their values on the CPU that made them.
Tensor prefix_attention(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& key_pages,
                        const Tensor& value_pages, const Tensor& subtree_end, const Tensor& page_table,
                        const Tensor& items, const Tensor& key_tiles, int64_t rows, double scale) {
  check_device(q, "q");
  TORCH_CHECK_VALUE(q.dim() == 3 && k.dim() == 3 && key_pages.dim() == 3 && (q.size(2) == 64 || q.size(2) == 128) &&
                        k.size(1) > 0 && q.size(1) % k.size(1) == 0,
                    "expected q [T, H, D], k [T, G, D] and key_pages [S, G, D] with D 64 or 128 and H a multiple of G, "
                    "found q ", q.sizes(), ", k ", k.sizes(), ", key_pages ", key_pages.sizes());
  TORCH_CHECK_VALUE(rows == 64 || rows == 128, "expected rows 64 or 128, found ", rows);
  TORCH_CHECK_VALUE(scale > 0.0 && scale <= std::numeric_limits<float>::max(), "expected a positive scale, found ", scale);
  const at::Device device = q.device();
  const int64_t num_tokens = q.size(0), num_groups = k.size(1), heads_per_group = q.size(1) / num_groups;
  check_at_most(num_groups, 65535, "key heads");
  check_at_most(num_tokens, (kMostInt32 - rows) / heads_per_group, "tokens");
  check_at_most(key_pages.size(0), kMostInt32, "slots");
  check_at_most(items.size(0), kMostInt32, "items");
  const c10::DeviceGuard guard(device);
  const std::vector<int64_t> new_rows = {num_tokens, num_groups, q.size(2)};
  const std::vector<int64_t> pool = {key_pages.size(0), num_groups, q.size(2)};
  PrefixAttentionParams params{};
  params.q = checked_rows(q, "q", q.sizes(), device);
  params.k = checked_rows(k, "k", new_rows, device);
  params.v = checked_rows(v, "v", new_rows, device);
  params.key_pages = checked_rows(key_pages, "key_pages", pool, device);
  params.value_pages = checked_rows(value_pages, "value_pages", pool, device);
  check_contiguous(key_pages, "key_pages");
  check_contiguous(value_pages, "value_pages");
  params.subtree_end = checked<int32_t>(subtree_end, "subtree_end", at::kInt, {num_tokens}, device);
  params.page_table = checked<int32_t>(page_table, "page_table", at::kInt, {page_table.numel()}, device);
  params.items = checked<int32_t>(items, "items", at::kInt, {items.size(0), kItemFields}, device);
  params.key_tiles = checked<int32_t>(key_tiles, "key_tiles", at::kInt, {key_tiles.numel()}, device);
  Tensor out = at::empty(q.sizes(), q.options());
  params.out = static_cast<uint16_t*>(out.mutable_data_ptr());
  params.q_token_stride = q.stride(0), params.q_head_stride = q.stride(1);
  params.k_token_stride = k.stride(0), params.k_head_stride = k.stride(1);
  params.v_token_stride = v.stride(0), params.v_head_stride = v.stride(1);
  params.slot_stride = num_groups * q.size(2);
  params.num_tokens = int(num_tokens), params.num_groups = int(num_groups);
  params.heads_per_group = int(heads_per_group), params.head_dim = int(q.size(2));
  params.num_items = int(items.size(0)), params.rows = int(rows);
  params.scale = float(scale);
  check_launch(launch_prefix_attention(&params, current_stream(device)), "prefix_attention");
  return out;
}

}  // namespace trace_megatron::cuda
