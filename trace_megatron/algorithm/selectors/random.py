"""A control: the same two stages, both left to chance."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from trace_megatron.algorithm.selectors.base import PrefixView, RootView, Selector, parse_options
from trace_megatron.errors import UserError

if TYPE_CHECKING:
    from trace_megatron.config import BudgetConfig


@dataclass(frozen=True, slots=True)
class RandomOptions:
    pass


class RandomSelector(Selector):
    """Pairs of rollouts fall on prompts drawn uniformly (one alone shows no contrast), continuations on prefixes."""

    def __init__(self, budget: BudgetConfig, options: dict[str, Any]) -> None:
        super().__init__(budget)
        parse_options(RandomOptions, options, "random")
        self.root_budget, self.continuations = budget.rollouts, budget.continuations
        if budget.max_rollouts_per_prompt:
            raise UserError(
                "expected no budget.max_rollouts_per_prompt for selector 'random', "
                f"found {budget.max_rollouts_per_prompt}: set it to 0"
            )

    def select_roots(self, view: RootView, budget: int, rng: np.random.Generator) -> np.ndarray:
        num_prompts = len(view.prompt_ids)
        counts = 2 * rng.multinomial(budget // 2, np.full(num_prompts, 1.0 / num_prompts))
        if budget % 2:
            counts[rng.choice(np.flatnonzero(counts))] += 1
        return counts

    def select_prefixes(self, view: PrefixView, budget: int, rng: np.random.Generator) -> np.ndarray:
        return rng.multinomial(budget, np.full(len(view.anchors), 1.0 / len(view.anchors)))
