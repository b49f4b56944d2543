"""A forest flattened in preorder: two integer vectors, subtree_end and predecessor, say everything about its shape."""

from __future__ import annotations

from collections.abc import Collection

from trace_megatron.algorithm.tree import TreeStructure, node_ids


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
    """Trees laid out one after the other; the lists are per token."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.position_ids: list[int] = []
        """Depth on the path, 0 at a root's first token."""
        self.subtree_end: list[int] = []
        """One past the last token below the token's node: i sees j if and only if j <= i < subtree_end[j]."""
        self.predecessor: list[int] = []
        """Position whose hidden state predicts the token: at a fork, the parent node's last; -1 at a root's first."""

    def add(self, structure: TreeStructure, nodes: Collection[int]) -> dict[int, int]:
        """Append ``nodes`` of a tree, given in preorder and closed under parents; returns each node's last position."""
        last_position = {-1: -1}
        spans: dict[int, tuple[int, int]] = {}
        for node in nodes:
            ids = node_ids(structure, node)
            start = len(self.tokens)
            before = last_position[structure.parents[node]]
            depth = self.position_ids[before] + 1 if before >= 0 else 0
            self.tokens += ids
            self.position_ids += range(depth, depth + len(ids))
            self.predecessor += [before, *range(start, start + len(ids) - 1)]
            last_position[node] = start + len(ids) - 1
            spans[node] = (start, start + len(ids))
        ends = {node: end for node, (_, end) in spans.items()}
        for node in reversed(list(nodes)):
            parent = structure.parents[node]
            if parent >= 0:
                ends[parent] = max(ends[parent], ends[node])
        for node, (start, end) in spans.items():  # insertion order is token order
            self.subtree_end += [ends[node]] * (end - start)
        del last_position[-1]
        return last_position
