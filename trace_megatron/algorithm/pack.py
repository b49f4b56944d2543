"""From trees and advantages to packs: every shared token once, weights global over the step.

Legend: T packed tokens, L leaves, N nodes. A pack is a forest in preorder; a tree that is too long for one pack is cut
by leaves, so that each leaf's weight lives in exactly one pack. All normalisers come from the unpacked trajectories of
the whole step: the sum of the packs' losses does not depend on how the step was packed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from trace_megatron.algorithm.layout import Layout, preorder
from trace_megatron.algorithm.tree import TreeStructure, build_structure, node_size
from trace_megatron.types import RolloutTree, TreeBatch


def pack_trees(
    trees: Sequence[RolloutTree],
    advantages: Sequence[np.ndarray],
    *,
    aggregation: str = "seq-mean-token-mean",
    packed: bool = True,
) -> TreeBatch:
    """Lay all trees of a step out as one pack.

    ``advantages``: one float64 [L, N] per tree, from ``tree_advantages``. ``aggregation``: as ``loss.aggregation``.
    ``packed=False`` repeats shared tokens: every leaf a root of its own, the same loss. Raises ValueError on trees that
    are not well formed, and on advantages or logprobs that are not finite.
    """
    pieces = _pieces(trees, advantages, aggregation, packed, limit=None)
    return _assemble(pieces)


def pack_micro_batches(
    trees: Sequence[RolloutTree],
    advantages: Sequence[np.ndarray],
    *,
    tokens_per_micro_batch: int,
    num_ranks: int = 1,
    aggregation: str = "seq-mean-token-mean",
    packed: bool = True,
) -> list[list[TreeBatch]]:
    """Lay the trees of a step out as packs: [num_ranks][the same number of packs on every rank].

    A pack holds at most ``tokens_per_micro_batch`` tokens, except that a single trajectory longer than that gets a pack
    of its own. Ranks are balanced by tokens; a rank with nothing left gets a pack of one padding token, weight 0.
    """
    if tokens_per_micro_batch < 1 or num_ranks < 1:
        raise ValueError(f"expected a positive limit and ranks, found {tokens_per_micro_batch} and {num_ranks}")
    pieces = _pieces(trees, advantages, aggregation, packed, tokens_per_micro_batch)
    bins = _fill_bins(pieces, tokens_per_micro_batch, num_ranks)
    per_rank = len(bins) // num_ranks
    ranks: list[list[list[_Piece]]] = [[] for _ in range(num_ranks)]
    for pack in sorted(bins, key=_load, reverse=True):
        open_ranks = [rank for rank in ranks if len(rank) < per_rank]
        min(open_ranks, key=lambda rank: sum(map(_load, rank))).append(pack)
    return [[_assemble(pack) for pack in rank] for rank in ranks]


def pad_batch(batch: TreeBatch, multiple: int) -> TreeBatch:
    """Pad T up to a multiple (at least one). A padding token attends only to itself and has weight 0."""
    size = max(-(-batch.num_tokens // multiple), 1) * multiple
    missing = size - batch.num_tokens
    if missing == 0:
        return batch
    ends = torch.arange(batch.num_tokens + 1, size + 1, dtype=torch.int32)
    return TreeBatch(
        tokens=_extended(batch.tokens, missing, 0),
        position_ids=_extended(batch.position_ids, missing, 0),
        subtree_end=torch.cat([batch.subtree_end, ends]),
        predecessor=_extended(batch.predecessor, missing, -1),
        positive_mass=_extended(batch.positive_mass, missing, 0),
        negative_mass=_extended(batch.negative_mass, missing, 0),
        weight=_extended(batch.weight, missing, 0),
        rollout_logprobs=_extended(batch.rollout_logprobs, missing, 0),
        old_logprobs=_extended(batch.old_logprobs, missing, 0),
        reference_logprobs=_extended(batch.reference_logprobs, missing, 0),
        num_unpacked_tokens=batch.num_unpacked_tokens,
    )


def with_old_logprobs(batch: TreeBatch, old_logprobs: torch.Tensor, importance_cap: float) -> TreeBatch:
    """The decoupled form: the trainer's ``old_logprobs`` [T] as denominator of the ratio.

    Both masses are multiplied by min(pi_old / pi_rollout, importance_cap), which carries no gradient
    (arXiv 2505.24298, truncated). Only trained tokens (weight > 0) are read.
    """
    trained = batch.weight > 0
    old = torch.where(trained, old_logprobs.detach().to(batch.old_logprobs.dtype), 0.0)
    log_ratio = torch.where(trained, old.double() - batch.rollout_logprobs.double(), 0.0)
    importance = torch.exp(log_ratio).clamp(max=importance_cap)
    return replace(
        batch,
        old_logprobs=old,
        positive_mass=batch.positive_mass * importance,
        negative_mass=batch.negative_mass * importance,
    )


def trained_edges(batch: TreeBatch) -> torch.Tensor:
    """[E] int64 positions i of the predicted tokens; the hidden row that predicts i is ``predecessor[i]``."""
    return torch.nonzero(batch.weight > 0).flatten()


@dataclass(frozen=True, slots=True)
class _Piece:
    """Some leaves of one tree, with the nodes they need and the masses they bring."""

    structure: TreeStructure
    nodes: tuple[int, ...]
    """In preorder."""
    num_tokens: int
    num_unpacked_tokens: int
    positive: np.ndarray
    """[N] sum over the piece's leaves through the node of weight * max(advantage, 0)."""
    negative: np.ndarray
    weight: np.ndarray


