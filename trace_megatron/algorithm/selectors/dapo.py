"""DAPO's dynamic sampling (arXiv 2503.14476): sample more prompts than are trained on, keep the mixed groups.

All units go to flat groups of G; groups whose raw rewards are all equal are dropped before the loss is normalised. The
budget counts them: they were sampled.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from trace_megatron.algorithm.selectors.base import RootView, Selector, affordable_groups, parse_options, spread_evenly
from trace_megatron.types import RolloutTree

if TYPE_CHECKING:
    from trace_megatron.config import BudgetConfig


@dataclass(frozen=True, slots=True)
class DAPOOptions:
    group_size: int = 8
    """Rollouts a prompt, G."""


class DAPOSelector(Selector):
    def __init__(self, budget: BudgetConfig, options: dict[str, Any]) -> None:
        super().__init__(budget)
        group_size = parse_options(DAPOOptions, options, "dapo").group_size
        self.num_candidates = affordable_groups(budget, group_size, self.root_budget)

    def select_roots(self, view: RootView, budget: int, rng: np.random.Generator) -> np.ndarray:
        return spread_evenly(budget, len(view.prompt_ids))

    def keep(self, trees: Sequence[RolloutTree]) -> list[RolloutTree]:
        return [tree for tree in trees if len({rollout.reward for rollout in tree.rollouts if rollout.trained}) > 1]
