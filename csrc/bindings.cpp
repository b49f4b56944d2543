// The list of the ops. Importing the module registers them as torch.ops.trace_megatron.*.
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
}

TORCH_LIBRARY_IMPL(trace_megatron, CPU, m) {
  m.impl("tree_attention_forward", &trace_megatron::tree_attention_forward);
  m.impl("tree_attention_backward", &trace_megatron::tree_attention_backward);
}

PyMODINIT_FUNC PyInit__native() {
  static PyModuleDef module = {PyModuleDef_HEAD_INIT, "_native", nullptr, -1, nullptr, nullptr, nullptr, nullptr, nullptr};
  return PyModule_Create(&module);
}
