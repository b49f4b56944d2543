// The list of the ops. Importing the module registers them as torch.ops.trace_megatron.*; their Python faces, with
// shapes and meanings, are in trace_megatron/ops.
#include <Python.h>
#include <torch/library.h>

#include "api/ops.h"

TORCH_LIBRARY(trace_megatron, m) {
  m.def(
      "tree_attention_forward(Tensor q, Tensor k, Tensor v, Tensor subtree_end, Tensor? query_index, float scale)"
      " -> (Tensor out, Tensor lse)");
  m.def(
      "tree_attention_backward(Tensor grad_out, Tensor q, Tensor k, Tensor v, Tensor subtree_end, Tensor? query_index,"
      " Tensor out, Tensor lse, float scale) -> (Tensor grad_q, Tensor grad_k, Tensor grad_v)");
  m.def(
      "pack_tree(Tensor tokens, Tensor offsets, Tensor parents, Tensor? leaves)"
      " -> (Tensor tokens, Tensor position_ids, Tensor subtree_end, Tensor predecessor, Tensor last_position)");
  m.def(
      "cut_tree(Tensor offsets, Tensor parents, Tensor leaves, int tokens_per_bin, int num_ranks)"
      " -> (Tensor bin_of_leaf, Tensor rank_of_bin)");
  m.def(
      "prefix_attention(Tensor q, Tensor k, Tensor v, Tensor key_pages, Tensor value_pages, Tensor subtree_end,"
      " Tensor page_table, Tensor items, Tensor key_tiles, int rows, float scale) -> Tensor");
  m.def("tree_block_mask(Tensor subtree_end, int block_size) -> Tensor[]");
  m.def(
      "allocate_roots(Tensor success_probs, Tensor budgets, Tensor offsets, int? max_rollouts, bool exact) -> Tensor");
  m.def("allocate_prefixes(Tensor repeat_probs, Tensor budgets, Tensor offsets) -> Tensor");
  m.def("allocate_table(Tensor values, int budget, bool exact) -> Tensor");
  m.def(
      "value_head_forward(Tensor hidden, Tensor index, Tensor norm_weight, Tensor weight, Tensor? bias, float eps)"
      " -> Tensor");
  m.def(
      "value_head_backward(Tensor grad_probs, Tensor probs, Tensor hidden, Tensor index, Tensor norm_weight,"
      " Tensor weight, Tensor? bias, float eps)"
      " -> (Tensor grad_hidden, Tensor grad_norm_weight, Tensor grad_weight, Tensor grad_bias)");
  m.def("softmax_statistics(Tensor logits, Tensor labels, float scale) -> Tensor");
  m.def(
      "softmax_gradient_(Tensor(a!) logits, Tensor labels, Tensor log_normalizers, Tensor slopes, float scale) -> ()");
  m.def("rms_norm_forward(Tensor x, Tensor weight, float eps) -> (Tensor out, Tensor inverse)");
  m.def(
      "rms_norm_backward(Tensor grad, Tensor x, Tensor weight, Tensor inverse)"
      " -> (Tensor grad_x, Tensor grad_weight)");
  m.def("swiglu_forward(Tensor x) -> Tensor");
  m.def("swiglu_backward(Tensor grad, Tensor x) -> Tensor");
}

TORCH_LIBRARY_IMPL(trace_megatron, CPU, m) {
  m.impl("tree_attention_forward", &trace_megatron::tree_attention_forward);
  m.impl("tree_attention_backward", &trace_megatron::tree_attention_backward);
  m.impl("pack_tree", &trace_megatron::pack_tree);
  m.impl("cut_tree", &trace_megatron::cut_tree);
  m.impl("tree_block_mask", &trace_megatron::tree_block_mask);
  m.impl("allocate_roots", &trace_megatron::allocate_roots_op);
  m.impl("allocate_prefixes", &trace_megatron::allocate_prefixes_op);
  m.impl("allocate_table", &trace_megatron::allocate_table_op);
  m.impl("value_head_forward", &trace_megatron::value_head_forward);
  m.impl("value_head_backward", &trace_megatron::value_head_backward);
  m.impl("softmax_statistics", &trace_megatron::softmax_statistics);
  m.impl("softmax_gradient_", &trace_megatron::softmax_gradient_);
  m.impl("rms_norm_forward", &trace_megatron::rms_norm_forward);
  m.impl("rms_norm_backward", &trace_megatron::rms_norm_backward);
  m.impl("swiglu_forward", &trace_megatron::swiglu_forward);
  m.impl("swiglu_backward", &trace_megatron::swiglu_backward);
}

PyMODINIT_FUNC PyInit__native() {
  static PyModuleDef module = {
      PyModuleDef_HEAD_INIT, "_native", nullptr, -1, nullptr, nullptr, nullptr, nullptr, nullptr};
  return PyModule_Create(&module);
}
