"""`trace-megatron simulate`: methods at one budget, and budgets of one method, on the stated model."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from trace_megatron.algorithm.selectors import Selector, build_selector
from trace_megatron.config import BudgetConfig, Config, MethodConfig
from trace_megatron.errors import UserError
from trace_megatron.simulate.model import OutcomeModel, build_model
from trace_megatron.simulate.step import StepOutcome, simulate_step

METHODS = ("uniform", "pcl", "treepo", "trace")
CONTINUATIONS = (0, 1, 2, 4, 6)  # N of the shapes tried at equal units


@dataclass(frozen=True, slots=True)
class Estimate:
    """Mean over the simulated steps with its standard error."""

    mean: float
    standard_error: float


@dataclass(frozen=True, slots=True)
class Row:
    """One method at one budget."""

    method: str
    rollouts: int
    """M."""
    continuations: int
    """N."""
    estimates: dict[str, Estimate]
    """By field of ``StepOutcome``."""


def compare_methods(config: Config, methods: Sequence[str] = METHODS) -> list[Row]:
    """The methods at the configured budget; the configured one with its own options."""
    model = build_model(config.simulate, config.rollout.max_turns)
    rows = []
    for name in methods:
        method = config.method if name == config.method.selector else MethodConfig(selector=name)
        rows.append(_simulate(config, model, build_selector(method, config.budget), name, config.budget))
    return rows


def compare_shapes(config: Config, shapes: Sequence[tuple[int, int]] = ()) -> list[Row]:
    """The configured method at other (M, N); without ``shapes``, at those that cost as much as the configured one."""
    model = build_model(config.simulate, config.rollout.max_turns)
    budgets = [
        dataclasses.replace(config.budget, rollouts=rollouts, continuations=continuations)
        for rollouts, continuations in shapes or list(equal_shapes(config.budget))
    ]
    name = config.method.selector
    return [_simulate(config, model, build_selector(config.method, budget), name, budget) for budget in budgets]


def equal_shapes(budget: BudgetConfig) -> Iterator[tuple[int, int]]:
    """(M, N) with M (1 + N / 2) of the budget, to within half a bare rollout with its continuations."""
    units = budget.rollouts * (1 + budget.continuations / 2)
    for continuations in sorted({*CONTINUATIONS, budget.continuations}):
        rollouts = round(units / (1 + continuations / 2))
        if rollouts >= 2:
            yield rollouts, continuations


def parse_shapes(text: str) -> list[tuple[int, int]]:
    """``"512,2 1024,2"`` as (M, N). Raises UserError."""
    shapes = []
    for part in text.split():
        numbers = part.split(",")
        if len(numbers) != 2 or not all(number.isdigit() for number in numbers):
            raise UserError(f"expected shapes as 'M,N M,N ...', found '{part}'")
        shapes.append((int(numbers[0]), int(numbers[1])))
    return shapes


def advise(rows: Sequence[Row]) -> str:
    """One sentence: which shape finds most mixed trees, which the largest squared gradient, at these units."""
    trees = max(rows, key=lambda row: row.estimates["mixed_trees"].mean)
    gradient = max(rows, key=lambda row: row.estimates["gradient_per_unit"].mean)
    text = f"most mixed trees: M = {trees.rollouts}, N = {trees.continuations}"
    if gradient is not trees:
        return f"{text}; largest squared gradient: M = {gradient.rollouts}, N = {gradient.continuations}"
    return f"{text}, and the largest squared gradient"


def _simulate(config: Config, model: OutcomeModel, selector: Selector, name: str, budget: BudgetConfig) -> Row:
    outcomes = []
    for step in range(config.simulate.steps):
        # the same seed for every method: a smaller pool is no luckier by its prompts
        rng = np.random.default_rng((config.run.seed, step))
        outcomes.append(simulate_step(model, selector, config.simulate.predictor_error, rng))
    return Row(name, budget.rollouts, budget.continuations, _estimates(outcomes))


def _estimates(outcomes: Sequence[StepOutcome]) -> dict[str, Estimate]:
    estimates = {}
    for field in dataclasses.fields(StepOutcome):
        values = np.array([getattr(outcome, field.name) for outcome in outcomes])
        error = float(values.std(ddof=1) / math.sqrt(values.size)) if values.size > 1 else math.nan
        estimates[field.name] = Estimate(float(values.mean()), error)
    return estimates
