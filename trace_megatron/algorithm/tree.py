"""The structure of a rollout tree: one node per sampled turn, below a root node that is the prompt.

A rollout owns the nodes of its own turns; what it inherits it shares with the rollout that it continues. Sharing is by
inheritance, never by equal ids. Legend: N nodes, L leaves (trained rollouts).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from trace_megatron.types import ROOT, Anchor, RolloutTree, Turn

CONTINUATION_UNITS = 0.5
"""Price of a continuation where a bare rollout costs 1. arXiv 2606.11119, budget accounting."""

SUCCESS_THRESHOLD = 0.5
"""A reward above it counts as a success; only reports use it, learning uses the reward itself."""


@dataclass(frozen=True, slots=True)
class TreeStructure:
    """A checked tree with its nodes numbered: 0 is the root, then each rollout's own turns in order."""

    tree: RolloutTree
    parents: tuple[int, ...]
    """[N], smaller than the node itself; -1 at the root."""
    children: tuple[tuple[int, ...], ...]
    """[N], in the order of the rollouts."""
    anchors: tuple[Anchor, ...]
    """[N] the history that ends with the node, named by the rollout that sampled the node; ROOT at the root."""
    turns: tuple[Turn | None, ...]
    """[N], None at the root."""
    rollout_paths: tuple[tuple[int, ...], ...]
    """Per rollout, its nodes from the root to its last turn, both included: entry t is the history after t turns."""
    leaves: tuple[int, ...]
    """[L] indices into ``tree.rollouts`` of the trained ones."""
    num_leaves: tuple[int, ...]
    """[N] trained leaves at or below the node."""

    @property
    def num_nodes(self) -> int:
        return len(self.parents)

    @property
    def paths(self) -> tuple[tuple[int, ...], ...]:
        """[L] the trained rollouts' paths."""
        return tuple(self.rollout_paths[leaf] for leaf in self.leaves)


def build_structure(tree: RolloutTree) -> TreeStructure:
    """Number the nodes of a tree. Raises ValueError where the tree is not well formed."""
    check_tree(tree)
    parents, anchors, turns = [-1], [ROOT], [None]
    rollout_paths: list[list[int]] = []
    for index, rollout in enumerate(tree.rollouts):
        inherited = [0] if rollout.anchor == ROOT else rollout_paths[rollout.anchor.rollout]
        path = inherited[: rollout.anchor.turn + 1]
        for turn in rollout.turns:
            parents.append(path[-1])
            anchors.append(Anchor(index, len(path)))
            turns.append(turn)
            path.append(len(parents) - 1)
        rollout_paths.append(path)
    children: list[list[int]] = [[] for _ in parents]
    for node, parent in enumerate(parents[1:], 1):
        children[parent].append(node)
    leaves = tuple(index for index, rollout in enumerate(tree.rollouts) if rollout.trained)
    num_leaves = [0] * len(parents)
    for leaf in leaves:
        for node in rollout_paths[leaf]:
            num_leaves[node] += 1
    return TreeStructure(
        tree=tree,
        parents=tuple(parents),
        children=tuple(map(tuple, children)),
        anchors=tuple(anchors),
        turns=tuple(turns),
        rollout_paths=tuple(map(tuple, rollout_paths)),
        leaves=leaves,
        num_leaves=tuple(num_leaves),
    )


def node_ids(structure: TreeStructure, node: int) -> tuple[int, ...]:
    """Token ids of a node: the prompt, or action and observation. What follows a last action is left out."""
    turn = structure.turns[node]
    if turn is None:
        return structure.tree.prompt.token_ids
    return turn.action_ids + turn.observation_ids if structure.children[node] else turn.action_ids


def node_size(structure: TreeStructure, node: int) -> int:
    """``len(node_ids(structure, node))``."""
    turn = structure.turns[node]
    if turn is None:
        return len(structure.tree.prompt.token_ids)
    return len(turn.action_ids) + (len(turn.observation_ids) if structure.children[node] else 0)


def history_path(structure: TreeStructure, anchor: Anchor) -> tuple[int, ...]:
    """Nodes from the root to the end of an anchor's history. Raises ValueError where nobody visited it."""
    if anchor == ROOT:
        return (0,)
    known = 0 <= anchor.rollout < len(structure.rollout_paths)
    if not known or not 1 <= anchor.turn < len(structure.rollout_paths[anchor.rollout]):
        raise ValueError(f"prompt {structure.tree.prompt.prompt_id}: expected a visited history, found {anchor}")
    return structure.rollout_paths[anchor.rollout][: anchor.turn + 1]


