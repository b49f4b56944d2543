"""Prompt Curriculum Learning (arXiv 2510.01135): of k m prompts keep the m with V nearest 1/2, then flat groups."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from trace_megatron.algorithm.scores import to_host
from trace_megatron.algorithm.selectors.base import (
    RootView,
    Selector,
    affordable_groups,
    checked_groups,
    parse_options,
    spread_evenly,
)

if TYPE_CHECKING:
    from trace_megatron.config import BudgetConfig


@dataclass(frozen=True, slots=True)
class PCLOptions:
    group_size: int = 8
    """Rollouts a kept prompt, G."""


class PCLSelector(Selector):
    """Draws ``budget.candidates`` prompts, k m of them; m is what the budget affords in groups of G."""

    needs_root_scores = True

    def __init__(self, budget: BudgetConfig, options: dict[str, Any]) -> None:
        super().__init__(budget)
        group_size = parse_options(PCLOptions, options, "pcl").group_size
        affordable = affordable_groups(budget, group_size, self.root_budget)
        self.num_kept = checked_groups(budget, min(affordable, budget.candidates), self.root_budget)

    def select_roots(self, view: RootView, budget: int, rng: np.random.Generator) -> np.ndarray:
        order = rng.permutation(len(view.prompt_ids))  # equally near ones are drawn at random
        nearest = order[np.argsort(np.abs(to_host(view.success_probs)[order] - 0.5), kind="stable")][: self.num_kept]
        counts = np.zeros(len(view.prompt_ids), dtype=np.int64)
        counts[nearest] = spread_evenly(budget, nearest.size)
        return counts
