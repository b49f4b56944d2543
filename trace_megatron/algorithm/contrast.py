"""The two chances that make a rollout worth its price. Vectorised, float64."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import ArrayLike

from trace_megatron.algorithm.scores import Scores, like


def mixed_prob(success_prob: ArrayLike, num_rollouts: ArrayLike) -> np.ndarray:
    """Chance f(m; v) = 1 - v^m - (1 - v)^m that m fresh rollouts hold a success and a failure; f(0) = f(1) = 0.

    Arrays broadcast. Accurate relative to f also where v is near 0 or 1. Raises ValueError unless v lies in [0, 1] and
    m in 0, 1, 2, ... arXiv 2606.11119, stage 1.
    """
    v = checked_probs("success_prob", success_prob)
    m = _checked_counts("num_rollouts", num_rollouts)
    u = np.minimum(v, 1.0 - v)
    exact = -np.expm1(m * np.log1p(-u)) - u**m
    return np.where(m < 2, 0.0, exact)[()]


def flip_prob(repeat_prob: ArrayLike, num_continuations: ArrayLike) -> np.ndarray:
    """Chance g(k; q) = 1 - q^k that at least one of k continuations ends other than the factual rollout did.

    Arrays broadcast. Raises ValueError unless q lies in [0, 1] and k in 0, 1, 2, ... arXiv 2606.11119, stage 2.
    """
    q = checked_probs("repeat_prob", repeat_prob)
    k = _checked_counts("num_continuations", num_continuations)
    with np.errstate(divide="ignore", invalid="ignore"):
        flipped = np.where(q > 0.5, -np.expm1(k * np.log1p(q - 1.0)), 1.0 - q**k)
    return (flipped + 0.0)[()]  # no negative zero


def repeat_prob(reward: ArrayLike, success_prob: ArrayLike | Scores) -> Scores:
    """Chance q = r V + (1 - r) (1 - V) that a fresh continuation repeats the factual ending of reward r.

    Arrays broadcast. Raises ValueError unless both lie in [0, 1]; of scores on a GPU only their allocator can see it.
    arXiv 2606.11119, stage 2.
    """
    r = checked_probs("reward", reward)
    if isinstance(success_prob, torch.Tensor):
        r = like(r, success_prob)
        return r * success_prob + (1.0 - r) * (1.0 - success_prob)
    v = checked_probs("success_prob", success_prob)
    return r * v + (1.0 - r) * (1.0 - v)


def checked_probs(name: str, values: ArrayLike) -> np.ndarray:
    """``values`` as float64. Raises ValueError unless all of them lie in [0, 1]."""
    array = np.asarray(values, dtype=np.float64)
    bad = ~((array >= 0.0) & (array <= 1.0))
    if bad.any():
        raise ValueError(f"expected {name} in [0, 1], found {array[bad].flat[0]}")
    return array


def _checked_counts(name: str, values: ArrayLike) -> np.ndarray:
    array = np.asarray(values)
    if (array < 0).any() or (array != np.floor(array)).any():
        raise ValueError(f"expected {name} as whole numbers from 0 on, found {values}")
    return array.astype(np.float64)
