"""Structure and accounting of trees, on the worked example of types.py and on broken ones."""

from __future__ import annotations

import dataclasses
import random

import pytest

from trace_megatron.algorithm.tree import (
    bare_rollout,
    build_structure,
    history_ids,
    history_path,
    is_mixed,
    node_ids,
    num_contrasts,
    num_generated_tokens,
    num_turns,
    num_units,
    prefix_anchors,
    rollout_turns,
)
from trace_megatron.types import ROOT, Anchor, RolloutStatus

from .trees import make_rollout, make_tree, outcome_tree, random_tree


def worked_example():
    """Two bare rollouts of three and two turns, one continuation after turn 1 of rollout 0."""
    return outcome_tree((ROOT, 3, 0.0), (ROOT, 2, 1.0), (Anchor(0, 1), 2, 1.0))


def test_nodes_of_the_worked_example():
    s = build_structure(worked_example())
    assert s.parents == (-1, 0, 1, 2, 0, 4, 1, 6)
    assert s.children == ((1, 4), (2, 6), (3,), (), (5,), (), (7,), ())
    assert s.anchors == (ROOT, *(Anchor(*a) for a in [(0, 1), (0, 2), (0, 3), (1, 1), (1, 2), (2, 2), (2, 3)]))
    assert s.leaves == (0, 1, 2)
    assert s.paths == ((0, 1, 2, 3), (0, 4, 5), (0, 1, 6, 7))
    assert s.num_leaves == (3, 2, 1, 1, 1, 1, 1, 1)
    assert history_path(s, Anchor(2, 1)) == (0, 1)  # an inherited turn is the parent's node


def test_anchors_and_units_of_the_worked_example():
    tree = worked_example()
    assert prefix_anchors(tree) == (Anchor(0, 1), Anchor(0, 2), Anchor(1, 1))
    assert num_units(tree) == 2.5
    assert num_generated_tokens(tree) == 7
    assert num_contrasts(tree) == 2 and is_mixed(tree)
    assert num_turns(tree, 2) == 3


def test_continuation_of_a_continuation():
    tree = outcome_tree((ROOT, 3, 0.0), (Anchor(0, 1), 3, 0.0), (Anchor(1, 3), 1, 1.0), (Anchor(2, 1), 1, 1.0))
    s = build_structure(tree)
    assert s.paths == ((0, 1, 2, 3), (0, 1, 4, 5, 6), (0, 1, 4, 5, 7), (0, 1, 8))
    assert [bare_rollout(tree, j) for j in range(4)] == [0, 0, 0, 0]
    assert rollout_turns(tree, 2) == tree.rollouts[0].turns[:1] + tree.rollouts[1].turns[:2] + tree.rollouts[2].turns


def test_failed_and_masked_rollouts_cost_units_and_give_nothing_else():
    failed = dataclasses.replace(
        make_rollout(ROOT, [(2, 1)], 0.0, random.Random(0), trained=False), status=RolloutStatus.ENGINE_ERROR
    )
    nothing = dataclasses.replace(failed, turns=())
    tree = outcome_tree((ROOT, 2, 1.0), (ROOT, 4, 0.0, False), (Anchor(0, 1), 1, 0.0, False))
    tree = dataclasses.replace(tree, rollouts=(*tree.rollouts, failed, nothing))
    assert prefix_anchors(tree) == (Anchor(0, 1),)
    assert num_units(tree) == 4.5
    assert num_generated_tokens(tree) == 2 + 4 + 1 + 2
    assert not is_mixed(tree)
    s = build_structure(tree)
    assert s.leaves == (0,) and s.num_leaves[0] == 1


def test_success_is_a_reward_above_one_half():
    assert not is_mixed(outcome_tree((ROOT, 1, 0.5), (ROOT, 1, 0.0)))
    assert is_mixed(outcome_tree((ROOT, 1, 0.51), (ROOT, 1, 0.0)))


def test_histories_are_prompt_actions_and_observations():
    rng = random.Random(3)
    for _ in range(50):
        tree = random_tree(rng)
        s = build_structure(tree)
        for index, path in enumerate(s.rollout_paths):
            for turn in range(len(path)):
                anchor = Anchor(index, turn) if turn else ROOT
                joined = sum((t.action_ids + t.observation_ids for t in rollout_turns(tree, index)[:turn]), ())
                assert history_ids(tree, anchor) == tree.prompt.token_ids + joined
                assert history_path(s, anchor) == path[: turn + 1]
                if s.children[path[turn]]:
                    nodes = history_path(s, anchor)
                    assert history_ids(tree, anchor) == sum((node_ids(s, node) for node in nodes), ())


@pytest.mark.parametrize(
    ("specs", "message"),
    [
        ([(ROOT, 2, 0.0), (Anchor(1, 1), 1, 0.0)], "rollout 1.*earlier rollout"),
        ([(ROOT, 2, 0.0), (Anchor(0, 2), 1, 0.0)], "from 1 to 1"),
        ([(ROOT, 2, 0.0), (Anchor(0, 0), 1, 0.0)], "from 1 to 1"),
        ([(ROOT, 2, 1.5)], r"reward in \[0, 1\]"),
        ([(ROOT, 2, float("nan"))], r"reward in \[0, 1\]"),
        ([(ROOT, 0, 0.0)], "with turns"),
    ],
)
def test_broken_trees_are_named(specs, message):
    with pytest.raises(ValueError, match=message):
        build_structure(outcome_tree(*specs))


def test_actions_need_logprobs_prompts_need_tokens_failures_train_nothing():
    rollout = make_rollout(ROOT, [(2, 1)], 1.0, random.Random(0))
    turn = dataclasses.replace(rollout.turns[0], action_logprobs=(-1.0,))
    with pytest.raises(ValueError, match="2 tokens and 1 logprobs"):
        build_structure(make_tree(dataclasses.replace(rollout, turns=(turn,))))
    with pytest.raises(ValueError, match="at least one token"):
        build_structure(make_tree(rollout, prompt_ids=()))
    with pytest.raises(ValueError, match="finished rollout"):
        build_structure(make_tree(dataclasses.replace(rollout, status=RolloutStatus.ENV_ERROR)))
    with pytest.raises(ValueError, match="visited history"):
        history_path(build_structure(make_tree(rollout)), Anchor(0, 2))
    with pytest.raises(ValueError, match="visited history"):
        history_ids(make_tree(rollout), Anchor(0, 2))
