"""Rollout trees as text, for `trace-megatron inspect`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from trace_megatron.algorithm.tree import SUCCESS_THRESHOLD, is_mixed, num_generated_tokens, num_units, prefix_anchors
from trace_megatron.types import ROOT, Anchor, RolloutTree

Decode = Callable[[Sequence[int]], str]
"""Token ids -> text."""


def describe_trees(trees: Sequence[RolloutTree]) -> Iterator[str]:
    """A line for each tree: its place, what it cost and how it ended."""
    yield f"{len(trees)} trees, {sum(map(is_mixed, trees))} mixed, {sum(map(num_units, trees)):g} units"
    for number, tree in enumerate(trees):
        bare = [rollout for rollout in tree.rollouts if rollout.anchor == ROOT]
        yield (
            f"{number:4}  {tree.prompt.task.task_id}  {len(bare)}+{len(tree.rollouts) - len(bare)} rollouts, "
            f"{num_generated_tokens(tree)} tokens, rewards {' '.join(_outcome(r.reward) for r in tree.rollouts)}"
            f"{'  mixed' if is_mixed(tree) else ''}"
        )


def draw_tree(tree: RolloutTree, decode: Decode) -> Iterator[str]:
    """The prompt, then every rollout's own turns, below the history that it continues."""
    probs = dict(zip(prefix_anchors(tree), tree.prefix_probs, strict=False))
    yield f"prompt {tree.prompt.prompt_id} ({tree.prompt.task.task_id})"
    yield from _indented(decode(tree.prompt.token_ids), 2)
    for index, rollout in enumerate(tree.rollouts):
        origin = "bare" if rollout.anchor == ROOT else f"from turn {rollout.anchor.turn} of {rollout.anchor.rollout}"
        trained = "" if rollout.trained else ", not trained on"
        yield f"rollout {index} ({origin}): reward {rollout.reward:g}, {rollout.status}{trained}"
        for turn_number, turn in enumerate(rollout.turns, rollout.anchor.turn + 1):
            value = probs.get(Anchor(index, turn_number))
            yield f"  turn {turn_number}" + ("" if value is None else f"   V = {value:.3f}")
            yield from _indented(decode(turn.action_ids), 4)
            if turn.observation_ids:
                yield from _indented(decode(turn.observation_ids), 6)


def _outcome(reward: float) -> str:
    return "1" if reward == 1.0 else "0" if reward == 0.0 else f"{reward:.2f}" + "*" * (reward > SUCCESS_THRESHOLD)


def _indented(text: str, columns: int) -> Iterator[str]:
    for line in text.splitlines():
        yield " " * columns + line
