"""Advantages of trees worked out by hand, and what must hold for any tree."""

from __future__ import annotations

import dataclasses
import math
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trace_megatron.algorithm.advantage import tree_advantages
from trace_megatron.algorithm.tree import build_structure
from trace_megatron.config import MethodConfig
from trace_megatron.types import ROOT, Anchor

from .trees import outcome_tree, random_tree

EPS = 1e-6


def example():
    """Nodes: 1-3 the turns of bare 0 (fails), 4-5 of bare 1 and 6-7 of a continuation of (0, 1), which succeed."""
    return outcome_tree((ROOT, 3, 0.0), (ROOT, 2, 1.0), (Anchor(0, 1), 2, 1.0))


def test_grpo_by_hand():
    """Rewards 0, 1, 1: mean 2/3, sample std sqrt(1/3)."""
    advantages = tree_advantages(example(), MethodConfig(advantage="grpo"))
    low, high = -2 / 3 / (math.sqrt(1 / 3) + EPS), 1 / 3 / (math.sqrt(1 / 3) + EPS)
    np.testing.assert_allclose(
        advantages,
        [[0, low, low, low, 0, 0, 0, 0], [0, 0, 0, 0, high, high, 0, 0], [0, high, 0, 0, 0, 0, high, high]],
        rtol=1e-14,
    )


@pytest.mark.parametrize(
    ("normalizer", "at_root", "at_fork"),
    [
        ("none", 1 / 4, 1 / 2),
        ("std", 1 / 4 / (math.sqrt(1 / 8) + EPS), 1 / 2 / (math.sqrt(1 / 2) + EPS)),
        ("bernoulli", 1 / 4 / (math.sqrt(3 / 16) + EPS), 1 / 2 / (1 / 2 + EPS)),
    ],
)
def test_tree_rpo_by_hand(normalizer, at_root, at_fork):
    """Siblings 1 and 4 are worth 1/2 and 1; siblings 2 and 6 are worth 0 and 1; chains carry on to their ends."""
    advantages = tree_advantages(example(), MethodConfig(advantage="tree_rpo", normalizer=normalizer))
    np.testing.assert_allclose(
        advantages,
        [
            [0, -at_root, -at_fork, -at_fork, 0, 0, 0, 0],
            [0, 0, 0, 0, at_root, at_root, 0, 0],
            [0, -at_root, 0, 0, 0, 0, at_fork, at_fork],
        ],
        rtol=1e-14,
    )


def test_tree_rpo_ignores_branches_without_a_known_outcome():
    """The untrained sibling leaves a chain behind, which merges with what follows."""
    tree = outcome_tree((ROOT, 3, 0.0), (Anchor(0, 1), 2, 1.0, False), (ROOT, 1, 1.0))
    advantages = tree_advantages(tree, MethodConfig(advantage="tree_rpo", normalizer="none"))
    np.testing.assert_array_equal(advantages, [[0, -0.5, -0.5, -0.5, 0, 0, 0], [0, 0, 0, 0, 0, 0, 0.5]])


@pytest.mark.parametrize(("singleton", "lone"), [("zero", 0.0), ("reward", 1.0)])
def test_tree_grpo_by_hand(singleton, lone):
    """Prompt term as GRPO; trees {0, continuation} with rewards 0, 1 and {1}, a singleton with reward 1."""
    advantages = tree_advantages(example(), MethodConfig(advantage="tree_grpo", singleton=singleton))
    std, pair = math.sqrt(1 / 3) + EPS, 1 / 2 / (math.sqrt(1 / 2) + EPS)
    low, high, other = -2 / 3 / std - pair, 1 / 3 / std + lone, 1 / 3 / std + pair
    np.testing.assert_allclose(
        advantages,
        [[0, low, low, low, 0, 0, 0, 0], [0, 0, 0, 0, high, high, 0, 0], [0, other, 0, 0, 0, 0, other, other]],
        rtol=1e-14,
    )


