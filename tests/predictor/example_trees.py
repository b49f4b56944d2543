"""Random rollout trees over a vocabulary of bytes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from trace_megatron.types import ROOT, Anchor, Prompt, Rollout, RolloutStatus, RolloutTree, Task, Turn


def make_prompt(token_ids: Sequence[int], name: str = "p") -> Prompt:
    return Prompt(name, Task(f"task-{name}", (), {}), tuple(token_ids))


def make_turn(action: Sequence[int], observation: Sequence[int] = ()) -> Turn:
    return Turn(tuple(action), (-0.5,) * len(action), tuple(observation), 0)


def make_rollout(turns: Sequence[Turn], reward: float, anchor: Anchor = ROOT, trained: bool = True) -> Rollout:
    return Rollout(anchor, tuple(turns), reward, RolloutStatus.FINISHED, trained)


def random_tree(rng: np.random.Generator, name: str, num_bare: int = 3, num_continuations: int = 2) -> RolloutTree:
    """Bare rollouts of 1 to 4 turns and continuations of random prefixes, those of continuations included."""

    def ids(low: int, high: int) -> list[int]:
        return rng.integers(0, 256, rng.integers(low, high)).tolist()

    def turns(number: int) -> list[Turn]:
        return [make_turn(ids(1, 6), ids(1, 5) if index < number - 1 else ()) for index in range(number)]

    rollouts = [make_rollout(turns(rng.integers(1, 5)), float(rng.integers(0, 2))) for _ in range(num_bare)]
    lengths = [len(rollout.turns) for rollout in rollouts]
    for _ in range(num_continuations):
        parents = [index for index, length in enumerate(lengths) if length > 1]
        if not parents:
            break
        parent = int(rng.choice(parents))
        anchor = Anchor(parent, int(rng.integers(1, lengths[parent])))
        rollouts.append(make_rollout(turns(rng.integers(1, 4)), float(rng.integers(0, 2)), anchor))
        lengths.append(anchor.turn + len(rollouts[-1].turns))
    return RolloutTree(make_prompt(ids(1, 12), name), tuple(rollouts))


def random_trees(seed: int, number: int, **options: int) -> list[RolloutTree]:
    rng = np.random.default_rng(seed)
    return [random_tree(rng, f"p{index}", **options) for index in range(number)]
