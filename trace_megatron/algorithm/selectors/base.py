"""What every selector shares: the views it looks at, the protocol, and how a budget is spread.

P candidate prompts, A anchors of one prompt. All selectors spend the same units for the same budget section,
M (1 + N / 2) with a bare rollout at 1 and a continuation at 1/2 (arXiv 2606.11119, budget accounting): a flat one turns
all of them into bare rollouts.
"""

from __future__ import annotations

import difflib
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch

from trace_megatron.algorithm.scores import Scores
from trace_megatron.algorithm.tree import CONTINUATION_UNITS, prefix_anchors
from trace_megatron.errors import UserError
from trace_megatron.types import Anchor, Prompt, RolloutTree

if TYPE_CHECKING:  # config.py reads YAML; this package needs only torch and NumPy
    from trace_megatron.algorithm.selectors.history import PromptHistory
    from trace_megatron.config import BudgetConfig

OptionsT = TypeVar("OptionsT")


@dataclass(frozen=True, slots=True)
class RootView:
    """What is known of the candidate prompts before any rollout of the step."""

    prompt_ids: tuple[str, ...]
    """[P]"""
    success_probs: Scores
    """[P] float64, the predictor's V; 1/2 where nobody was asked."""
    success_rates: np.ndarray
    """[P] float64, mean reward of the bare rollouts at the last visit; NaN for a task not visited yet."""
    rollout_tokens: np.ndarray
    """[P] float64, mean sampled tokens of a bare rollout at the last visit; NaN for a task not visited yet."""


@dataclass(frozen=True, slots=True)
class PrefixView:
    """What is known of the visited prefixes of one prompt's bare rollouts."""

    anchors: tuple[Anchor, ...]
    """[A] rollout by rollout."""
    success_probs: Scores
    """[A] float64, the predictor's V(H); 1/2 where nobody was asked."""
    rewards: np.ndarray
    """[A] float64, what the prefix's own rollout earned."""
    remaining_tokens: np.ndarray
    """[A] float64, tokens that the prefix's own rollout sampled after it."""


def root_view(
    prompts: Sequence[Prompt], success_probs: Scores | None = None, history: PromptHistory | None = None
) -> RootView:
    """The view of candidate prompts; ``success_probs`` [P]."""
    unknown = np.full(len(prompts), np.nan)
    return RootView(
        prompt_ids=tuple(prompt.prompt_id for prompt in prompts),
        success_probs=_probs(success_probs, len(prompts)),
        success_rates=unknown if history is None else history.success_rates(prompts),
        rollout_tokens=unknown if history is None else history.rollout_tokens(prompts),
    )


def prefix_view(tree: RolloutTree, success_probs: Scores | None = None) -> PrefixView:
    """The view of ``prefix_anchors(tree)``; ``success_probs`` [A] in that order."""
    anchors = prefix_anchors(tree)
    rollouts = [tree.rollouts[anchor.rollout] for anchor in anchors]
    remaining = [
        sum(len(turn.action_ids) for turn in rollout.turns[anchor.turn :])
        for rollout, anchor in zip(rollouts, anchors, strict=True)
    ]
    return PrefixView(
        anchors=anchors,
        success_probs=_probs(success_probs, len(anchors)),
        rewards=np.array([rollout.reward for rollout in rollouts], dtype=np.float64),
        remaining_tokens=np.array(remaining, dtype=np.float64),
    )


class Selector:
    """Decides where a step's budget goes. This base: flat, no scores, every tree kept.

    A method is a subclass with its own plan; the loop that calls it is the same for all.
    """

    needs_root_scores = False
    """Whether ``select_roots`` reads the predictor's scores."""
    needs_prefix_scores = False

    def __init__(self, budget: BudgetConfig) -> None:
        if budget.candidates < 1 or budget.rollouts < 2 or budget.continuations < 0:
            raise UserError(
                "expected budget.candidates >= 1, budget.rollouts >= 2 and budget.continuations >= 0, found "
                f"{budget.candidates} candidates, {budget.rollouts} rollouts, {budget.continuations} continuations"
            )
        self.num_candidates = budget.candidates
        """Prompts to draw for a step."""
        self.root_budget = int(budget.rollouts * (1 + CONTINUATION_UNITS * budget.continuations))
        """Bare rollouts of a step."""
        self.continuations = 0
        """Continuations owed per bare rollout."""

    def select_roots(self, view: RootView, budget: int, rng: np.random.Generator) -> np.ndarray:
        """Bare rollouts per candidate, int64 [P], that sum to ``budget`` (``root_budget``)."""
        raise NotImplementedError

    def prefix_budget(self, num_rollouts: int) -> int:
        """Continuations of a prompt that was given ``num_rollouts`` bare rollouts."""
        return num_rollouts * self.continuations

    def select_prefixes(self, view: PrefixView, budget: int, rng: np.random.Generator) -> np.ndarray:
        """Continuations per anchor, int64 [A], that sum to ``budget`` (``prefix_budget``); only called with anchors."""
        raise NotImplementedError

    def keep(self, trees: Sequence[RolloutTree]) -> list[RolloutTree]:
        """The trees to train the policy on. Predictor targets and reports take all."""
        return list(trees)


