"""Success probabilities from hidden states, at the anchors only. Legend: T tokens, C channels, A anchors."""

from __future__ import annotations

import torch

from trace_megatron.ops import native
from trace_megatron.ops.reference import value_head as reference


def value_head(
    hidden: torch.Tensor,
    index: torch.Tensor,
    norm_weight: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    eps: float = 1e-6,
) -> torch.Tensor:
    """RMSNorm, one linear unit and a sigmoid at rows ``index`` of ``hidden``, computed in float32: [A] float32.

    hidden [T, C] float32 or bfloat16, before the final norm; index [A] int64, repeats allowed; norm_weight [C], weight
    [C], bias [1] or None. Differentiable in all but ``index``. Raises ValueError on wrong shapes or rows; a GPU is not
    waited for, there a row that is none gives NaN.
    """
    if native.has("value_head_forward", hidden.device) and hidden.dtype in (torch.float32, torch.bfloat16):
        return torch.ops.trace_megatron.value_head_forward(hidden, index, norm_weight, weight, bias, eps)
    return reference.value_head(hidden, index, norm_weight, weight, bias, eps)


def _fake_forward(hidden, index, norm_weight, weight, bias, eps):
    return index.new_empty(index.shape, dtype=torch.float32)


def _fake_backward(grad_probs, probs, hidden, index, norm_weight, weight, bias, eps):
    contiguous = {"memory_format": torch.contiguous_format}
    grads = (torch.empty_like(x, **contiguous) for x in (hidden, norm_weight, weight))
    return *grads, probs.new_empty(1)


def _setup_context(ctx, inputs, output):
    hidden, index, norm_weight, weight, bias, eps = inputs
    ctx.save_for_backward(output, hidden, index, norm_weight, weight, bias)
    ctx.eps = eps


def _backward(ctx, grad_probs):
    probs, hidden, index, norm_weight, weight, bias = ctx.saved_tensors
    grad_hidden, grad_norm_weight, grad_weight, grad_bias = torch.ops.trace_megatron.value_head_backward(
        grad_probs, probs, hidden, index, norm_weight, weight, bias, ctx.eps
    )
    grad_bias = None if bias is None else grad_bias.to(bias.dtype).reshape(bias.shape)
    return grad_hidden, None, grad_norm_weight, grad_weight, grad_bias, None


if native.AVAILABLE:
    torch.library.register_fake("trace_megatron::value_head_forward", _fake_forward)
    torch.library.register_fake("trace_megatron::value_head_backward", _fake_backward)
    torch.library.register_autograd("trace_megatron::value_head_forward", _backward, setup_context=_setup_context)
