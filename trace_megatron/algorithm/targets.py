"""What a finished tree says about the chance of success at its histories: the predictor's targets.

Means are exact rationals, so that equal outcomes give equal values whatever the shape of the tree.
"""

from __future__ import annotations

from fractions import Fraction

from trace_megatron.algorithm.tree import TreeStructure, build_structure
from trace_megatron.types import ROOT, Anchor, RolloutTree

_MODES = ("leaf_mean", "bare_mean", "path_uniform")


def success_targets(tree: RolloutTree, mode: str = "leaf_mean") -> dict[Anchor, float]:
    """Target value in [0, 1] of the root and of every visited prefix (1 <= t < T) that has a trained leaf below.

    A prefix that rollouts share has one entry, named by the rollout that sampled it. ``leaf_mean``: mean reward of the
    trained leaves below (arXiv 2606.11119). It is biased, for the number of continuations depends on the outcome.
    ``bare_mean``: the same at prefixes, at the root the mean over bare rollouts, unbiased. ``path_uniform``: every
    transition to a child counts alike. Raises ValueError on an unknown mode or a tree that is not well formed.
    """
    if mode not in _MODES:
        raise ValueError(f"expected one of {', '.join(_MODES)}, found {mode!r}")
    structure = build_structure(tree)
    values = child_means(structure) if mode == "path_uniform" else leaf_means(structure)
    if mode == "bare_mean":
        bare = [r.reward for r in tree.rollouts if r.trained and r.anchor == ROOT]
        values[0] = _mean([Fraction(reward) for reward in bare])
    return {
        structure.anchors[node]: float(value)
        for node, value in enumerate(values)
        if value is not None and (node == 0 or structure.children[node])
    }


def leaf_means(structure: TreeStructure) -> list[Fraction | None]:
    """[N] mean reward of the trained leaves at or below each node; None without any."""
    total = [Fraction(0)] * structure.num_nodes
    for leaf, path in zip(structure.leaves, structure.paths, strict=True):
        reward = Fraction(structure.tree.rollouts[leaf].reward)
        for node in path:
            total[node] += reward
    return [s / n if n else None for s, n in zip(total, structure.num_leaves, strict=True)]


def child_means(structure: TreeStructure) -> list[Fraction | None]:
    """[N] a leaf's reward, else the mean of the children's values, bottom-up; None without a trained leaf below."""
    values: list[Fraction | None] = [None] * structure.num_nodes
    for leaf, path in zip(structure.leaves, structure.paths, strict=True):
        values[path[-1]] = Fraction(structure.tree.rollouts[leaf].reward)
    for node in reversed(range(structure.num_nodes)):
        if structure.children[node]:
            values[node] = _mean([values[c] for c in structure.children[node] if values[c] is not None])
    return values


def _mean(values: list[Fraction]) -> Fraction | None:
    return sum(values, Fraction(0)) / len(values) if values else None
