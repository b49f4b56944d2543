"""Scores of a predictor: NumPy's on a CPU, a tensor on the GPU that computed them, where the allocators then run."""

from __future__ import annotations

import numpy as np
import torch

Scores = np.ndarray | torch.Tensor
"""float64."""


def as_scores(tensor: torch.Tensor) -> Scores:
    """``tensor`` where it is, without a copy."""
    return tensor.numpy() if tensor.device.type == "cpu" else tensor


def to_host(scores: Scores) -> np.ndarray:
    """A copy from a GPU waits for it: between scores and plan nobody asks for one."""
    return scores.cpu().numpy() if isinstance(scores, torch.Tensor) else scores


def like(values: np.ndarray, scores: Scores) -> Scores:
    """``values`` where ``scores`` are."""
    return torch.from_numpy(values).to(scores.device) if isinstance(scores, torch.Tensor) else values
