"""Softmax over a vocabulary, RMSNorm and SwiGLU in torch: any device, any float dtype."""

from __future__ import annotations

import torch


def softmax_statistics(logits: torch.Tensor, labels: torch.Tensor, scale: float) -> torch.Tensor:
    """As ``ops.softmax_statistics``."""
    values = logits.to(torch.promote_types(logits.dtype, torch.float32)) * scale
    size = values.size(1)
    if not size:
        found = values.new_zeros(4, values.size(0))
        found[0] = torch.finfo(torch.float32).min  # finite: it is multiplied by 0 where shards are added up
        return found
    highest = values.amax(1)
    owned = (labels >= 0) & (labels < size)
    label = values.gather(1, labels.clamp(0, size - 1)[:, None])[:, 0] * owned
    values -= highest[:, None]
    exponentials = values.exp()
    return torch.stack((highest, exponentials.sum(1), (exponentials * values).sum(1), label))


def softmax_gradient(
    logits: torch.Tensor, labels: torch.Tensor, log_normalizers: torch.Tensor, slopes: torch.Tensor, scale: float
) -> torch.Tensor:
    """As ``ops.softmax_gradient``."""
    values = logits.to(log_normalizers.dtype).mul(scale)
    size = values.size(1)
    grads = values.sub_(log_normalizers[:, None]).exp_().mul_(-slopes[:, None])
    if size:
        owned = (labels >= 0) & (labels < size)
        grads.scatter_add_(1, labels.clamp(0, size - 1)[:, None], (slopes * owned)[:, None])
    return grads.to(logits.dtype)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """As ``ops.rms_norm``."""
    return torch.nn.functional.rms_norm(x, weight.shape, weight, eps)


def swiglu(x: torch.Tensor) -> torch.Tensor:
    """As ``ops.swiglu``."""
    gate, up = x.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate) * up
