"""A forest flattened in preorder: two integer vectors, subtree_end and predecessor, say everything about its shape."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np
import torch

from trace_megatron.algorithm.tree import TreeStructure, node_ids, node_size


@dataclass(frozen=True, slots=True)
class LaidOut:
    """The vectors of a forest of T tokens."""

    tokens: torch.Tensor
    """[T] int64."""
    position_ids: torch.Tensor
    """[T] int64, depth on the path, 0 at a root's first token."""
    subtree_end: torch.Tensor
    """[T] int32, one past the last token below the token's node: i sees j if and only if j <= i < subtree_end[j]."""
    predecessor: torch.Tensor
    """[T] int32, position that predicts the token: at a fork, the parent node's last; -1 at a root's first token."""


def preorder(structure: TreeStructure, nodes: Collection[int]) -> tuple[int, ...]:
    """``nodes`` (closed under parents), parents before children and each subtree in one run."""
    wanted = set(nodes)
    order: list[int] = []
    stack = [0] if 0 in wanted else []
    while stack:
        node = stack.pop()
        order.append(node)
        stack.extend(child for child in reversed(structure.children[node]) if child in wanted)
    return tuple(order)


class Layout:
    """Trees laid out one after the other."""

    def __init__(self) -> None:
        self._num_tokens = 0
        self._columns: tuple[list[np.ndarray], ...] = ([], [], [], [])

    def add(self, structure: TreeStructure, nodes: Collection[int]) -> dict[int, int]:
        """Append ``nodes`` of a tree, given in preorder and closed under parents; returns each node's last position."""
        ends, last_position, depth_below = {}, {-1: -1}, {-1: 0}
        starts = {}
        for node in nodes:
            starts[node] = self._num_tokens
            self._num_tokens += node_size(structure, node)
            ends[node] = self._num_tokens
        for node in reversed(list(nodes)):
            parent = structure.parents[node]
            if parent >= 0:
                ends[parent] = max(ends[parent], ends[node])
        tokens, position_ids, subtree_end, predecessor = self._columns
        for node, start in starts.items():
            size, parent = node_size(structure, node), structure.parents[node]
            tokens.append(np.array(node_ids(structure, node), dtype=np.int64))
            position_ids.append(np.arange(depth_below[parent], depth_below[parent] + size))
            subtree_end.append(np.full(size, ends[node], dtype=np.int32))
            previous = np.arange(start - 1, start + size - 1, dtype=np.int32)
            previous[0] = last_position[parent]
            predecessor.append(previous)
            last_position[node] = start + size - 1
            depth_below[node] = depth_below[parent] + size
        del last_position[-1]
        return last_position

    def tensors(self) -> LaidOut:
        dtypes = (np.int64, np.int64, np.int32, np.int32)
        return LaidOut(
            *(
                torch.from_numpy(np.concatenate(column) if column else np.empty(0, dtype))
                for column, dtype in zip(self._columns, dtypes, strict=True)
            )
        )
