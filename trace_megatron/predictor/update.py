"""Online training of the predictor on the success targets of finished trees. arXiv 2606.11119, predictor training.

Every root of the step, plus prefixes drawn uniformly from the visited ones until they make up ``prefix_share`` of the
batch; mean squared error. Histories that meet in a mini-batch share the tokens that they begin with; the loss is
normalised by the mini-batch, so that gradients do not depend on how it was packed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from trace_megatron.algorithm.targets import success_targets
from trace_megatron.predictor.pack import HistoryPath, Request, pack_paths
from trace_megatron.types import ROOT, Anchor, RolloutTree

if TYPE_CHECKING:  # whose transformers this needs not
    from trace_megatron.predictor.model import ValueModel


@dataclass(frozen=True, slots=True)
class Sample:
    """One history with the success probability that it should have."""

    tree: int
    """Index among the step's trees."""
    anchor: Anchor
    target: float


def draw_samples(
    trees: Sequence[RolloutTree], target_mode: str, prefix_share: float, rng: np.random.Generator
) -> list[Sample]:
    """All roots that have a target, then the drawn prefixes."""
    samples = [
        Sample(index, anchor, target)
        for index, tree in enumerate(trees)
        for anchor, target in success_targets(tree, target_mode).items()
    ]
    roots = [sample for sample in samples if sample.anchor == ROOT]
    visited = [sample for sample in samples if sample.anchor != ROOT]
    drawn = rng.permutation(len(visited))[: num_prefixes(len(roots), len(visited), prefix_share)]
    return roots + [visited[index] for index in drawn]


def num_prefixes(num_roots: int, num_visited: int, prefix_share: float) -> int:
    """How many prefixes make up ``prefix_share`` of a batch with all roots: at least one of those there are."""
    if prefix_share == 0.0:
        return 0
    return min(max(round(num_roots * prefix_share / (1.0 - prefix_share)), 1), num_visited)


def mini_batches(samples: Sequence[Sample], batch_size: int, rng: np.random.Generator) -> list[list[int]]:
    """The samples' indices in random order, dealt to the fewest batches; roots and prefixes both spread evenly."""
    ordered = sorted(rng.permutation(len(samples)).tolist(), key=lambda index: samples[index].anchor != ROOT)
    num_batches = -(-len(samples) // batch_size)
    return [ordered[first::num_batches] for first in range(num_batches)]


def as_requests(trees: Sequence[RolloutTree], samples: Sequence[Sample]) -> list[Request]:
    """What ``history_paths`` takes: one path for each sample, whose row is the sample's index."""
    return [(trees[sample.tree], (sample.anchor,)) for sample in samples]


def accumulate_gradients(
    model: ValueModel, paths: Sequence[HistoryPath], targets: np.ndarray, num_samples: int, tokens_per_forward: int
) -> tuple[float, int]:
    """Add the gradient of these paths' squared errors over ``num_samples``; returns (summed error, packed tokens).

    ``targets``: by the paths' rows. ``num_samples``: of the mini-batch on all ranks.
    """
    wanted = torch.from_numpy(targets)
    squared_error, num_tokens = 0.0, 0
    for batch in pack_paths(paths, tokens_per_forward):
        values = model(batch)
        loss = (values - wanted[batch.rows].to(values)).square().sum()
        (loss / num_samples).backward()
        squared_error += loss.item()
        num_tokens += batch.num_tokens
    return squared_error, num_tokens
