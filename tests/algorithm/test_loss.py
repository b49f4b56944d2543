"""The two-mass loss against PPO written leaf by leaf, in value and gradient."""

from __future__ import annotations

import pytest
import torch

from trace_megatron.algorithm.loss import clipped_edges, k3_kl, tree_policy_loss

LOW, HIGH = 0.2, 0.28


def one_leaf(ratio, advantage, dual_clip):
    """PPO's clipped surrogate, negated; with the dual clip's bound on negative advantages."""
    clipped = torch.clamp(ratio, 1 - LOW, 1 + HIGH)
    gain = torch.minimum(ratio * advantage, clipped * advantage)
    if dual_clip and advantage < 0:
        gain = torch.maximum(gain, dual_clip * advantage)
    return -gain


@pytest.mark.parametrize("dual_clip", [0.0, 2.0])
def test_equals_the_sum_over_leaves(dual_clip):
    generator = torch.Generator().manual_seed(0)
    num_edges, num_leaves = 40, 5
    logprobs = torch.randn(num_edges, generator=generator, dtype=torch.float64).requires_grad_()
    old = logprobs.detach() - torch.linspace(-1.5, 1.5, num_edges, dtype=torch.float64)
    advantages = torch.randn(num_leaves, num_edges, generator=generator, dtype=torch.float64)
    weights = torch.rand(num_leaves, generator=generator, dtype=torch.float64)
    positive = (weights[:, None] * advantages.clamp(min=0)).sum(0)
    negative = (weights[:, None] * (-advantages).clamp(min=0)).sum(0)
    loss = tree_policy_loss(logprobs, old, positive, negative, LOW, HIGH, dual_clip)
    ratio = torch.exp(logprobs - old)
    expected = torch.stack(
        [
            sum(weights[leaf] * one_leaf(ratio[edge], advantages[leaf, edge], dual_clip) for leaf in range(num_leaves))
            for edge in range(num_edges)
        ]
    )
    torch.testing.assert_close(loss, expected, rtol=0, atol=1e-13)
    (gradient,) = torch.autograd.grad(loss.sum(), logprobs)
    (wanted,) = torch.autograd.grad(expected.sum(), logprobs)
    torch.testing.assert_close(gradient, wanted, rtol=0, atol=1e-13)
    unclipped = (negative - positive) * ratio.detach()
    clipped = clipped_edges(logprobs.detach(), old, positive, negative, LOW, HIGH, dual_clip)
    assert torch.equal(clipped, (gradient - unclipped).abs() > 1e-12)
    assert 0 < clipped.sum() < num_edges


def test_one_net_advantage_would_be_wrong():
    """+1 and -1 of equal weight cancel, yet above the upper bound only the negative one still has a slope."""
    logprobs = torch.tensor([0.5], dtype=torch.float64, requires_grad=True)
    one = torch.ones(1, dtype=torch.float64)
    tree_policy_loss(logprobs, torch.zeros(1, dtype=torch.float64), one, one, LOW, HIGH).sum().backward()
    assert logprobs.grad.item() == pytest.approx(torch.exp(torch.tensor(0.5)).item())


@pytest.mark.parametrize("gap", [-1e4, 1e4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_absurd_ratios_stay_finite(gap, dtype):
    logprobs = torch.tensor([gap], dtype=dtype, requires_grad=True)
    zero, one = torch.zeros(1, dtype=dtype), torch.ones(1, dtype=dtype)
    loss = tree_policy_loss(logprobs, zero, one, one, LOW, HIGH) + k3_kl(logprobs, zero)
    loss.sum().backward()
    assert torch.isfinite(loss).all() and torch.isfinite(logprobs.grad).all()


def test_k3_estimates_the_divergence():
    """Its mean under p is KL(p || other) for a categorical pair, and it is never negative."""
    generator = torch.Generator().manual_seed(1)
    p, other = torch.log_softmax(torch.randn(2, 7, generator=generator, dtype=torch.float64), -1)
    k3 = k3_kl(p, other)
    assert (k3 >= 0).all() and torch.equal(k3_kl(p, p), torch.zeros_like(p))
    torch.testing.assert_close((p.exp() * k3).sum(), (p.exp() * (p - other)).sum())


def test_dual_clip_must_leave_room():
    zero = torch.zeros(1)
    for call in (tree_policy_loss, clipped_edges):
        with pytest.raises(ValueError, match="above 1"):
            call(zero, zero, zero, zero, LOW, HIGH, 0.9)
