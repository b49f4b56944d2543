"""The value head in torch: any device, any float dtype."""

from __future__ import annotations

import torch


def value_head(
    hidden: torch.Tensor,
    index: torch.Tensor,
    norm_weight: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    eps: float,
) -> torch.Tensor:
    """As ``ops.value_head``."""
    dtype = torch.promote_types(hidden.dtype, torch.float32)
    rows = hidden[index].to(dtype)
    normed = rows * torch.rsqrt(rows.square().mean(-1, keepdim=True) + eps) * norm_weight.to(dtype)
    logits = normed @ weight.to(dtype)
    return torch.sigmoid(logits if bias is None else logits + bias.to(dtype))
