"""What the training loop knows of a predictor: V(history) in [0, 1], the chance that the policy ends in success.

Legend: P prompts, A anchors of one tree.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from trace_megatron.algorithm.scores import Scores
from trace_megatron.types import Prompt, RolloutTree


@dataclass(frozen=True, slots=True)
class PredictorStats:
    """What one update reports."""

    loss_before: float | None
    """Mean squared error over the first epoch, each mini-batch before its own step; None where nothing is trained."""
    loss_after: float | None
    """Mean squared error on the same samples after the last epoch."""
    num_roots: int
    num_prefixes: int
    num_tokens: int
    """Packed tokens of one epoch."""
    seconds: float


class Predictor(Protocol):
    """Scores roots and prefixes alike, and learns from finished trees. Safe to call from several threads."""

    def score_roots(self, prompts: Sequence[Prompt]) -> Scores:
        """[P] float64, from at least float32 arithmetic: coarser scores tie, and ties decide the allocation."""
        ...

    def score_prefixes(self, tree: RolloutTree) -> Scores:
        """[A] float64 in the order of ``algorithm.tree.prefix_anchors(tree)``."""
        ...

    def score_prefixes_many(self, trees: Sequence[RolloutTree]) -> list[Scores]:
        """``score_prefixes`` of every tree, packed together."""
        ...

    def update(self, trees: Sequence[RolloutTree], target_mode: str) -> PredictorStats:
        """Learn from the finished trees of one step; ``target_mode`` as in ``algorithm.targets.success_targets``."""
        ...

    def snapshot(self) -> Callable[[Path], None]:
        """Copy all that ``load`` needs to go on from here exactly, and return what writes it into a folder.

        That may run in another thread, whatever becomes of the predictor; its file appears whole or not at all.
        """
        ...

    def load(self, folder: Path) -> None:
        """Read what ``snapshot`` had written. Raises UserError where it is missing or of another kind or shape."""
        ...


class TimedScores:
    """``score_prefixes_many`` with a count of the seconds it took: it runs inside the rollouts, on a thread."""

    def __init__(self, predictor: Predictor) -> None:
        self._predictor = predictor
        self._seconds = 0.0

    def __call__(self, trees: Sequence[RolloutTree]) -> list[Scores]:
        start_s = time.perf_counter()
        scores = self._predictor.score_prefixes_many(trees)
        self._seconds += time.perf_counter() - start_s
        return scores

    def take_seconds(self) -> float:
        """Seconds since the last call of this method."""
        seconds, self._seconds = self._seconds, 0.0
        return seconds
