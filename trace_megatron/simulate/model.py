"""The stated model of outcomes.

A prompt succeeds with probability V_0 ~ Beta. Turn by turn the chance of success moves as a bounded martingale,
V_t ~ Beta(c V_{t-1}, c (1 - V_{t-1})), and the last turn decides: R ~ Bernoulli(V_{T-1}). So V_t = E[R | first t
turns] is what a perfect predictor would say. A large c decides late, a small one early. The number of turns T is
independent of the outcome; a continuation after t turns has T > t of the same distribution.

Legend: P prompts, K rollouts, S most turns of a rollout.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from trace_megatron.algorithm.tree import num_turns
from trace_megatron.config import SimulateConfig
from trace_megatron.errors import UserError
from trace_megatron.tree_files import read_trees
from trace_megatron.types import ROOT

_CERTAIN = 1e-9
"""A chance this near to 0 or 1 moves no more: Beta's parameters would underflow."""


@dataclass(frozen=True, slots=True)
class Paths:
    """Rollouts that were played to their end."""

    success_probs: np.ndarray
    """[K, S] V_t at column t, from where the rollout starts; what lies before is 0, the end and beyond the reward."""
    num_turns: np.ndarray
    """[K] int64, of the whole path."""
    rewards: np.ndarray
    """[K] float64, 0 or 1."""


@dataclass(frozen=True, slots=True)
class OutcomeModel:
    base_rate: float
    """Mean of V_0."""
    prompt_concentration: float
    """a + b of V_0's Beta: small, prompts are solved always or never; large, all alike."""
    turn_concentration: float
    """c."""
    turn_probs: np.ndarray
    """[S] chance of T = 1, 2, ..., S turns."""
    turn_tokens: float
    """Mean action tokens of a turn."""

    def draw_prompts(self, num_prompts: int, rng: np.random.Generator) -> np.ndarray:
        """[P] V_0."""
        a = self.base_rate * self.prompt_concentration
        return rng.beta(a, self.prompt_concentration - a, num_prompts)

    def play(self, start_probs: np.ndarray, start_turns: np.ndarray, rng: np.random.Generator) -> Paths:
        """One rollout for each start: V and turns already taken, [K]; to its end."""
        most = self.turn_probs.size
        reached = np.concatenate([[0.0], np.cumsum(self.turn_probs)])
        reached[-1] = 1.0
        low = reached[start_turns]
        draws = low + (1.0 - low) * rng.random(start_turns.size)
        turns = np.maximum(np.searchsorted(reached, draws, side="right"), start_turns + 1)
        turns = np.minimum(turns, most)
        probs = np.zeros((start_turns.size, most + 1))
        now = start_probs.astype(np.float64)
        for turn in range(most + 1):
            walking = (turn > start_turns) & (turn < turns)
            now[walking] = self._next(now[walking], rng)
            ending = turn == turns
            now[ending] = rng.random(int(ending.sum())) < now[ending]
            probs[:, turn] = np.where(turn >= start_turns, now, 0.0)
        return Paths(probs, turns, now)

    def _next(self, probs: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        undecided = (probs > _CERTAIN) & (probs < 1.0 - _CERTAIN)
        moved = probs.copy()
        c = self.turn_concentration
        moved[undecided] = rng.beta(c * probs[undecided], c * (1.0 - probs[undecided]))
        return moved


def predict(success_probs: np.ndarray, error: float, rng: np.random.Generator) -> np.ndarray:
    """What a predictor says whose logit is off by a normal error of standard deviation ``error``; any shape."""
    clipped = np.clip(success_probs, _CERTAIN, 1.0 - _CERTAIN)
    logits = np.log(clipped) - np.log1p(-clipped)
    return 1.0 / (1.0 + np.exp(-(logits + error * rng.standard_normal(clipped.shape))))


def build_model(config: SimulateConfig, max_turns: int) -> OutcomeModel:
    """The model of a configuration. Raises UserError for numbers out of range and for a run without trees."""
    for name in ("base_rate", "stop_prob"):
        if not 0.0 < getattr(config, name) < 1.0:
            raise UserError(f"expected simulate.{name} between 0 and 1, found {getattr(config, name)}")
    for name in ("prompt_concentration", "turn_concentration", "turn_tokens"):
        if not getattr(config, name) > 0.0:
            raise UserError(f"expected a positive simulate.{name}, found {getattr(config, name)}")
    if config.predictor_error < 0.0 or config.steps < 1 or max_turns < 1:
        raise UserError(
            "expected simulate.predictor_error >= 0, simulate.steps >= 1 and rollout.max_turns >= 1, found "
            f"{config.predictor_error}, {config.steps} and {max_turns}"
        )
    if config.recorded_run:
        turn_probs, turn_tokens = read_lengths(Path(config.recorded_run))
    else:
        turn_probs, turn_tokens = truncated_geometric(config.stop_prob, max_turns), config.turn_tokens
    return OutcomeModel(
        config.base_rate, config.prompt_concentration, config.turn_concentration, turn_probs, turn_tokens
    )


def truncated_geometric(stop_prob: float, max_turns: int) -> np.ndarray:
    """[S] every turn is the last with ``stop_prob``; the limit ends what is left."""
    probs = stop_prob * (1.0 - stop_prob) ** np.arange(max_turns)
    probs[-1] = (1.0 - stop_prob) ** (max_turns - 1)
    return probs


def read_lengths(run: Path) -> tuple[np.ndarray, float]:
    """Turn counts of a run's bare rollouts as chances [S], and its mean action tokens of a turn."""
    files = sorted((run / "trees").glob("*.jsonl.zst"))
    if not files:
        raise UserError(f"expected trees of a run at '{run / 'trees'}', found none: set simulate.recorded_run")
    counts: list[int] = []
    tokens: list[int] = []
    for tree in (tree for file in files for tree in read_trees(file)):
        for index, rollout in enumerate(tree.rollouts):
            if rollout.anchor == ROOT and rollout.turns:
                counts.append(num_turns(tree, index))
            tokens += [len(turn.action_ids) for turn in rollout.turns]
    if not counts:
        raise UserError(f"expected rollouts in the trees of '{run}', found none")
    histogram = np.bincount(counts)[1:]
    return histogram / histogram.sum(), float(np.mean(tokens))