def fallback_rollouts(num_continuations: int) -> int:
    """Bare rollouts for the same units where a prompt has no valid prefix: floor(m N / 2)."""
    return int(num_continuations * CONTINUATION_UNITS)


def spread_evenly(budget: int, size: int) -> np.ndarray:
    """``budget`` over ``size`` rows, int64; what does not divide goes to the first rows, one each."""
    counts = np.full(size, budget // size, dtype=np.int64)
    counts[: budget % size] += 1
    return counts


def spread_over_rollouts(view: PrefixView, budget: int, rng: np.random.Generator) -> np.ndarray:
    """The same number of continuations for every bare rollout with prefixes, each at one drawn uniformly. int64 [A].

    What does not divide goes to rollouts drawn at random, one each.
    """
    counts = np.zeros(len(view.anchors), dtype=np.int64)
    owners = np.array([anchor.rollout for anchor in view.anchors])
    rollouts = rng.permutation(np.unique(owners))
    for rollout, share in zip(rollouts, spread_evenly(budget, rollouts.size), strict=True):
        np.add.at(counts, rng.choice(np.flatnonzero(owners == rollout), share), 1)
    return counts


def affordable_groups(budget: BudgetConfig, group_size: int, units: int) -> int:
    """Prompts that ``units`` afford in groups of ``group_size``; what does not divide makes some groups larger."""
    if group_size < 2:
        raise UserError(f"expected a group of at least 2 rollouts, found {group_size}: one shows no contrast")
    if units < group_size:
        raise UserError(f"expected a budget of at least one group of {group_size} rollouts, found {units} units")
    return checked_groups(budget, units // group_size, units)


def checked_groups(budget: BudgetConfig, num_prompts: int, units: int) -> int:
    """``num_prompts``. UserError where spreading ``units`` over them exceeds ``budget.max_rollouts_per_prompt``."""
    cap, largest = budget.max_rollouts_per_prompt, -(-units // num_prompts)
    if cap and largest > cap:
        raise UserError(
            f"expected groups within budget.max_rollouts_per_prompt={cap}, found {largest} rollouts for a prompt "
            f"({units} over {num_prompts} prompts): raise the cap or lower the group size"
        )
    return num_prompts


def parse_options(cls: type[OptionsT], options: Mapping[str, Any], selector: str) -> OptionsT:
    """``method.options`` as the selector's own record of ints and choices; UserError names the nearest known one."""
    hints = typing.get_type_hints(cls)
    for name, value in options.items():
        where = f"method.options.{name}"
        if name not in hints:
            if not hints:
                raise UserError(f"unknown option '{where}': selector '{selector}' has no options")
            nearest = difflib.get_close_matches(str(name), hints, n=1, cutoff=0.0)[0]
            raise UserError(f"unknown option '{where}' of selector '{selector}': did you mean '{nearest}'?")
        choices = typing.get_args(hints[name])
        if choices and value not in choices:
            raise UserError(f"expected one of {', '.join(choices)} for '{where}', found {value!r}")
        if not choices and (not isinstance(value, int) or isinstance(value, bool)):
            raise UserError(f"expected a whole number for '{where}', found {value!r}")
    return cls(**options)


def _probs(success_probs: Scores | None, size: int) -> Scores:
    if success_probs is None:
        return np.full(size, 0.5)
    on_device = isinstance(success_probs, torch.Tensor)
    probs = success_probs.double() if on_device else np.asarray(success_probs, dtype=np.float64)
    if probs.shape != (size,):
        raise ValueError(f"expected {size} success probabilities, found shape {list(probs.shape)}")
    return probs