def test_equal_means_of_unequal_shapes_give_exactly_zero():
    """mean(0.1, 0.1, 0.1) is 0.10000000000000002 in floats; as an advantage it must be 0, not rounding over eps."""
    tree = outcome_tree((ROOT, 2, 0.1), (Anchor(0, 1), 1, 0.1), (Anchor(0, 1), 1, 0.1), (ROOT, 1, 0.1))
    mixed = outcome_tree((ROOT, 2, 0.0), (Anchor(0, 1), 1, 1.0), (ROOT, 1, 0.5))
    for normalizer in ("std", "bernoulli", "none"):
        config = MethodConfig(advantage="tree_rpo", normalizer=normalizer)
        assert not tree_advantages(tree, config).any()
        assert not tree_advantages(mixed, config)[:, [1, 4]].any()  # nodes worth 1/2 and 1/2


def test_unknown_names_are_named():
    with pytest.raises(ValueError, match="tree_rpo"):
        tree_advantages(example(), dataclasses.replace(MethodConfig(), advantage="rloo"))
    with pytest.raises(ValueError, match="bernoulli"):
        tree_advantages(example(), dataclasses.replace(MethodConfig(), normalizer="max"))


def relabelled(tree, rng):
    """The same tree with its rollouts in another order that keeps parents first; and where each one went."""
    order: list[int] = []
    waiting = list(range(len(tree.rollouts)))
    while waiting:
        ready = [j for j in waiting if tree.rollouts[j].anchor == ROOT or tree.rollouts[j].anchor.rollout in order]
        order.append(rng.choice(ready))
        waiting.remove(order[-1])
    place = {old: new for new, old in enumerate(order)}
    rollouts = []
    for old in order:
        anchor = tree.rollouts[old].anchor
        if anchor != ROOT:
            anchor = Anchor(place[anchor.rollout], anchor.turn)
        rollouts.append(dataclasses.replace(tree.rollouts[old], anchor=anchor))
    return dataclasses.replace(tree, rollouts=tuple(rollouts)), place


def by_path(tree, advantages):
    """{rollout: advantages along its path}."""
    s = build_structure(tree)
    return {leaf: row[list(path)] for leaf, path, row in zip(s.leaves, s.paths, advantages, strict=True)}


METHODS = [
    MethodConfig(advantage=a, normalizer=n, singleton=s)
    for a in ("grpo", "tree_rpo", "tree_grpo")
    for n in ("std", "bernoulli", "none")
    for s in (("zero", "reward") if a == "tree_grpo" else ("zero",))
]


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 2**32),
    st.lists(st.sampled_from([0.0, 1.0, 0.5, 0.1, 1 - 2**-53, 5e-324, 1 / 3]), min_size=1, max_size=3),
)
def test_properties(seed, rewards):
    rng = random.Random(seed)
    tree = random_tree(rng, rewards=rewards)
    s = build_structure(tree)
    known = [tree.rollouts[leaf].reward for leaf in s.leaves]
    other, place = relabelled(tree, rng)
    for method in METHODS:
        advantages = tree_advantages(tree, method)
        assert advantages.shape == (len(s.leaves), s.num_nodes) and np.isfinite(advantages).all()
        for path, row in zip(s.paths, advantages, strict=True):
            off = np.ones(s.num_nodes, dtype=bool)
            off[list(path[1:])] = False
            assert not row[off].any()
        if len(set(known)) <= 1 and method.singleton == "zero":
            assert not advantages.any()
        after = by_path(other, tree_advantages(other, method))
        for leaf, row in by_path(tree, advantages).items():
            np.testing.assert_array_equal(row, after[place[leaf]])  # exactly: means and sums do not depend on order
        assert_groups_sum_to_zero(s, advantages, method)


def assert_groups_sum_to_zero(s, advantages, method):
    if method.advantage == "tree_rpo":
        by_node = np.zeros(s.num_nodes)
        for path, row in zip(s.paths, advantages, strict=True):
            by_node[list(path)] = row[list(path)]
        for children in s.children:
            group = [child for child in children if s.num_leaves[child]]
            if len(group) > 1:
                assert abs(by_node[group].sum()) < 1e-9
    elif method.singleton == "zero":
        assert abs(sum(row[path[-1]] for path, row in zip(s.paths, advantages, strict=True))) < 1e-9
