"""Trees of segments laid out as packs, and cut by leaves into bins: plain Python.

Legend: N segments, L leaves, T packed tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

ATTENTION_BLOCK = 128
"""FlexAttention's; bins are balanced by the blocks that attention visits."""


def pack_tree(
    tokens: torch.Tensor, offsets: torch.Tensor, parents: torch.Tensor, leaves: torch.Tensor | None
) -> tuple[torch.Tensor, ...]:
    """Tokens, position ids, subtree_end, predecessor, last_position: as ``ops.pack_tree``."""
    bounds, above = _checked_segments(offsets, parents, tokens.numel())
    kept = range(len(above)) if leaves is None else _at_or_above(_checked_leaves(leaves, len(above)), above)
    ids = tokens.tolist()
    packed: list[int] = []
    position_ids: list[int] = []
    predecessor: list[int] = []
    spans: dict[int, tuple[int, int]] = {}
    last = [-1] * len(above)
    depth = {-1: 0}
    for segment in _preorder(kept, above):
        first, parent, size = len(packed), above[segment], bounds[segment + 1] - bounds[segment]
        before = last[parent] if parent >= 0 else -1
        packed += ids[bounds[segment] : bounds[segment + 1]]
        position_ids += range(depth[parent], depth[parent] + size)
        if size:
            predecessor += [before, *range(first, first + size - 1)]
        last[segment] = first + size - 1 if size else before
        depth[segment] = depth[parent] + size
        spans[segment] = (first, first + size)
    return (
        torch.tensor(packed, dtype=torch.int64),
        torch.tensor(position_ids, dtype=torch.int64),
        torch.tensor(_subtree_end(spans, above), dtype=torch.int32),
        torch.tensor(predecessor, dtype=torch.int32),
        torch.tensor(last, dtype=torch.int64),
    )


