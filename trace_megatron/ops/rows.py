"""What training does to one row after another: softmax over a vocabulary, RMSNorm, SwiGLU.

Each native op reads a row once or twice and keeps no float32 copy of it; torch's own, on a CPU, are up to eight passes
over the whole tensor. E edges, V vocabulary rows of this rank.
"""

from __future__ import annotations

import torch

from trace_megatron.ops import native
from trace_megatron.ops.reference import rows as reference

_NATIVE_DTYPES = (torch.float32, torch.bfloat16)


def softmax_statistics(logits: torch.Tensor, labels: torch.Tensor, scale: float) -> torch.Tensor:
    """Of every row x = scale * logits: max x, sum exp(x - max), sum exp(x - max) (x - max), x[label].

    logits [E, V]; labels [E] int64, one outside [0, V) gives 0. Returns [4, E] float32 (float64 of float64), for V = 0
    the lowest float32 and zeros. Not differentiable.
    """
    if _is_native("softmax_statistics", logits):
        return torch.ops.trace_megatron.softmax_statistics(logits, labels, scale)
    return reference.softmax_statistics(logits, labels, scale)


def softmax_gradient(
    logits: torch.Tensor, labels: torch.Tensor, log_normalizers: torch.Tensor, slopes: torch.Tensor, scale: float
) -> torch.Tensor:
    """slope * (one-hot of the label - exp(scale * logits - log_normalizer)) for every row, in the dtype of ``logits``.

    Shapes and labels as in ``softmax_statistics``; log_normalizers and slopes [E] in its result's dtype. ``logits`` is
    used up: the result may lie in its memory.
    """
    if _is_native("softmax_gradient_", logits):
        torch.ops.trace_megatron.softmax_gradient_(logits, labels, log_normalizers, slopes, scale)
        return logits
    return reference.softmax_gradient(logits, labels, log_normalizers, slopes, scale)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x / sqrt(mean of x^2 + eps) * weight over the last dimension, [..., C], computed in float32; differentiable."""
    if _is_native("rms_norm_forward", x) and weight.dtype == x.dtype:
        return torch.ops.trace_megatron.rms_norm_forward(x.contiguous(), weight, eps)[0]
    return reference.rms_norm(x, weight, eps)


def swiglu(x: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up, [..., F], of gate and up side by side in x [..., 2 F]; differentiable."""
    if _is_native("swiglu_forward", x):
        return torch.ops.trace_megatron.swiglu_forward(x.contiguous())
    return reference.swiglu(x)


def _is_native(op: str, x: torch.Tensor) -> bool:
    return x.device.type == "cpu" and x.dtype in _NATIVE_DTYPES and native.has(op, x.device)


def _fake_rms_norm(x, weight, eps):
    return torch.empty_like(x), x.new_empty(x.shape[:-1], dtype=torch.float32)


def _setup_rms_norm(ctx, inputs, output):
    x, weight, _ = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(x, weight, output[1])


def _backward_rms_norm(ctx, grad, _):
    return *torch.ops.trace_megatron.rms_norm_backward(grad.contiguous(), *ctx.saved_tensors), None


def _fake_swiglu(x):
    return x.new_empty(*x.shape[:-1], x.shape[-1] // 2)


def _setup_swiglu(ctx, inputs, output):
    ctx.save_for_backward(inputs[0])


def _backward_swiglu(ctx, grad):
    return torch.ops.trace_megatron.swiglu_backward(grad.contiguous(), *ctx.saved_tensors)


if native.AVAILABLE:
    torch.library.register_fake("trace_megatron::rms_norm_forward", _fake_rms_norm)
    torch.library.register_autograd(
        "trace_megatron::rms_norm_forward", _backward_rms_norm, setup_context=_setup_rms_norm
    )
    torch.library.register_fake("trace_megatron::swiglu_forward", _fake_swiglu)
    torch.library.register_autograd("trace_megatron::swiglu_forward", _backward_swiglu, setup_context=_setup_swiglu)