def check_tree(tree: RolloutTree) -> None:
    """Raise ValueError, naming the prompt and the rollout, unless the tree is well formed."""
    if not tree.prompt.token_ids:
        raise ValueError(f"prompt {tree.prompt.prompt_id}: expected at least one token, found none")
    lengths: list[int] = []
    for index, rollout in enumerate(tree.rollouts):
        where = f"prompt {tree.prompt.prompt_id}, rollout {index}"
        anchor = rollout.anchor
        if anchor != ROOT:
            if not 0 <= anchor.rollout < index:
                raise ValueError(f"{where}: expected an anchor at an earlier rollout, found {anchor}")
            if not 1 <= anchor.turn < lengths[anchor.rollout]:
                raise ValueError(
                    f"{where}: expected an anchor turn from 1 to {lengths[anchor.rollout] - 1}, found {anchor}"
                )
        lengths.append(anchor.turn + len(rollout.turns))
        for turn in rollout.turns:
            if not turn.action_ids or len(turn.action_ids) != len(turn.action_logprobs):
                raise ValueError(
                    f"{where}: expected an action with one logprob per token, "
                    f"found {len(turn.action_ids)} tokens and {len(turn.action_logprobs)} logprobs"
                )
        if rollout.trained:
            if rollout.status.failed or not rollout.turns:
                raise ValueError(
                    f"{where}: expected a finished rollout with turns where trained, found {rollout.status}"
                )
            if not (math.isfinite(rollout.reward) and 0.0 <= rollout.reward <= 1.0):
                raise ValueError(f"{where}: expected a reward in [0, 1], found {rollout.reward}")


def num_turns(tree: RolloutTree, rollout: int) -> int:
    """Turns of the whole path of a rollout, inherited ones included."""
    return tree.rollouts[rollout].anchor.turn + len(tree.rollouts[rollout].turns)


def rollout_turns(tree: RolloutTree, rollout: int) -> tuple[Turn, ...]:
    """All turns of a rollout's path, inherited ones first."""
    anchor, own = tree.rollouts[rollout].anchor, tree.rollouts[rollout].turns
    return own if anchor == ROOT else rollout_turns(tree, anchor.rollout)[: anchor.turn] + own


def history_ids(tree: RolloutTree, anchor: Anchor) -> tuple[int, ...]:
    """Token ids of the history at an anchor: prompt, then actions and observations. Nothing is re-tokenised."""
    turns = () if anchor == ROOT else rollout_turns(tree, anchor.rollout)[: anchor.turn]
    if len(turns) != anchor.turn:
        raise ValueError(f"prompt {tree.prompt.prompt_id}: expected a visited history, found {anchor}")
    ids = list(tree.prompt.token_ids)
    for turn in turns:
        ids += turn.action_ids
        ids += turn.observation_ids
    return tuple(ids)


def prefix_anchors(tree: RolloutTree) -> tuple[Anchor, ...]:
    """Visited prefixes (j, t), 1 <= t < T_j, of the bare rollouts whose outcome is known. arXiv 2606.11119, stage 2."""
    return tuple(
        Anchor(index, turn)
        for index, rollout in enumerate(tree.rollouts)
        if rollout.anchor == ROOT and rollout.trained
        for turn in range(1, len(rollout.turns))
    )


def bare_rollout(tree: RolloutTree, rollout: int) -> int:
    """The bare rollout from which a rollout descends; itself where it is bare."""
    while tree.rollouts[rollout].anchor != ROOT:
        rollout = tree.rollouts[rollout].anchor.rollout
    return rollout


def num_units(tree: RolloutTree) -> float:
    """Units spent: 1 a bare rollout, 1/2 a continuation. Failed ones count, for they were spent."""
    return math.fsum(1.0 if rollout.anchor == ROOT else CONTINUATION_UNITS for rollout in tree.rollouts)


def num_generated_tokens(tree: RolloutTree) -> int:
    """Action tokens sampled for the tree, each once, those of failed rollouts included."""
    return sum(len(turn.action_ids) for rollout in tree.rollouts for turn in rollout.turns)


def num_contrasts(tree: RolloutTree) -> int:
    """Pairs of a success and a failure among the trained leaves."""
    outcomes = [rollout.reward > SUCCESS_THRESHOLD for rollout in tree.rollouts if rollout.trained]
    return sum(outcomes) * (len(outcomes) - sum(outcomes))


def is_mixed(tree: RolloutTree) -> bool:
    """Whether the trained leaves hold at least one success and one failure (a success: reward > 1/2)."""
    return num_contrasts(tree) > 0
