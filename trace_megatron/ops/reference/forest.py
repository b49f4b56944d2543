"""Forests in preorder, checked: torch, any device."""

from __future__ import annotations

import torch


def check_subtree_end(subtree_end: torch.Tensor, num_tokens: int) -> None:
    """Raise ValueError unless ``subtree_end`` [T] int32 describes a forest in preorder. O(T log T), reads values back.

    Intervals [j, subtree_end[j]) must be nested or disjoint. Sorted by (end ascending, start descending),
    an interval's rank equals (intervals left of it) + (intervals inside it), for all j, exactly then: the
    interval with the largest end among crossing ones has others crossing from the left and none from the right.
    """
    check_subtree_end_shape(subtree_end, num_tokens)
    if num_tokens == 0:
        return
    end = subtree_end.long()
    start = torch.arange(num_tokens, device=end.device)
    bad = torch.nonzero((end <= start) | (end > num_tokens)).flatten()
    if bad.numel():
        j = int(bad[0])
        raise ValueError(f"expected {j} < subtree_end[{j}] <= {num_tokens}, found {int(end[j])}")
    ended = torch.cumsum(torch.bincount(end, minlength=num_tokens + 1), 0)
    rank = torch.empty_like(start)
    rank[torch.argsort(end * (num_tokens + 1) - start)] = start
    crossing = torch.nonzero(rank != ended[start] + end - start - 1).flatten()
    if crossing.numel():
        j = int(crossing[0])
        raise ValueError(
            f"expected nested subtrees, found subtree [{j}, {int(end[j])}) crossing another one: "
            "lay the forest out in preorder"
        )


def check_subtree_end_shape(subtree_end: torch.Tensor, num_tokens: int) -> None:
    """Raise ValueError unless ``subtree_end`` is int32 [num_tokens]; reads no values."""
    if subtree_end.dtype != torch.int32 or subtree_end.shape != (num_tokens,):
        raise ValueError(
            f"expected subtree_end as int32 [{num_tokens}], found {subtree_end.dtype} {list(subtree_end.shape)}"
        )
