"""Histories packed for the predictor: one forward over shared prefixes serves every anchor.

Legend: T packed tokens, A anchors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from trace_megatron.algorithm.layout import Layout, preorder
from trace_megatron.algorithm.tree import TreeStructure, build_structure, history_path, node_size
from trace_megatron.types import Anchor, RolloutTree


@dataclass(frozen=True, slots=True)
class HistoryBatch:
    """A forest of histories; token i attends to token j if and only if ``j <= i < subtree_end[j]``."""

    tokens: torch.Tensor
    """[T] int64."""
    position_ids: torch.Tensor
    """[T] int64, depth on the path."""
    subtree_end: torch.Tensor
    """[T] int32."""
    anchor_index: torch.Tensor
    """[A] int64, position of the last token of each history, in the order in which the anchors were asked for."""

    @property
    def num_tokens(self) -> int:
        return self.tokens.numel()


def pack_histories(
    requests: Sequence[tuple[RolloutTree, Sequence[Anchor]]], tokens_per_batch: int | None = None
) -> list[HistoryBatch]:
    """Pack the histories of every (tree, anchors) pair; ROOT is the prompt alone, with or without rollouts.

    The batches' ``anchor_index``, one after the other, follow the requested order. A batch holds at most
    ``tokens_per_batch`` tokens (None: no limit), except that a single longer history gets a batch of its own; a tree is
    cut between anchors. Raises ValueError where a tree has no such history.
    """
    batches: list[HistoryBatch] = []
    group: list[tuple[TreeStructure, list[tuple[int, ...]]]] = []
    load = 0
    for tree, anchors in requests:
        structure = build_structure(tree)
        paths: list[tuple[int, ...]] = []
        packed: set[int] = set()
        group.append((structure, paths))
        for anchor in anchors:
            path = history_path(structure, anchor)
            added = sum(node_size(structure, node) for node in path if node not in packed)
            if load and tokens_per_batch is not None and load + added > tokens_per_batch:
                batches.append(_assemble(group))
                paths, packed, load = [], set(), 0
                group = [(structure, paths)]
                added = sum(node_size(structure, node) for node in path)
            paths.append(path)
            packed.update(path)
            load += added
    return [*batches, _assemble(group)] if load else batches


def _assemble(group: Sequence[tuple[TreeStructure, list[tuple[int, ...]]]]) -> HistoryBatch:
    layout = Layout()
    index: list[int] = []
    for structure, paths in group:
        last_position = layout.add(structure, preorder(structure, {node for path in paths for node in path}))
        index += [last_position[path[-1]] for path in paths]
    laid_out = layout.tensors()
    return HistoryBatch(
        tokens=laid_out.tokens,
        position_ids=laid_out.position_ids,
        subtree_end=laid_out.subtree_end,
        anchor_index=torch.tensor(index, dtype=torch.int64),
    )