def cut_tree(
    offsets: torch.Tensor, parents: torch.Tensor, leaves: torch.Tensor, tokens_per_bin: int, num_ranks: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Bin of each leaf [L], rank of each bin: as ``ops.cut_tree``."""
    if tokens_per_bin < 1 or num_ranks < 1:
        raise ValueError(f"expected a positive limit and ranks, found {tokens_per_bin} and {num_ranks}")
    bounds, above = _checked_segments(offsets, parents, int(offsets[-1]) if offsets.numel() else 0)
    tips = _checked_leaves(leaves, len(above))
    pieces = _pieces(tips, bounds, above, tokens_per_bin)
    sizes = [_num_tokens([tips[place] for place in piece], bounds, above) for piece in pieces]
    bins = _fill_bins(sizes, tokens_per_bin, num_ranks)
    bin_of_leaf = torch.zeros(len(tips), dtype=torch.int64)
    costs = [0] * len(bins)
    for index, members in enumerate(bins):
        for piece in members:
            bin_of_leaf[pieces[piece]] = index
            costs[index] += _num_blocks([tips[place] for place in pieces[piece]], bounds, above)
    return bin_of_leaf, torch.tensor(_balance(costs, num_ranks), dtype=torch.int64)


def _checked_segments(offsets: torch.Tensor, parents: torch.Tensor, num_tokens: int) -> tuple[list[int], list[int]]:
    bounds, above = offsets.tolist(), parents.tolist()
    if not bounds or bounds[0] != 0 or bounds[-1] != num_tokens:
        raise ValueError(f"expected offsets from 0 to {num_tokens}, found {bounds[:1]} to {bounds[-1:]}")
    for place in range(1, len(bounds)):
        if bounds[place] < bounds[place - 1]:
            raise ValueError(
                f"expected offsets that do not fall, found {bounds[place]} after {bounds[place - 1]} at place {place}"
            )
    if len(bounds) != len(above) + 1:
        raise ValueError(f"expected one parent for each of {len(bounds) - 1} segments, found {len(above)}")
    for segment, parent in enumerate(above):
        if not -1 <= parent < segment:
            raise ValueError(f"expected parents[{segment}] as -1 or an earlier segment, found {parent}")
    return bounds, above


def _checked_leaves(leaves: torch.Tensor, num_segments: int) -> list[int]:
    tips = leaves.tolist()
    for place, leaf in enumerate(tips):
        if not 0 <= leaf < num_segments:
            raise ValueError(f"expected leaves within [0, {num_segments}), found {leaf} at place {place}")
    return tips


def _path(segment: int, above: Sequence[int]) -> list[int]:
    """From the segment up to its root."""
    path = []
    while segment >= 0:
        path.append(segment)
        segment = above[segment]
    return path


def _at_or_above(tips: Sequence[int], above: Sequence[int]) -> set[int]:
    return {segment for tip in tips for segment in _path(tip, above)}


def _preorder(kept, above: Sequence[int]) -> list[int]:
    children: dict[int, list[int]] = {}
    for segment in sorted(kept):
        children.setdefault(above[segment], []).append(segment)
    order: list[int] = []
    stack = children.get(-1, [])[::-1]
    while stack:
        segment = stack.pop()
        order.append(segment)
        stack += children.get(segment, [])[::-1]
    return order


def _subtree_end(spans: dict[int, tuple[int, int]], above: Sequence[int]) -> list[int]:
    """Per token; ``spans`` stand in preorder."""
    ends = {segment: end for segment, (_, end) in spans.items()}
    for segment in reversed(spans):
        parent = above[segment]
        if parent >= 0:
            ends[parent] = max(ends[parent], ends[segment])
    return [ends[segment] for segment, (first, end) in spans.items() for _ in range(first, end)]


def _num_tokens(tips: Sequence[int], bounds: Sequence[int], above: Sequence[int]) -> int:
    return sum(bounds[segment + 1] - bounds[segment] for segment in _at_or_above(tips, above))


def _num_blocks(tips: Sequence[int], bounds: Sequence[int], above: Sequence[int]) -> int:
    """Pairs of blocks of which at least one query sees a key, where these leaves are packed alone."""
    spans: dict[int, tuple[int, int]] = {}
    num_tokens = 0
    for segment in _preorder(_at_or_above(tips, above), above):
        spans[segment] = (num_tokens, num_tokens + bounds[segment + 1] - bounds[segment])
        num_tokens = spans[segment][1]
    ends = _subtree_end(spans, above)
    blocks = range(0, num_tokens, ATTENTION_BLOCK)
    return sum(
        -(-max(ends[first : first + ATTENTION_BLOCK]) // ATTENTION_BLOCK) - first // ATTENTION_BLOCK for first in blocks
    )


def _pieces(tips: Sequence[int], bounds: Sequence[int], above: Sequence[int], limit: int) -> list[list[int]]:
    """Places of the leaves, neighbours of one tree in preorder together, cut where a piece would pass the limit."""
    order = {segment: place for place, segment in enumerate(_preorder(_at_or_above(tips, above), above))}
    pieces: list[list[int]] = []
    for place in sorted(range(len(tips)), key=lambda place: order[tips[place]]):
        tip = tips[place]
        joined = [tips[other] for other in pieces[-1]] + [tip] if pieces else []
        same_tree = pieces and _path(joined[0], above)[-1] == _path(tip, above)[-1]
        if not same_tree or _num_tokens(joined, bounds, above) > limit:
            pieces.append([])
        pieces[-1].append(place)
    return pieces


def _fill_bins(sizes: Sequence[int], limit: int, num_ranks: int) -> list[list[int]]:
    """Spread pieces, longest first, over the fewest bins in which each fits the emptiest one."""
    num_bins = max(-(-sum(sizes) // (limit * num_ranks)), 1) * num_ranks
    ordered = sorted(range(len(sizes)), key=lambda piece: -sizes[piece])
    while True:
        bins: list[list[int]] = [[] for _ in range(num_bins)]
        loads = [0] * num_bins
        for piece in ordered:
            emptiest = loads.index(min(loads))
            if bins[emptiest] and loads[emptiest] + sizes[piece] > limit:
                break
            bins[emptiest].append(piece)
            loads[emptiest] += sizes[piece]
        else:
            return bins
        num_bins += num_ranks


def _balance(costs: Sequence[int], num_ranks: int) -> list[int]:
    """Costliest bins first, each to the rank with the least so far that has room."""
    ranks = [0] * len(costs)
    loads, room = [0] * num_ranks, [len(costs) // num_ranks] * num_ranks
    for index in sorted(range(len(costs)), key=lambda index: -costs[index]):
        rank = min((rank for rank in range(num_ranks) if room[rank]), key=lambda rank: loads[rank])
        ranks[index] = rank
        loads[rank] += costs[index]
        room[rank] -= 1
    return ranks
