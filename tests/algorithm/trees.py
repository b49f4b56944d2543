"""Trees for the tests: written by hand in one line a rollout, or random."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Sequence

from trace_megatron.types import ROOT, Anchor, Prompt, Rollout, RolloutStatus, RolloutTree, Task, Turn

VOCABULARY = 23


def make_turn(num_actions: int, num_observations: int, rng: random.Random) -> Turn:
    ids = [rng.randrange(VOCABULARY) for _ in range(num_actions + num_observations)]
    logprobs = tuple(rng.uniform(-4, -0.1) for _ in range(num_actions))
    return Turn(tuple(ids[:num_actions]), logprobs, tuple(ids[num_actions:]), 0)


def make_rollout(
    anchor: Anchor, shape: Sequence[tuple[int, int]], reward: float, rng: random.Random, *, trained: bool = True
) -> Rollout:
    """``shape``: (action tokens, observation tokens) of each own turn."""
    turns = tuple(make_turn(a, o, rng) for a, o in shape)
    return Rollout(anchor, turns, reward, RolloutStatus.FINISHED, trained)


def make_tree(*rollouts: Rollout, prompt_ids: Sequence[int] = (1, 2, 3), name: str = "p") -> RolloutTree:
    return RolloutTree(Prompt(name, Task(f"task-{name}", (), {}), tuple(prompt_ids)), tuple(rollouts))


def outcome_tree(*specs: tuple) -> RolloutTree:
    """A tree of one-token turns from (anchor, own turns, reward[, trained])."""
    rng = random.Random(0)
    return make_tree(*(make_rollout(s[0], [(1, 0)] * s[1], s[2], rng, trained=(*s, True)[3]) for s in specs))


def random_tree(rng: random.Random, name: str = "p", rewards: Sequence[float] = (0.0, 1.0)) -> RolloutTree:
    """Bare rollouts, continuations, continuations of continuations; some untrained or failed, forks of any size."""
    rollouts: list[Rollout] = []
    lengths: list[int] = []
    for index in range(rng.randint(1, 8)):
        parents = [j for j in range(index) if lengths[j] > 1]
        anchor = ROOT
        if parents and rng.random() < 0.6:
            parent = rng.choice(parents)
            anchor = Anchor(parent, rng.randint(1, lengths[parent] - 1))
        shape = [(rng.randint(1, 4), rng.randint(0, 3)) for _ in range(rng.randint(1, 4))]
        trained = rng.random() < 0.85
        rollout = make_rollout(anchor, shape, rng.choice(rewards), rng, trained=trained)
        if not trained and rng.random() < 0.5:
            rollout = dataclasses.replace(rollout, status=RolloutStatus.ENV_ERROR, reward=0.0)
        rollouts.append(rollout)
        lengths.append(anchor.turn + len(shape))
    prompt = [rng.randrange(VOCABULARY) for _ in range(rng.randint(1, 5))]
    return make_tree(*rollouts, prompt_ids=prompt, name=name)


def with_logprobs(tree: RolloutTree, logprob: Callable[[int, int], Sequence[float]]) -> RolloutTree:
    """The tree with ``logprob(rollout, own turn)`` as the action logprobs of every turn."""
    rollouts = []
    for index, rollout in enumerate(tree.rollouts):
        turns = tuple(
            dataclasses.replace(turn, action_logprobs=tuple(logprob(index, own)))
            for own, turn in enumerate(rollout.turns)
        )
        rollouts.append(dataclasses.replace(rollout, turns=turns))
    return dataclasses.replace(tree, rollouts=tuple(rollouts))
