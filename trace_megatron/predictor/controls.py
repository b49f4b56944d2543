"""Predictors without a network, as controls behind the same protocol."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from trace_megatron.algorithm.tree import num_turns, prefix_anchors
from trace_megatron.errors import UserError
from trace_megatron.predictor.protocol import PredictorStats
from trace_megatron.types import ROOT, Anchor, Prompt, RolloutTree

_FILE = "predictor.json"


class ConstantPredictor:
    """1/2 everywhere: what the allocator does when it knows nothing."""

    def score_roots(self, prompts: Sequence[Prompt]) -> np.ndarray:
        return np.full(len(prompts), 0.5)

    def score_prefixes(self, tree: RolloutTree) -> np.ndarray:
        return np.full(len(prefix_anchors(tree)), 0.5)

    def score_prefixes_many(self, trees: Sequence[RolloutTree]) -> list[np.ndarray]:
        return [self.score_prefixes(tree) for tree in trees]

    def update(self, trees: Sequence[RolloutTree], target_mode: str) -> PredictorStats:
        return PredictorStats(None, None, num_roots=0, num_prefixes=0, num_tokens=0, seconds=0.0)

    def snapshot(self) -> Callable[[Path], None]:
        return lambda folder: _write(folder, {"kind": "constant"})

    def load(self, folder: Path) -> None:
        _read(folder, "constant")


class OraclePredictor:
    """What outcomes alone can say, or, where ``success_prob`` is given, the truth.

    Root: the task's success rate over all bare rollouts that earlier updates saw, (successes + 1/2) / (n + 1). Prefix t
    of a rollout of T turns with reward r: p + (r - p) t / T, with p the root's rate, this tree's bare rollouts
    included: from the rate at the start it moves to the realised outcome at the end. ``success_prob(tree, anchor)``
    replaces both, with ROOT and a tree without rollouts for a prompt: for simulations, where the truth is known.
    """

    def __init__(self, success_prob: Callable[[RolloutTree, Anchor], float] | None = None):
        self._success_prob = success_prob
        self._outcomes: dict[str, tuple[float, int]] = {}  # task id: summed reward, bare rollouts

    def score_roots(self, prompts: Sequence[Prompt]) -> np.ndarray:
        return np.array([self._root(RolloutTree(prompt, ())) for prompt in prompts], dtype=np.float64)

    def score_prefixes(self, tree: RolloutTree) -> np.ndarray:
        return np.array([self._prefix(tree, anchor) for anchor in prefix_anchors(tree)], dtype=np.float64)

    def score_prefixes_many(self, trees: Sequence[RolloutTree]) -> list[np.ndarray]:
        return [self.score_prefixes(tree) for tree in trees]

    def update(self, trees: Sequence[RolloutTree], target_mode: str) -> PredictorStats:
        start_s = time.perf_counter()
        for tree in trees:
            self._outcomes[tree.prompt.task.task_id] = self._observed(tree)
        seconds = time.perf_counter() - start_s
        return PredictorStats(None, None, num_roots=len(trees), num_prefixes=0, num_tokens=0, seconds=seconds)

    def snapshot(self) -> Callable[[Path], None]:
        state = {"kind": "oracle", "outcomes": dict(self._outcomes)}
        return lambda folder: _write(folder, state)

    def load(self, folder: Path) -> None:
        outcomes = _read(folder, "oracle")["outcomes"]
        self._outcomes = {task: (total, count) for task, (total, count) in outcomes.items()}

    def _root(self, tree: RolloutTree) -> float:
        if self._success_prob is not None:
            return self._success_prob(tree, ROOT)
        total, count = self._observed(tree)
        return (total + 0.5) / (count + 1)

    def _prefix(self, tree: RolloutTree, anchor: Anchor) -> float:
        if self._success_prob is not None:
            return self._success_prob(tree, anchor)
        root = self._root(tree)
        reward = tree.rollouts[anchor.rollout].reward
        return root + (reward - root) * anchor.turn / num_turns(tree, anchor.rollout)

    def _observed(self, tree: RolloutTree) -> tuple[float, int]:
        rewards = [rollout.reward for rollout in tree.rollouts if rollout.trained and rollout.anchor == ROOT]
        total, count = self._outcomes.get(tree.prompt.task.task_id, (0.0, 0))
        return total + sum(rewards), count + len(rewards)


def _write(folder: Path, state: dict) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    partial = folder / f"{_FILE}.partial"
    partial.write_text(json.dumps(state))
    os.replace(partial, folder / _FILE)


def _read(folder: Path, kind: str) -> dict:
    path = folder / _FILE
    try:
        state = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise UserError(f"expected the state of a predictor of kind {kind} at '{path}', found: {error}") from error
    if state.get("kind") != kind:
        raise UserError(
            f"expected the state of a predictor of kind {kind} at '{path}', found {state.get('kind')}: "
            "resume with the predictor.kind it had"
        )
    return state
