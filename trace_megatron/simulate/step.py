"""One simulated step: the selector's plans, the model's outcomes, and what they are worth.

Legend: P prompts, K rollouts (bare ones first, prompt by prompt), A anchors of a prompt, S most turns of a rollout.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from trace_megatron.algorithm.selectors import PrefixView, RootView, Selector, fallback_rollouts
from trace_megatron.algorithm.tree import CONTINUATION_UNITS
from trace_megatron.simulate.model import OutcomeModel, Paths, predict
from trace_megatron.types import Anchor

_VISITED_ROLLOUTS = 8  # of an earlier visit, for selectors that look at success rates


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """What one step's budget bought."""

    effective_ratio: float
    """Share of the prompts with rollouts that have a success and a failure."""
    mixed_trees: float
    """Their number."""
    contrasts_per_unit: float
    """Pairs of a success and a failure in one tree, per unit."""
    gradient_per_unit: float
    """Expected squared gradient per unit, where tokens' score vectors are uncorrelated and of unit norm: the sum over
    tokens of (sum over the leaves below of R - mean of the prompt) squared. For a flat group of m rollouts of n
    tokens its expectation is n (m - 1) v (1 - v)."""
    units: float
    tokens: float
    """Action tokens sampled."""


@dataclass(frozen=True, slots=True)
class _Continuations:
    """[K] each."""

    parents: np.ndarray
    """Bare rollout."""
    turns: np.ndarray
    """Turns inherited."""


def simulate_step(
    model: OutcomeModel, selector: Selector, predictor_error: float, rng: np.random.Generator
) -> StepOutcome:
    """Draw the candidates, spend one step's budget as the selector says, and measure the trees."""
    success_probs = model.draw_prompts(selector.num_candidates, rng)
    view = RootView(
        prompt_ids=tuple(map(str, range(success_probs.size))),
        success_probs=predict(success_probs, predictor_error, rng),
        success_rates=rng.binomial(_VISITED_ROLLOUTS, success_probs) / _VISITED_ROLLOUTS,
        rollout_tokens=np.full(success_probs.size, _mean_turns(model) * model.turn_tokens),
    )
    counts = selector.select_roots(view, selector.root_budget, rng)
    owners = np.repeat(np.arange(counts.size), counts)
    bare = model.play(success_probs[owners], np.zeros(owners.size, dtype=np.int64), rng)
    continuations, extra = _plan_continuations(selector, counts, bare, model, predictor_error, rng)
    if extra.any():  # prompts without a prefix: more bare rollouts for the same units
        more_owners = np.repeat(np.arange(counts.size), extra)
        more = model.play(success_probs[more_owners], np.zeros(more_owners.size, dtype=np.int64), rng)
        owners, bare = np.concatenate([owners, more_owners]), _joined(bare, more)
    starts = bare.success_probs[continuations.parents, continuations.turns]
    return measure(owners, bare, continuations, model.play(starts, continuations.turns, rng), model.turn_tokens)


def measure(
    owners: np.ndarray, bare: Paths, continuations: _Continuations, continued: Paths, turn_tokens: float
) -> StepOutcome:
    """Worth of the trees. ``owners`` [K]: prompt of each bare rollout."""
    leaf_owners = np.concatenate([owners, owners[continuations.parents]])
    rewards = np.concatenate([bare.rewards, continued.rewards])
    num_leaves = np.bincount(leaf_owners)
    successes = np.bincount(leaf_owners, weights=rewards)
    active = num_leaves > 0
    pairs = successes * (num_leaves - successes)
    means = successes / np.maximum(num_leaves, 1)
    advantages = rewards - means[leaf_owners]
    own_turns = continued.num_turns - continuations.turns
    units = owners.size + CONTINUATION_UNITS * continuations.turns.size
    return StepOutcome(
        effective_ratio=float(np.mean(pairs[active] > 0)),
        mixed_trees=float(np.sum(pairs > 0)),
        contrasts_per_unit=float(pairs.sum() / units),
        gradient_per_unit=turn_tokens * _squared_gradient(bare, continuations, own_turns, advantages) / units,
        units=float(units),
        tokens=float(turn_tokens * (bare.num_turns.sum() + own_turns.sum())),
    )


def _squared_gradient(bare: Paths, continuations: _Continuations, own_turns: np.ndarray, advantages: np.ndarray):
    """Sum over turns of the squared net advantage of the leaves below."""
    num_bare, most = bare.num_turns.size, bare.success_probs.shape[1] - 1
    below = np.zeros((num_bare, most + 1))  # column t: leaves that leave the bare rollout after turn t
    np.add.at(below, (np.arange(num_bare), bare.num_turns), advantages[:num_bare])
    np.add.at(below, (continuations.parents, continuations.turns), advantages[num_bare:])
    net = np.cumsum(below[:, ::-1], axis=1)[:, ::-1][:, 1:]  # of turn t: whoever leaves at t or later
    return float((net**2).sum() + (own_turns * advantages[num_bare:] ** 2).sum())


def _plan_continuations(
    selector: Selector,
    counts: np.ndarray,
    bare: Paths,
    model: OutcomeModel,
    predictor_error: float,
    rng: np.random.Generator,
) -> tuple[_Continuations, np.ndarray]:
    """The continuations of all prompts, and the bare rollouts [P] of prompts that have no prefix instead."""
    extra = np.zeros(counts.size, dtype=np.int64)
    parents: list[np.ndarray] = []
    turns: list[np.ndarray] = []
    predicted = predict(bare.success_probs, predictor_error, rng) if selector.needs_prefix_scores else None
    ends = np.cumsum(counts)
    for prompt in np.flatnonzero(counts) if selector.continuations else ():
        rollouts = np.arange(ends[prompt] - counts[prompt], ends[prompt])
        budget = selector.prefix_budget(int(counts[prompt]))
        lengths = bare.num_turns[rollouts] - 1  # prefixes of each
        if not lengths.any():
            extra[prompt] = fallback_rollouts(budget)
            continue
        at = np.repeat(rollouts, lengths)
        turn = np.concatenate([np.arange(1, length + 1) for length in lengths])
        view = PrefixView(
            anchors=tuple(map(Anchor, (at - rollouts[0]).tolist(), turn.tolist())),
            success_probs=np.full(at.size, 0.5) if predicted is None else predicted[at, turn],
            rewards=bare.rewards[at],
            remaining_tokens=(bare.num_turns[at] - turn) * model.turn_tokens,
        )
        planned = selector.select_prefixes(view, budget, rng)
        parents.append(np.repeat(at, planned))
        turns.append(np.repeat(turn, planned))
    none = np.zeros(0, dtype=np.int64)
    return _Continuations(np.concatenate([none, *parents]), np.concatenate([none, *turns])), extra


def _mean_turns(model: OutcomeModel) -> float:
    return float(model.turn_probs @ np.arange(1, model.turn_probs.size + 1))


def _joined(first: Paths, second: Paths) -> Paths:
    return Paths(
        np.concatenate([first.success_probs, second.success_probs]),
        np.concatenate([first.num_turns, second.num_turns]),
        np.concatenate([first.rewards, second.rewards]),
    )
