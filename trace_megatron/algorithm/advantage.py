"""Group-relative advantages on trees. L leaves, N nodes.

Groups are compared as exact rationals: members that are exactly equal get advantage 0, not a rounding error over eps.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from fractions import Fraction
from typing import TYPE_CHECKING

import numpy as np

from trace_megatron.algorithm.targets import child_means
from trace_megatron.algorithm.tree import TreeStructure, bare_rollout, build_structure
from trace_megatron.types import RolloutTree

if TYPE_CHECKING:  # config.py reads YAML; this package needs only torch and NumPy
    from trace_megatron.config import MethodConfig

_EPS = 1e-6  # beside a divisor; arXiv 2509.21240's value


def tree_advantages(tree: RolloutTree, config: MethodConfig) -> np.ndarray:
    """Advantage of every trained leaf at every node of its path, float64 [L, N]; 0 off the path and at the root.

    Rows follow ``build_structure(tree).leaves``. ``config.advantage``: ``grpo``, the leaf's reward relative to all
    leaves of the prompt; ``tree_rpo`` (arXiv 2506.05183), per node, relative to its siblings; ``tree_grpo``
    (arXiv 2509.21240), per leaf, relative to the prompt plus relative to its bare rollout's tree. Never NaN.
    """
    structure = build_structure(tree)
    advantages = np.zeros((len(structure.leaves), structure.num_nodes))
    if config.advantage == "tree_rpo":
        by_node = _tree_rpo(structure, config.normalizer)
        for row, path in zip(advantages, structure.paths, strict=True):
            row[list(path)] = by_node[list(path)]
        return advantages
    if config.advantage not in ("grpo", "tree_grpo"):
        raise ValueError(f"expected advantage grpo, tree_rpo or tree_grpo, found {config.advantage!r}")
    for row, path, value in zip(advantages, structure.paths, _by_leaf(structure, config), strict=True):
        row[list(path[1:])] = value
    return advantages


def group_relative(values: Sequence[Fraction], normalizer: str) -> list[float]:
    """(x - mean) / divisor for one group; 0 for all where all are exactly equal, a group of one included.

    ``std``: sample standard deviation + 1e-6. ``bernoulli``: sqrt(mu (1 - mu)) + 1e-6 at the group's mean mu.
    ``none``: 1.
    """
    if normalizer not in ("std", "bernoulli", "none"):
        raise ValueError(f"expected normalizer std, bernoulli or none, found {normalizer!r}")
    if not values or min(values) == max(values):
        return [0.0] * len(values)
    mean = sum(values, Fraction(0)) / len(values)
    centred = [float(value - mean) for value in values]
    if normalizer == "none":
        return centred
    if normalizer == "bernoulli":
        variance = float(mean * (1 - mean))
    else:
        variance = math.fsum(c * c for c in centred) / (len(values) - 1)
    return [c / (math.sqrt(variance) + _EPS) for c in centred]


def _tree_rpo(structure: TreeStructure, normalizer: str) -> np.ndarray:
    """[N] advantage of each node in its sibling group; a chain of only children shares the one of its first node.

    Without that merging most tokens of an irregular tree would sit in groups of one and get no gradient.
    """
    values = child_means(structure)
    by_node = np.zeros(structure.num_nodes)
    for node in range(structure.num_nodes):  # parents first
        siblings = [child for child in structure.children[node] if values[child] is not None]
        if len(siblings) == 1:
            by_node[siblings[0]] = by_node[node]
        else:
            by_node[siblings] = group_relative([values[child] for child in siblings], normalizer)
    return by_node


def _by_leaf(structure: TreeStructure, config: MethodConfig) -> list[float]:
    """[L] GRPO's prompt term, for Tree-GRPO plus the tree term."""
    rewards = [Fraction(structure.tree.rollouts[leaf].reward) for leaf in structure.leaves]
    if config.advantage == "grpo":
        return group_relative(rewards, config.normalizer)
    groups: dict[int, list[int]] = defaultdict(list)
    for row, leaf in enumerate(structure.leaves):
        groups[bare_rollout(structure.tree, leaf)].append(row)
    total = _group_or_singleton(rewards, config)
    for rows in groups.values():
        terms = _group_or_singleton([rewards[row] for row in rows], config)
        for row, term in zip(rows, terms, strict=True):
            total[row] += term
    return total


def _group_or_singleton(values: Sequence[Fraction], config: MethodConfig) -> list[float]:
    """The authors' code takes mean 0 and std 1 for a group of one, which gives a lone success +R: an option here."""
    if len(values) == 1 and config.singleton == "reward":
        return [float(values[0])]
    return group_relative(values, config.normalizer)
