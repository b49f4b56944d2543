"""TRACE (arXiv 2606.11119): both stages where the predictor says that the outcome is undecided."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from trace_megatron.algorithm.allocate import allocate_prefixes, allocate_roots, check_root_budget
from trace_megatron.algorithm.contrast import repeat_prob
from trace_megatron.algorithm.scores import like
from trace_megatron.algorithm.selectors.base import (
    PrefixView,
    RootView,
    Selector,
    affordable_groups,
    parse_options,
    spread_evenly,
    spread_over_rollouts,
)
from trace_megatron.algorithm.selectors.treepo import BARE_ROLLOUTS
from trace_megatron.errors import UserError

if TYPE_CHECKING:
    from trace_megatron.config import BudgetConfig


@dataclass(frozen=True, slots=True)
class TraceOptions:
    root: Literal["active", "uniform"] = "active"
    """``uniform``: 4 bare rollouts a prompt, as TreePO (the paper's Table 1)."""
    prefix: Literal["active", "uniform", "none"] = "active"
    """``uniform``: as TreePO; ``none``: the units of stage 2 go to stage 1."""
    cost: Literal["units", "tokens"] = "units"
    """``tokens``: value per expected token; then tokens match the budget, not units."""


class TraceSelector(Selector):
    def __init__(self, budget: BudgetConfig, options: dict[str, Any]) -> None:
        super().__init__(budget)
        self.options = parse_options(TraceOptions, options, "trace")
        self.exact = budget.exact
        self.max_rollouts = budget.max_rollouts_per_prompt or None
        if self.options.prefix != "none":
            self.root_budget, self.continuations = budget.rollouts, budget.continuations
        self.needs_root_scores = self.options.root == "active"
        self.needs_prefix_scores = self.options.prefix == "active" and self.continuations > 0
        if self.options.root == "uniform":
            group = BARE_ROLLOUTS if self.options.prefix != "none" else BARE_ROLLOUTS * (2 + budget.continuations) // 2
            self.num_candidates = affordable_groups(budget, group, self.root_budget)
            return
        try:
            check_root_budget(self.num_candidates, self.root_budget, self.max_rollouts, exact=self.exact)
        except ValueError as error:
            raise UserError(f"budget.rollouts: {error}") from error

    def select_roots(self, view: RootView, budget: int, rng: np.random.Generator) -> np.ndarray:
        num_prompts = len(view.prompt_ids)
        if self.options.root == "uniform":
            return spread_evenly(budget, num_prompts)
        order = rng.permutation(num_prompts)  # equal values are broken at random, not by place
        costs = _known_or_mean(view.rollout_tokens)[order] if self.options.cost == "tokens" else None
        counts = np.zeros(num_prompts, dtype=np.int64)
        counts[order] = allocate_roots(
            view.success_probs[like(order, view.success_probs)],
            budget,
            max_rollouts=self.max_rollouts,
            exact=self.exact,
            costs=costs,
        )
        return counts

    def select_prefixes(self, view: PrefixView, budget: int, rng: np.random.Generator) -> np.ndarray:
        if self.options.prefix == "uniform":
            return spread_over_rollouts(view, budget, rng)
        order = rng.permutation(len(view.anchors))
        repeats = repeat_prob(view.rewards, view.success_probs)[like(order, view.success_probs)]
        costs = np.maximum(view.remaining_tokens, 1.0)[order] if self.options.cost == "tokens" else None
        counts = np.zeros(len(view.anchors), dtype=np.int64)
        counts[order] = allocate_prefixes(repeats, budget, costs=costs)
        return counts


def _known_or_mean(tokens: np.ndarray) -> np.ndarray:
    """Tasks not visited yet count as the mean of the others."""
    known = tokens[~np.isnan(tokens)]
    mean = known.mean() if known.size else 1.0
    return np.maximum(np.where(np.isnan(tokens), mean, tokens), 1.0)
