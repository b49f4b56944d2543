"""Scores as tensors: the plan that NumPy's scores give, allocated where the scores are."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from trace_megatron import ops
from trace_megatron.algorithm.allocate import allocate_prefixes, allocate_roots
from trace_megatron.algorithm.contrast import repeat_prob
from trace_megatron.algorithm.scores import as_scores, like, to_host
from trace_megatron.algorithm.selectors.base import PrefixView, root_view
from trace_megatron.algorithm.selectors.pcl import PCLSelector
from trace_megatron.algorithm.selectors.trace import TraceSelector
from trace_megatron.config import BudgetConfig
from trace_megatron.types import Anchor, Prompt, Task

NUM_PROMPTS = 24


def prompts():
    return [Prompt(f"p{i}", Task(f"p{i}", (), {}), (1, 2)) for i in range(NUM_PROMPTS)]


def prefix_view_of(probs, rewards):
    anchors = tuple(Anchor(0, turn + 1) for turn in range(len(rewards)))
    return PrefixView(anchors, probs, rewards, np.arange(len(rewards), 0, -1.0))


@pytest.mark.parametrize("options", [{}, {"cost": "tokens"}])
@pytest.mark.parametrize("exact", [True, False])
def test_trace_plans_alike(options, exact):
    budget = BudgetConfig(candidates=NUM_PROMPTS, rollouts=40, continuations=4, exact=exact)
    selector = TraceSelector(budget, options)
    for seed in range(20):
        rng = np.random.default_rng(seed)
        probs = np.round(rng.random(NUM_PROMPTS), int(rng.integers(1, 9)))  # ties, zeros and ones among them
        rewards = rng.integers(0, 2, NUM_PROMPTS).astype(np.float64)
        plans = [
            (
                selector.select_roots(root_view(prompts(), scores), 40, np.random.default_rng(seed)),
                selector.select_prefixes(prefix_view_of(scores, rewards), 30, np.random.default_rng(seed)),
            )
            for scores in (probs, torch.from_numpy(probs))
        ]
        for one, other in zip(*plans, strict=True):
            assert isinstance(other, np.ndarray) and one.tolist() == other.tolist()


def test_tensors_go_to_the_ops_as_they_are(monkeypatch):
    seen = []
    roots, prefixes = ops.allocate_roots, ops.allocate_prefixes
    monkeypatch.setattr(ops, "allocate_roots", lambda *a, **k: seen.append(a) or roots(*a, **k))
    monkeypatch.setattr(ops, "allocate_prefixes", lambda *a, **k: seen.append(a) or prefixes(*a, **k))
    probs = torch.tensor([0.5, 0.25, 0.125], dtype=torch.float64)
    allocate_roots(probs, 6)
    allocate_prefixes(probs, 4)
    assert [args[0] is probs and args[1].device == probs.device for args in seen] == [True, True]


def test_what_a_gpu_could_not_allocate_raises(monkeypatch):
    monkeypatch.setattr(ops, "allocate_roots", lambda probs, *_, **__: torch.full(probs.shape, -1))
    with pytest.raises(ValueError, match="allocated on the GPU"):
        allocate_roots(torch.tensor([0.5, 2.0]), 4)


def test_wrong_budgets_of_tensors_are_refused():
    with pytest.raises(ValueError, match="found 1: a prompt gets none or at least two"):
        allocate_roots(torch.tensor([0.5, 0.5]), 1)
    with pytest.raises(ValueError, match="expected budget as a whole number from 0 on, found -1"):
        allocate_prefixes(torch.tensor([0.5]), -1)


def test_other_selectors_read_tensors_too():
    selector = PCLSelector(BudgetConfig(candidates=NUM_PROMPTS, rollouts=16, continuations=0), {"group_size": 4})
    probs = np.random.default_rng(1).random(NUM_PROMPTS)
    plans = [
        selector.select_roots(root_view(prompts(), scores), 16, np.random.default_rng(1))
        for scores in (probs, torch.from_numpy(probs))
    ]
    assert plans[0].tolist() == plans[1].tolist()


def test_repeat_prob_and_conversions():
    rewards, probs = np.array([0.0, 1.0, 0.5]), np.array([0.25, 0.25, 0.75])
    tensor = repeat_prob(rewards, torch.from_numpy(probs))
    assert isinstance(tensor, torch.Tensor) and np.array_equal(tensor.numpy(), repeat_prob(rewards, probs))
    assert isinstance(as_scores(tensor), np.ndarray) and to_host(probs) is probs and like(probs, rewards) is probs
    with pytest.raises(ValueError, match="expected 24 success probabilities"):
        root_view(prompts(), torch.zeros(3))
