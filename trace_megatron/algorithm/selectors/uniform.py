"""GRPO's flat sampling (arXiv 2402.03300): every prompt the same number of bare rollouts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

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
class UniformOptions:
    group_size: int = 0
    """Rollouts a prompt, G; 0: the budget over ``budget.candidates`` prompts, at least 2 each."""


class UniformSelector(Selector):
    """M (1 + N / 2) units over P prompts; where P does not divide them, the first prompts get one more."""

    def __init__(self, budget: BudgetConfig, options: dict[str, Any]) -> None:
        super().__init__(budget)
        group_size = parse_options(UniformOptions, options, "uniform").group_size
        if group_size:
            self.num_candidates = affordable_groups(budget, group_size, self.root_budget)
        else:
            num_prompts = min(budget.candidates, self.root_budget // 2)
            self.num_candidates = checked_groups(budget, num_prompts, self.root_budget)

    def select_roots(self, view: RootView, budget: int, rng: np.random.Generator) -> np.ndarray:
        return spread_evenly(budget, len(view.prompt_ids))
