"""Rollout trees for a training step, and the loss and gradient they must give: an HF model, trajectory by trajectory.

The reference knows nothing of packing, masses or Megatron: float64, one trajectory at a time, PPO's formula per token.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from trace_megatron.algorithm.tree import build_structure, node_ids
from trace_megatron.config import LossConfig
from trace_megatron.types import ROOT, Anchor, Prompt, Rollout, RolloutStatus, RolloutTree, Task, Turn

TEMPERATURE = 0.7
RATIOS = (0.4, 0.7, 0.9, 1.02, 1.2, 1.4, 2.0, 3.5)
"""Of trainer to engine at the actions, in turn: on both sides of every clip bound, far from all of them."""


def example_trees(vocab_size: int) -> list[RolloutTree]:
    """Every shape that packing treats differently, with logprobs of 0."""
    rng = np.random.default_rng(7)

    def ids(count: int) -> tuple[int, ...]:
        return tuple(int(token) for token in rng.integers(0, vocab_size, count))

    def turn(action: int | tuple[int, ...], observation: int = 0) -> Turn:
        action_ids = ids(action) if isinstance(action, int) else action
        return Turn(action_ids, (0.0,) * len(action_ids), ids(observation), 0)

    def bare(*turns: Turn) -> Rollout:
        return Rollout(ROOT, turns, 0.0, RolloutStatus.FINISHED)

    def continuation(rollout: int, turns_before: int, *turns: Turn) -> Rollout:
        return Rollout(Anchor(rollout, turns_before), turns, 0.0, RolloutStatus.FINISHED)

    equal_start = ids(3)
    forests = {
        "forks after observations": (
            ids(9),
            [bare(turn(7, 3), turn(5, 2), turn(6)), bare(turn(4, 2), turn(3)), continuation(0, 1, turn(8)),
             continuation(0, 1, turn(4, 1), turn(5)), continuation(0, 2, turn(3)), continuation(3, 2, turn(2))],
        ),
        "one leaf": (ids(6), [bare(turn(9))]),
        "a chain": (ids(4), [bare(turn(3, 2), turn(1, 1), turn(4, 3), turn(2))]),
        "many leaves on one root": (ids(5), [bare(turn(length)) for length in (1, 2, 3, 4, 5, 6)]),
        "a prefix of one token": (ids(1), [bare(turn(1, 0), turn(3)), continuation(0, 1, turn(2))]),
        "two roots that begin with equal ids": (
            ids(3), [bare(turn((*equal_start, 5, 6))), bare(turn((*equal_start, 7)))],
        ),
    }  # fmt: skip
    return [
        RolloutTree(Prompt(name, Task(name, (), {}), prompt_ids), tuple(rollouts))
        for name, (prompt_ids, rollouts) in forests.items()
    ]


def example_advantages(trees: Sequence[RolloutTree]) -> list[np.ndarray]:
    """[L, N] per tree, of both signs, some of them 0, different for every leaf below a shared node."""
    rng = np.random.default_rng(11)
    advantages = []
    for structure in map(build_structure, trees):
        values = rng.normal(size=(len(structure.leaves), structure.num_nodes))
        values[1:, -1] = 0.0
        advantages.append(values)
    return advantages


@dataclass(frozen=True, slots=True)
class Trajectory:
    """One leaf, unpacked. T tokens."""

    tree: int
    token_ids: tuple[int, ...]
    positions: tuple[int, ...]
    """Of the policy's own tokens."""
    keys: tuple[tuple[int, int, int], ...]
    """Per own token (tree, node, index in the action): equal where leaves share it."""
    advantages: tuple[float, ...]
    rollout_logprobs: tuple[float, ...]


def trajectories(trees: Sequence[RolloutTree], advantages: Sequence[np.ndarray]) -> list[Trajectory]:
    unpacked = []
    for index, (tree, values) in enumerate(zip(trees, advantages, strict=True)):
        structure = build_structure(tree)
        for row, path in enumerate(structure.paths):
            tokens: list[int] = []
            own: list[tuple[int, tuple[int, int, int], float, float]] = []
            for node in path:
                turn = structure.turns[node]
                for k, logprob in enumerate(turn.action_logprobs if turn else ()):
                    own.append((len(tokens) + k, (index, node, k), values[row, node], logprob))
                tokens += node_ids(structure, node)
            unpacked.append(Trajectory(index, tuple(tokens), *map(tuple, zip(*own, strict=True))))
    return unpacked


def with_logprobs(trees: Sequence[RolloutTree], logprobs: dict[tuple[int, int, int], float]) -> list[RolloutTree]:
    """The trees with the engine's logprob of every action token, by (tree, node, index)."""
    filled = []
    for index, tree in enumerate(trees):
        rollouts, node = [], 0
        for rollout in tree.rollouts:
            turns = []
            for turn in rollout.turns:
                node += 1
                values = tuple(logprobs[index, node, k] for k in range(len(turn.action_ids)))
                turns.append(replace(turn, action_logprobs=values))
            rollouts.append(replace(rollout, turns=tuple(turns)))
        filled.append(replace(tree, rollouts=tuple(rollouts)))
    return filled


