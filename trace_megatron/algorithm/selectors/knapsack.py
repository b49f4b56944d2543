"""Knapsack RL (arXiv 2509.25849): exact flat allocation by tracked success rates instead of a predictor.

Value of m rollouts at success rate p: (1 - p^m - (1 - p)^m) p (1 - p)^2, the chance of a gradient times what it
teaches. Every candidate gets at least 2, so that its rate stays known.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from trace_megatron.algorithm.allocate import allocate_table
from trace_megatron.algorithm.contrast import mixed_prob
from trace_megatron.algorithm.selectors.base import RootView, Selector, parse_options
from trace_megatron.errors import UserError

if TYPE_CHECKING:
    from trace_megatron.config import BudgetConfig

_MIN_ROLLOUTS = 2  # N_low of the paper
_MAX_ROLLOUTS = 128  # N_up of the paper
_UNKNOWN_RATE = 0.5  # a task not visited yet


@dataclass(frozen=True, slots=True)
class KnapsackOptions:
    pass


class KnapsackSelector(Selector):
    def __init__(self, budget: BudgetConfig, options: dict[str, Any]) -> None:
        super().__init__(budget)
        parse_options(KnapsackOptions, options, "knapsack")
        self.num_candidates = min(budget.candidates, self.root_budget // _MIN_ROLLOUTS)
        self.max_rollouts = budget.max_rollouts_per_prompt or _MAX_ROLLOUTS
        if not _MIN_ROLLOUTS * self.num_candidates <= self.root_budget <= self.max_rollouts * self.num_candidates:
            raise UserError(
                f"expected {_MIN_ROLLOUTS} to {self.max_rollouts} rollouts a prompt, found {self.root_budget} "
                f"for {self.num_candidates} prompts: change budget.rollouts, candidates or max_rollouts_per_prompt"
            )

    def select_roots(self, view: RootView, budget: int, rng: np.random.Generator) -> np.ndarray:
        rates = np.where(np.isnan(view.success_rates), _UNKNOWN_RATE, view.success_rates)
        cap = min(self.max_rollouts, budget)
        values = mixed_prob(rates[:, None], np.arange(cap + 1)) * (rates * (1.0 - rates) ** 2)[:, None]
        values[:, :_MIN_ROLLOUTS] = -np.inf
        counts = allocate_table(values, budget, exact=False)
        return _spend_rest(counts, budget, rates, cap)


def _spend_rest(counts: np.ndarray, budget: int, rates: np.ndarray, cap: int) -> np.ndarray:
    """Units of zero value go to the unsolved prompts (rate 0) first, to the one with fewest rollouts each time."""
    for _ in range(budget - int(counts.sum())):
        room = counts < cap
        unsolved = room & (rates == 0.0)
        rows = np.flatnonzero(unsolved if unsolved.any() else room)
        counts[rows[np.argmin(counts[rows])]] += 1
    return counts