def _load(pieces: list[_Piece]) -> int:
    return sum(piece.num_tokens for piece in pieces)


def _pieces(
    trees: Sequence[RolloutTree],
    advantages: Sequence[np.ndarray],
    aggregation: str,
    packed: bool,
    limit: int | None,
) -> list[_Piece]:
    if len(trees) != len(advantages):
        raise ValueError(f"expected one advantage array per tree, found {len(advantages)} for {len(trees)} trees")
    structures = [build_structure(tree) for tree in trees]
    weights = leaf_weights(structures, aggregation)
    pieces = []
    for structure, advantage, weight in zip(structures, advantages, weights, strict=True):
        shape = (len(structure.leaves), structure.num_nodes)
        if advantage.shape != shape or not np.isfinite(advantage).all():
            raise ValueError(
                f"prompt {structure.tree.prompt.prompt_id}: expected finite advantages {shape}, found {advantage.shape}"
            )
        for rows in _cut_by_leaves(structure, limit) if packed else [(row,) for row in range(shape[0])]:
            pieces.append(_piece(structure, rows, advantage, weight))
    return pieces


def leaf_weights(structures: Sequence[TreeStructure], aggregation: str) -> list[np.ndarray]:
    """Per tree, the weight [L] of each of a leaf's action tokens; lengths are those of whole unpacked paths."""
    lengths = [np.array([_num_actions(s, path) for path in s.paths], dtype=np.float64) for s in structures]
    num_leaves = sum(length.size for length in lengths)
    if aggregation == "seq-mean-token-mean":
        return [1.0 / (num_leaves * length) for length in lengths]
    if aggregation == "seq-mean-token-sum":
        return [np.full(length.size, 1.0 / max(num_leaves, 1)) for length in lengths]
    if aggregation == "token-mean":
        num_tokens = sum(float(length.sum()) for length in lengths)
        return [np.full(length.size, 1.0 / max(num_tokens, 1.0)) for length in lengths]
    raise ValueError(
        f"expected aggregation seq-mean-token-mean, token-mean or seq-mean-token-sum, found {aggregation!r}"
    )


def _num_actions(structure: TreeStructure, path: Sequence[int]) -> int:
    return sum(len(structure.turns[node].action_ids) for node in path[1:])


def _cut_by_leaves(structure: TreeStructure, limit: int | None) -> list[tuple[int, ...]]:
    """Split the leaves, taken in preorder so that neighbours share most, into runs whose union keeps to the limit."""
    order = {node: place for place, node in enumerate(preorder(structure, range(structure.num_nodes)))}
    rows = sorted(range(len(structure.leaves)), key=lambda row: order[structure.paths[row][-1]])
    sizes = [node_size(structure, node) for node in range(structure.num_nodes)]
    runs: list[tuple[int, ...]] = []
    run: list[int] = []
    nodes: set[int] = set()
    for row in rows:
        path = set(structure.paths[row])
        if run and limit is not None and sum(sizes[node] for node in nodes | path) > limit:
            runs.append(tuple(run))
            run, nodes = [], set()
        run.append(row)
        nodes |= path
    return [*runs, tuple(run)] if run else runs


