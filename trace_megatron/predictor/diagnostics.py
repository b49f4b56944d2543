"""How well scores rank and match what happened. Pure; None wherever a number is undefined, never NaN."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from trace_megatron.algorithm.tree import prefix_anchors
from trace_megatron.types import ROOT, RolloutTree

NUM_RELIABILITY_BINS = 10


@dataclass(frozen=True, slots=True)
class ReliabilityRow:
    """Scores of one bin beside what happened to them."""

    low: float
    high: float
    """The bin is [low, high), the last one closed."""
    count: int
    score_mean: float
    success_mean: float


@dataclass(frozen=True, slots=True)
class PredictorDiagnostics:
    """Scores of one step, as the allocator used them, against the outcomes that followed."""

    root_spearman: float | None
    root_brier: float | None
    prefix_spearman: float | None
    prefix_brier: float | None
    num_roots: int
    num_prefixes: int
    root_reliability: tuple[ReliabilityRow, ...]
    """Occupied bins only."""
    prefix_reliability: tuple[ReliabilityRow, ...]


def predictor_diagnostics(
    root_scores: Sequence[float], trees: Sequence[RolloutTree], prefix_scores: Sequence[np.ndarray]
) -> PredictorDiagnostics:
    """Compare one root score per tree and, per tree, one score per ``prefix_anchors(tree)`` with the outcomes.

    Outcome of a root: mean reward of its bare rollouts. Outcome of a prefix: the reward of the bare rollout that
    visited it. Both are unbiased; means that include continuations are not, for their number depends on the outcome.
    An empty array stands for a tree whose prefixes were not scored. Raises ValueError where lengths do not match.
    """
    roots, root_outcomes = [], []
    prefixes, prefix_outcomes = [], []
    for root_score, tree, scores in zip(root_scores, trees, prefix_scores, strict=True):
        rewards = [rollout.reward for rollout in tree.rollouts if rollout.anchor == ROOT and rollout.trained]
        if rewards:
            roots.append(float(root_score))
            root_outcomes.append(float(np.mean(rewards)))
        if len(scores):
            anchors = prefix_anchors(tree)
            prefixes += [float(score) for score, _ in zip(scores, anchors, strict=True)]
            prefix_outcomes += [tree.rollouts[anchor.rollout].reward for anchor in anchors]
    return PredictorDiagnostics(
        root_spearman=spearman(roots, root_outcomes),
        root_brier=brier(roots, root_outcomes),
        prefix_spearman=spearman(prefixes, prefix_outcomes),
        prefix_brier=brier(prefixes, prefix_outcomes),
        num_roots=len(roots),
        num_prefixes=len(prefixes),
        root_reliability=reliability_table(roots, root_outcomes),
        prefix_reliability=reliability_table(prefixes, prefix_outcomes),
    )


def spearman(scores: Sequence[float], outcomes: Sequence[float]) -> float | None:
    """Pearson correlation of average ranks; None below two pairs or where one side is constant."""
    if len(scores) < 2:
        return None
    x, y = (_average_ranks(values) - (len(values) + 1) / 2 for values in (scores, outcomes))
    norm = np.sqrt((x @ x) * (y @ y))
    return float(x @ y / norm) if norm else None


def _average_ranks(values: Sequence[float]) -> np.ndarray:
    """From 1; equal values share their mean. Not SciPy's `rankdata`: its import takes half a second of every start."""
    _, inverse, counts = np.unique(np.asarray(values), return_inverse=True, return_counts=True)
    return (np.cumsum(counts) - (counts - 1) / 2)[inverse]


def brier(scores: Sequence[float], outcomes: Sequence[float]) -> float | None:
    """Mean squared difference; None without pairs."""
    return float(np.mean((np.asarray(scores) - np.asarray(outcomes)) ** 2)) if len(scores) else None


def reliability_table(scores: Sequence[float], outcomes: Sequence[float]) -> tuple[ReliabilityRow, ...]:
    """Mean score beside mean outcome in equal bins of the score; empty bins are left out."""
    x, y = np.asarray(scores, dtype=np.float64), np.asarray(outcomes, dtype=np.float64)
    bins = np.minimum((x * NUM_RELIABILITY_BINS).astype(int), NUM_RELIABILITY_BINS - 1)
    return tuple(
        ReliabilityRow(
            low=index / NUM_RELIABILITY_BINS,
            high=(index + 1) / NUM_RELIABILITY_BINS,
            count=int((bins == index).sum()),
            score_mean=float(x[bins == index].mean()),
            success_mean=float(y[bins == index].mean()),
        )
        for index in np.unique(bins).tolist()
    )
