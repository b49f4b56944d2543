"""What earlier visits said about a task: for selectors that track success rates instead of predicting them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from trace_megatron.types import ROOT, Prompt, RolloutTree


class PromptHistory:
    """Per task, mean reward and mean sampled tokens of its bare rollouts at the last visit.

    Only the last visit counts, for the policy has changed since the ones before. Bare rollouts only: continuations
    start where the allocator chose.
    """

    def __init__(self) -> None:
        self._last: dict[str, tuple[float, float]] = {}

    def observe(self, trees: Sequence[RolloutTree]) -> None:
        """Take in the trees of a finished step."""
        for tree in trees:
            bare = [rollout for rollout in tree.rollouts if rollout.anchor == ROOT and rollout.trained]
            if bare:
                tokens = sum(len(turn.action_ids) for rollout in bare for turn in rollout.turns)
                reward = sum(rollout.reward for rollout in bare)
                self._last[tree.prompt.task.task_id] = (reward / len(bare), tokens / len(bare))

    def success_rates(self, prompts: Sequence[Prompt]) -> np.ndarray:
        """[P] float64, NaN for a task not visited yet."""
        return self._column(prompts, 0)

    def rollout_tokens(self, prompts: Sequence[Prompt]) -> np.ndarray:
        """[P] float64, NaN for a task not visited yet."""
        return self._column(prompts, 1)

    def state_dict(self) -> dict[str, list[float]]:
        """JSON values for a checkpoint."""
        return {task_id: list(values) for task_id, values in self._last.items()}

    def load_state_dict(self, state: dict[str, list[float]]) -> None:
        self._last = {task_id: (float(rate), float(tokens)) for task_id, (rate, tokens) in state.items()}

    def _column(self, prompts: Sequence[Prompt], column: int) -> np.ndarray:
        unknown = (np.nan, np.nan)
        return np.array([self._last.get(p.task.task_id, unknown)[column] for p in prompts], dtype=np.float64)