def _piece(structure: TreeStructure, rows: Sequence[int], advantage: np.ndarray, weight: np.ndarray) -> _Piece:
    positive, negative, total = (np.zeros(structure.num_nodes) for _ in range(3))
    unpacked = 0
    for row in rows:
        path = np.array(structure.paths[row])
        on_path = weight[row] * advantage[row, path]
        positive[path] += np.maximum(on_path, 0.0)
        negative[path] += np.maximum(-on_path, 0.0)
        total[path] += weight[row]
        unpacked += sum(node_size(structure, node) for node in structure.paths[row])
    nodes = preorder(structure, {node for row in rows for node in structure.paths[row]})
    num_tokens = sum(node_size(structure, node) for node in nodes)
    return _Piece(structure, nodes, num_tokens, unpacked, positive, negative, total)


def _fill_bins(pieces: Sequence[_Piece], limit: int, num_ranks: int) -> list[list[_Piece]]:
    """Spread pieces, longest first, over the fewest bins (a multiple of num_ranks) in which each fits the emptiest."""
    num_bins = max(-(-sum(piece.num_tokens for piece in pieces) // (limit * num_ranks)), 1) * num_ranks
    ordered = sorted(pieces, key=lambda piece: piece.num_tokens, reverse=True)
    while True:
        bins: list[list[_Piece]] = [[] for _ in range(num_bins)]
        loads = [0] * num_bins
        for piece in ordered:
            emptiest = loads.index(min(loads))
            if bins[emptiest] and loads[emptiest] + piece.num_tokens > limit:
                break
            bins[emptiest].append(piece)
            loads[emptiest] += piece.num_tokens
        else:
            return bins
        num_bins += num_ranks


def _assemble(pieces: Sequence[_Piece]) -> TreeBatch:
    layout = Layout()
    masses: list[np.ndarray] = []
    logprobs: list[np.ndarray] = []
    for piece in pieces:
        layout.add(piece.structure, piece.nodes)
        for node in piece.nodes:
            size = node_size(piece.structure, node)
            turn = piece.structure.turns[node]
            mass, logprob = np.zeros((3, size)), np.zeros(size, dtype=np.float32)
            if turn is not None:
                actions = len(turn.action_ids)
                mass[:, :actions] = [[piece.positive[node]], [piece.negative[node]], [piece.weight[node]]]
                logprob[:actions] = turn.action_logprobs
            masses.append(mass)
            logprobs.append(logprob)
        if not all(np.isfinite(logprob).all() for logprob in logprobs[-len(piece.nodes) :]):
            raise ValueError(f"prompt {piece.structure.tree.prompt.prompt_id}: expected finite action logprobs")
    if not pieces:
        return pad_batch(_build(layout, np.zeros((3, 0)), np.zeros(0, dtype=np.float32), 0), 1)
    unpacked = sum(piece.num_unpacked_tokens for piece in pieces)
    return _build(layout, np.concatenate(masses, axis=1), np.concatenate(logprobs), unpacked)


def _build(layout: Layout, masses: np.ndarray, logprobs: np.ndarray, num_unpacked_tokens: int) -> TreeBatch:
    laid_out = layout.tensors()
    rollout_logprobs = torch.from_numpy(logprobs)
    return TreeBatch(
        tokens=laid_out.tokens,
        position_ids=laid_out.position_ids,
        subtree_end=laid_out.subtree_end,
        predecessor=laid_out.predecessor,
        positive_mass=torch.from_numpy(masses[0].copy()),
        negative_mass=torch.from_numpy(masses[1].copy()),
        weight=torch.from_numpy(masses[2].copy()),
        rollout_logprobs=rollout_logprobs,
        old_logprobs=rollout_logprobs.clone(),
        reference_logprobs=torch.zeros_like(rollout_logprobs),
        num_unpacked_tokens=num_unpacked_tokens,
    )


def _extended(values: torch.Tensor, missing: int, fill: float) -> torch.Tensor:
    return torch.cat([values, values.new_full((missing,), fill)])