def engine_logprobs(trees: Sequence[RolloutTree], model: torch.nn.Module) -> dict[tuple[int, int, int], float]:
    """Logprobs that give the ratios of ``RATIOS`` in turn, as an engine would report them (float32)."""
    current: dict[tuple[int, int, int], float] = {}
    with torch.no_grad():
        for one in trajectories(trees, example_advantages(trees)):
            current |= dict(zip(one.keys, token_logprobs(model, one)[0].tolist(), strict=True))
    ratios = np.resize(RATIOS, len(current))
    return {
        key: float(np.float32(logprob - math.log(ratio)))
        for (key, logprob), ratio in zip(sorted(current.items()), ratios, strict=True)
    }


def token_logprobs(model: torch.nn.Module, one: Trajectory) -> tuple[torch.Tensor, torch.Tensor]:
    """Logprob of the own tokens and entropy of their distributions, one plain forward pass of the HF model."""
    logits = model(torch.tensor([one.token_ids])).logits[0] / TEMPERATURE
    rows = torch.tensor(one.positions) - 1
    everything = logits.log_softmax(-1)[rows]
    labels = torch.tensor(one.token_ids)[torch.tensor(one.positions)]
    return everything.gather(1, labels[:, None])[:, 0], -(everything.exp() * everything).sum(-1)


@dataclass(frozen=True, slots=True)
class Expected:
    """What a step must report."""

    loss: float
    grad_norm: float
    gradients: dict[str, torch.Tensor]
    """HF name -> float64."""
    statistics: dict[str, float]
    logprobs: list[tuple[float, float]]
    """Per own token of every trajectory, what the engine said and what the model says."""


def expected_step(
    model: torch.nn.Module,
    trees: Sequence[RolloutTree],
    advantages: Sequence[np.ndarray],
    config: LossConfig,
    reference: torch.nn.Module | None = None,
) -> Expected:
    """Plain autograd over the unpacked trajectories; ``model`` is in float64."""
    model.zero_grad()
    unpacked = trajectories(trees, advantages)
    statistics = dict.fromkeys(("ratio_mean", "mismatch_kl", "reference_kl", "entropy"), 0.0)
    tail, total, logprobs = 0.0, 0.0, []
    weights: dict[tuple[int, int, int], float] = {}
    clipped_keys: set[tuple[int, int, int]] = set()
    for one in unpacked:
        weight = 1.0 / (len(unpacked) * len(one.positions))  # seq-mean-token-mean
        current, entropy = token_logprobs(model, one)
        engine = torch.tensor(one.rollout_logprobs, dtype=torch.float32).double()
        ratio = (current - engine).exp()
        advantage = torch.tensor(one.advantages, dtype=torch.float64)
        if config.old_logprobs == "bypass":
            objective, clipped = _objective(ratio, advantage, config)
        else:  # old logprobs are the model's own, so their ratio is 1; importance weights correct for the engine
            importance = ratio.detach().clamp(max=config.importance_cap)
            objective, clipped = _objective((current - current.detach()).exp(), importance * advantage, config)
        loss = -weight * objective.sum()
        kl = torch.zeros_like(current)
        if reference is not None:
            with torch.no_grad():
                other = token_logprobs(reference, one)[0]
            kl = (other - current).exp() - 1 - (other - current)
            loss = loss + config.kl_coef * weight * kl.sum()
        loss.backward()
        total += float(loss.detach())
        logprobs += zip(one.rollout_logprobs, current.tolist(), strict=True)
        tail = max(tail, float((current - engine).detach().abs().max()))
        mismatch = ratio - 1 - (current - engine)
        for key, is_clipped in zip(one.keys, clipped.tolist(), strict=True):
            weights[key] = weights.get(key, 0.0) + weight
            clipped_keys |= {key} if is_clipped else set()
        for name, values in zip(statistics, (ratio, mismatch, kl, entropy), strict=True):
            statistics[name] += weight * float(values.detach().sum())
    # A token counts as clipped where any leaf through it lost its gradient.
    statistics["clip_share"] = sum(weights[key] for key in clipped_keys)
    total_weight = sum(weights.values())
    statistics = {name: value / total_weight for name, value in statistics.items()} | {"ratio_tail": tail}
    gradients: dict[str, torch.Tensor] = {}
    for name, parameter in model.named_parameters():
        gradients |= _as_stored(name, parameter.grad)
    norm = math.sqrt(sum(float(gradient.square().sum()) for gradient in gradients.values()))
    return Expected(total, norm, gradients, statistics, logprobs)


def _as_stored(name: str, gradient: torch.Tensor) -> dict[str, torch.Tensor]:
    """transformers fuses the experts of a layer; a checkpoint keeps them apart."""
    prefix, _, kind = name.rpartition(".")
    if not prefix.endswith(".experts"):
        return {name: gradient}
    parts = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}[kind]
    return {
        f"{prefix}.{expert}.{part}.weight": rows
        for expert, fused in enumerate(gradient)
        for part, rows in zip(parts, fused.chunk(len(parts)), strict=True)
    }


def _objective(ratio: torch.Tensor, advantage: torch.Tensor, config: LossConfig) -> tuple[torch.Tensor, torch.Tensor]:
    """PPO's per-token objective with the dual clip, and where a bound takes the gradient away."""
    inside = ratio.clamp(1 - config.clip_low, 1 + config.clip_high)
    objective = torch.minimum(ratio * advantage, inside * advantage)
    if config.dual_clip:
        objective = torch.where(advantage < 0, torch.maximum(objective, config.dual_clip * advantage), objective)
    (gradient,) = torch.autograd.grad(objective.sum(), ratio, retain_graph=True)
    return objective, (gradient == 0) & (advantage != 0)
