"""One file per method, all under one protocol: ``build_selector`` makes the one that the configuration names."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from trace_megatron.algorithm.selectors.base import (
    PrefixView,
    RootView,
    Selector,
    fallback_rollouts,
    prefix_view,
    root_view,
)
from trace_megatron.algorithm.selectors.dapo import DAPOSelector
from trace_megatron.algorithm.selectors.history import PromptHistory
from trace_megatron.algorithm.selectors.knapsack import KnapsackSelector
from trace_megatron.algorithm.selectors.pcl import PCLSelector
from trace_megatron.algorithm.selectors.random import RandomSelector
from trace_megatron.algorithm.selectors.trace import TraceSelector
from trace_megatron.algorithm.selectors.treepo import TreePOSelector
from trace_megatron.algorithm.selectors.uniform import UniformSelector
from trace_megatron.errors import UserError

if TYPE_CHECKING:
    from trace_megatron.config import BudgetConfig, MethodConfig

__all__ = [
    "SELECTORS",
    "PrefixView",
    "PromptHistory",
    "RootView",
    "Selector",
    "build_selector",
    "fallback_rollouts",
    "prefix_view",
    "root_view",
]

SELECTORS: dict[str, Callable[[BudgetConfig, dict[str, Any]], Selector]] = {
    "trace": TraceSelector,
    "uniform": UniformSelector,
    "random": RandomSelector,
    "pcl": PCLSelector,
    "treepo": TreePOSelector,
    "dapo": DAPOSelector,
    "knapsack": KnapsackSelector,
}


def build_selector(method: MethodConfig, budget: BudgetConfig) -> Selector:
    """The selector of a configuration. UserError on an unknown name or option, or a budget that cannot be spent."""
    if method.selector not in SELECTORS:
        nearest = difflib.get_close_matches(method.selector, SELECTORS, n=1, cutoff=0.0)[0]
        raise UserError(f"unknown selector '{method.selector}': did you mean '{nearest}'?")
    return SELECTORS[method.selector](budget, method.options)
