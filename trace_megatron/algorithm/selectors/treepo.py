"""TreePO as the baseline of arXiv 2606.11119 (the method: arXiv 2508.17445): where to branch is left to chance.

4 bare rollouts a prompt, then N continuations per bare rollout, each at a prefix of it drawn uniformly. A bare rollout
without prefixes leaves its continuations to the prompt's others.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from trace_megatron.algorithm.selectors.base import (
    PrefixView,
    RootView,
    Selector,
    affordable_groups,
    parse_options,
    spread_evenly,
    spread_over_rollouts,
)

if TYPE_CHECKING:
    from trace_megatron.config import BudgetConfig

BARE_ROLLOUTS = 4


@dataclass(frozen=True, slots=True)
class TreePOOptions:
    pass


class TreePOSelector(Selector):
    def __init__(self, budget: BudgetConfig, options: dict[str, Any]) -> None:
        super().__init__(budget)
        parse_options(TreePOOptions, options, "treepo")
        self.root_budget, self.continuations = budget.rollouts, budget.continuations
        self.num_candidates = affordable_groups(budget, BARE_ROLLOUTS, self.root_budget)

    def select_roots(self, view: RootView, budget: int, rng: np.random.Generator) -> np.ndarray:
        return spread_evenly(budget, len(view.prompt_ids))

    def select_prefixes(self, view: PrefixView, budget: int, rng: np.random.Generator) -> np.ndarray:
        return spread_over_rollouts(view, budget, rng)
