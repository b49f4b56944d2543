"""What a step's trees say about how its budget was spent. Pure; P candidate prompts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from trace_megatron.algorithm.tree import (
    is_mixed,
    num_contrasts,
    num_generated_tokens,
    num_turns,
    num_units,
)
from trace_megatron.types import ROOT, RolloutStatus, RolloutTree

NUM_POSITION_BINS = 5


@dataclass(frozen=True, slots=True)
class RolloutSummary:
    """Numbers of one step's rollouts."""

    reward_mean: float
    """Over trained bare rollouts: continuations start where the allocator chose, and would bias it."""
    effective_ratio: float
    """Share of the trees with at least one success and one failure among their leaves."""
    bare_effective_ratio: float
    """The same from the bare rollouts alone: what stage 1 found before stage 2 added to it."""
    contrasts_per_unit: float
    """Pairs of a success and a failure in one tree, per unit of budget."""
    num_trees: int
    num_bare: int
    num_continuations: int
    units: float
    """1 a bare rollout, 1/2 a continuation; failed ones count."""
    generated_tokens: int
    """Action tokens sampled, each once."""
    turns_mean: float
    """Turns per whole trajectory."""
    truncated_share: float
    failed_share: float
    allocation_histogram: list[int]
    """[max m + 1] candidates by bare rollouts received; index 0: the skipped ones."""
    continuations_by_turn: list[int]
    """Continuations by the turn index of their prefix; index 0 is turn 1."""
    continuations_by_position: list[int]
    """Continuations by relative position of their prefix in its rollout, in five equal bins."""


def summarize_trees(trees: Sequence[RolloutTree], num_candidates: int) -> RolloutSummary:
    """Summarise the trees of one step, drawn from a pool of ``num_candidates`` prompts."""
    rollouts = [rollout for tree in trees for rollout in tree.rollouts]
    bare = [rollout for rollout in rollouts if rollout.anchor == ROOT]
    rewards = [rollout.reward for rollout in bare if rollout.trained]
    units = sum(map(num_units, trees))
    counts = [sum(rollout.anchor == ROOT for rollout in tree.rollouts) for tree in trees]
    turns = [num_turns(tree, index) for tree in trees for index in range(len(tree.rollouts))]
    by_turn, by_position = _continuation_positions(trees)
    return RolloutSummary(
        reward_mean=_mean(rewards),
        effective_ratio=_mean([is_mixed(tree) for tree in trees]),
        bare_effective_ratio=_mean([is_mixed(_bare_part(tree)) for tree in trees]),
        contrasts_per_unit=sum(map(num_contrasts, trees)) / units if units else 0.0,
        num_trees=len(trees),
        num_bare=len(bare),
        num_continuations=len(rollouts) - len(bare),
        units=units,
        generated_tokens=sum(map(num_generated_tokens, trees)),
        turns_mean=_mean(turns),
        truncated_share=_mean([rollout.status is RolloutStatus.TRUNCATED for rollout in rollouts]),
        failed_share=_mean([rollout.status.failed for rollout in rollouts]),
        allocation_histogram=np.bincount([*counts, *[0] * (num_candidates - len(trees))]).tolist(),
        continuations_by_turn=by_turn,
        continuations_by_position=by_position,
    )


def _bare_part(tree: RolloutTree) -> RolloutTree:
    return RolloutTree(tree.prompt, tuple(rollout for rollout in tree.rollouts if rollout.anchor == ROOT))


def _continuation_positions(trees: Sequence[RolloutTree]) -> tuple[list[int], list[int]]:
    anchors = [
        (rollout.anchor.turn, num_turns(tree, rollout.anchor.rollout))
        for tree in trees
        for rollout in tree.rollouts
        if rollout.anchor != ROOT
    ]
    by_turn = np.bincount([turn - 1 for turn, _ in anchors]).tolist() if anchors else []
    # prefixes are 1 <= t < T: t / T spreads over (0, 1)
    bins = [min(turn * NUM_POSITION_BINS // length, NUM_POSITION_BINS - 1) for turn, length in anchors]
    return by_turn, np.bincount(bins, minlength=NUM_POSITION_BINS).tolist() if anchors else []


def _mean(values: Sequence[float]) -> float:
    return float(np.mean(values)) if len(values) else 0.0
