"""Success targets of trees worked out by hand, and what must hold for any tree."""

from __future__ import annotations

import dataclasses
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trace_megatron.algorithm.targets import success_targets
from trace_megatron.algorithm.tree import build_structure
from trace_megatron.types import ROOT, Anchor

from .trees import outcome_tree, random_tree

MODES = ["leaf_mean", "bare_mean", "path_uniform"]


def example():
    """Bare 0 fails after 3 turns, two continuations of (0, 1): success, failure; bare 1 succeeds in 2 turns."""
    return outcome_tree((ROOT, 3, 0.0), (ROOT, 2, 1.0), (Anchor(0, 1), 2, 1.0), (Anchor(0, 1), 1, 0.0))


@pytest.mark.parametrize(
    ("mode", "root"),
    [
        ("leaf_mean", 2 / 4),  # of 0, 1, 1, 0
        ("bare_mean", 1 / 2),  # of 0, 1
        ("path_uniform", (1 / 3 + 1) / 2),  # (0, 1) is worth 1/3, (1, 1) is worth 1
    ],
)
def test_by_hand(mode, root):
    assert success_targets(example(), mode) == {
        ROOT: root,
        Anchor(0, 1): 1 / 3,
        Anchor(0, 2): 0.0,
        Anchor(1, 1): 1.0,
        Anchor(2, 2): 1.0,
    }


def test_leaf_mean_is_pulled_by_the_number_of_continuations_and_the_other_modes_at_the_root_are_not():
    """One success, one failure with 4 continuations that fail too: 1/6 of the leaves, half of the bare rollouts."""
    tree = outcome_tree((ROOT, 2, 1.0), (ROOT, 2, 0.0), *[(Anchor(1, 1), 1, 0.0)] * 4)
    assert [success_targets(tree, mode)[ROOT] for mode in MODES] == [float(1 / 6), 0.5, 0.5]


def test_no_trained_leaf_below_no_target():
    tree = outcome_tree((ROOT, 3, 1.0, False), (Anchor(0, 1), 2, 1.0, False), (ROOT, 2, 0.0, False))
    for mode in MODES:
        assert success_targets(tree, mode) == {}
        tree_with_one = dataclasses.replace(tree, rollouts=(*tree.rollouts, *outcome_tree((ROOT, 2, 1.0)).rollouts))
        assert success_targets(tree_with_one, mode) == {ROOT: 1.0, Anchor(3, 1): 1.0}
    assert success_targets(outcome_tree(), "leaf_mean") == {}


def test_untrained_parent_of_a_trained_continuation():
    tree = outcome_tree((ROOT, 3, 0.0, False), (Anchor(0, 1), 2, 1.0))
    assert success_targets(tree, "leaf_mean") == {ROOT: 1.0, Anchor(0, 1): 1.0, Anchor(1, 2): 1.0}
    assert success_targets(tree, "bare_mean") == {Anchor(0, 1): 1.0, Anchor(1, 2): 1.0}  # no bare outcome is known


def test_unknown_mode_is_named():
    with pytest.raises(ValueError, match=r"leaf_mean.*found 'mean'"):
        success_targets(example(), "mean")


def walk_values(tree) -> dict[Anchor, float]:
    """path_uniform by another way: the reward that a walk to a uniformly chosen child ends with, leaf by leaf."""
    s = build_structure(tree)
    alive = [n > 0 for n in s.num_leaves]
    values: dict[Anchor, float] = {}
    for leaf, path in zip(s.leaves, s.paths, strict=True):
        chance = 1.0
        for node in reversed(path[:-1]):
            chance /= sum(alive[child] for child in s.children[node])
            values[s.anchors[node]] = values.get(s.anchors[node], 0.0) + chance * tree.rollouts[leaf].reward
    return values


@settings(max_examples=120, deadline=None)
@given(st.integers(0, 2**32))
def test_properties(seed):
    rng = random.Random(seed)
    tree = random_tree(rng, rewards=[0.0, 0.1, 0.3, 0.7, 1.0])
    s = build_structure(tree)
    visited = {s.anchors[n] for n in range(s.num_nodes) if s.num_leaves[n] and (n == 0 or s.children[n])}
    for mode in MODES:
        targets = success_targets(tree, mode)
        assert set(targets) | {ROOT} == visited | {ROOT}
        assert all(0.0 <= value <= 1.0 for value in targets.values())
    assert success_targets(tree, "path_uniform") == pytest.approx(walk_values(tree), abs=1e-12)
    same = dataclasses.replace(tree, rollouts=tuple(dataclasses.replace(r, reward=0.1) for r in tree.rollouts))
    assert all(value == 0.1 for mode in MODES for value in success_targets(same, mode).values())
