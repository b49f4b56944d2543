"""Tree attention: native for float32 and bfloat16 on a CPU, FlexAttention on CUDA, else the torch reference."""

from __future__ import annotations

import torch

from trace_megatron.ops import flex, native
from trace_megatron.ops.reference import tree_attention as reference

_NATIVE_DTYPES = (torch.float32, torch.bfloat16)


def tree_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    subtree_end: torch.Tensor,
    scale: float,
    query_index: torch.Tensor | None = None,
) -> torch.Tensor:
    """Softmax attention in which a query at position i sees key j if and only if ``j <= i < subtree_end[j]``.

    q [Q, H, D], k [T, G, D], v [T, G, D] of one float dtype, H a multiple of G; subtree_end [T] int32; query_index [Q]
    int32, increasing positions of the queries among the keys (None: Q = T, all of them); scores are multiplied by
    ``scale``. Returns [Q, H, D], differentiable in q, k and v. Sums are float32 (float64 of float64), memory is O(T),
    keys that no query of a block sees are skipped. Raises ValueError on wrong shapes and, on a CPU, where reading
    values costs no synchronisation, on a broken forest.
    """
    if native.AVAILABLE and q.device.type == "cpu" and q.dtype in _NATIVE_DTYPES:
        out, _ = torch.ops.trace_megatron.tree_attention_forward(q, k, v, subtree_end, query_index, scale)
        return out
    if q.device.type == "cuda" and q.dtype in flex.DTYPES:
        reference.check(q, k, v, subtree_end, query_index)
        return flex.tree_attention(q, k, v, subtree_end, scale, query_index)
    return reference.tree_attention(q, k, v, subtree_end, scale, query_index)


def _fake_forward(q, k, v, subtree_end, query_index, scale):
    return torch.empty_like(q, memory_format=torch.contiguous_format), q.new_empty(q.shape[:2], dtype=torch.float32)


def _fake_backward(grad_out, q, k, v, subtree_end, query_index, out, lse, scale):
    return tuple(torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))


def _setup_context(ctx, inputs, output):
    q, k, v, subtree_end, query_index, scale = inputs
    out, lse = output
    ctx.mark_non_differentiable(lse)
    ctx.save_for_backward(q, k, v, subtree_end, query_index, out, lse)
    ctx.scale = scale


def _backward(ctx, grad_out, _):
    q, k, v, subtree_end, query_index, out, lse = ctx.saved_tensors
    grads = torch.ops.trace_megatron.tree_attention_backward(
        grad_out, q, k, v, subtree_end, query_index, out, lse, ctx.scale
    )
    return *grads, None, None, None


if native.AVAILABLE:
    torch.library.register_fake("trace_megatron::tree_attention_forward", _fake_forward)
    torch.library.register_fake("trace_megatron::tree_attention_backward", _fake_backward)
    torch.library.register_autograd("trace_megatron::tree_attention_forward", _backward, setup_context=_setup_context)
