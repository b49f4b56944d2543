"""The clipped policy loss of a packed tree, per edge. Pure functions; any float dtype; E trained edges of a pack.

An edge is a predicted token. Several leaves share it, and clipping is not linear in the advantage, so an edge carries
two masses: P, the sum of weight * max(A, 0), and N, the sum of weight * max(-A, 0), over the leaves through it.
With them the sum over packed edges equals the sum over unpacked tokens exactly.
"""

from __future__ import annotations

import torch

_MAX_LOG_RATIO = 20.0  # exp stays finite, so that a clipped edge has gradient 0 and not 0 * inf


def policy_ratio(logprobs: torch.Tensor, old_logprobs: torch.Tensor) -> torch.Tensor:
    """pi / pi_old per edge [E]."""
    return torch.exp(torch.clamp(logprobs - old_logprobs, -_MAX_LOG_RATIO, _MAX_LOG_RATIO))


def tree_policy_loss(
    logprobs: torch.Tensor,
    old_logprobs: torch.Tensor,
    positive_mass: torch.Tensor,
    negative_mass: torch.Tensor,
    clip_low: float,
    clip_high: float,
    dual_clip: float = 0.0,
) -> torch.Tensor:
    """Clipped loss per edge; its sum is the loss. All tensors [E]; ``dual_clip`` is the bound c, 0 for none.

    loss = -P min(rho, 1 + clip_high) + N min(max(rho, 1 - clip_low), c). PPO: arXiv 1707.06347, eq. 7; asymmetric
    bounds: arXiv 2503.14476; dual clip: arXiv 1912.09729, eq. 5. Raises ValueError for 0 < dual_clip <= 1.
    """
    upper = _dual_bound(dual_clip)
    ratio = policy_ratio(logprobs, old_logprobs)
    gain = positive_mass * torch.clamp(ratio, max=1.0 + clip_high)
    return negative_mass * torch.clamp(ratio, min=1.0 - clip_low, max=upper) - gain


def clipped_edges(
    logprobs: torch.Tensor,
    old_logprobs: torch.Tensor,
    positive_mass: torch.Tensor,
    negative_mass: torch.Tensor,
    clip_low: float,
    clip_high: float,
    dual_clip: float = 0.0,
) -> torch.Tensor:
    """[E] bool: edges where a bound takes away the gradient of a mass that is not zero."""
    upper = _dual_bound(dual_clip)
    ratio = policy_ratio(logprobs, old_logprobs)
    clipped = (positive_mass > 0) & (ratio > 1.0 + clip_high)
    lost = ratio < 1.0 - clip_low
    if upper is not None:
        lost = lost | (ratio > upper)
    return clipped | ((negative_mass > 0) & lost)


def k3_kl(logprobs: torch.Tensor, other_logprobs: torch.Tensor) -> torch.Tensor:
    """The k3 estimate [E] of KL(p || other) at tokens sampled from p: exp(d) - d - 1, d = log other - log p; >= 0.

    http://joschu.net/blog/kl-approx.html; as a loss term multiply by the edge's weight and the coefficient.
    """
    difference = torch.clamp(other_logprobs - logprobs, -_MAX_LOG_RATIO, _MAX_LOG_RATIO)
    return torch.expm1(difference) - difference


def _dual_bound(dual_clip: float) -> float | None:
    if dual_clip == 0.0:
        return None
    if dual_clip <= 1.0:
        raise ValueError(f"expected dual_clip above 1, or 0 for none, found {dual_clip}")
    return dual_clip
