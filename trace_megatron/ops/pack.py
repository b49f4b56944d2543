"""Packing of segment trees: each segment's tokens once, in preorder.

Legend: S tokens of all segments, N segments, L leaves, T packed tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from trace_megatron.ops import native
from trace_megatron.ops.reference import pack as reference


@dataclass(frozen=True, slots=True)
class PackedTree:
    """A forest in preorder: token i attends to token j if and only if ``j <= i < subtree_end[j]``."""

    tokens: torch.Tensor
    """[T] int64."""
    position_ids: torch.Tensor
    """[T] int64, depth on the path."""
    subtree_end: torch.Tensor
    """[T] int32."""
    predecessor: torch.Tensor
    """[T] int32, position whose hidden state predicts the token; -1 at a root's first."""
    last_position: torch.Tensor
    """[N] int64, where each segment's history ends, which is an anchor's gather index; -1 at segments left out."""


@dataclass(frozen=True, slots=True)
class TreeCut:
    """Leaves divided over bins, and bins over ranks."""

    bin_of_leaf: torch.Tensor
    """[L] int64."""
    rank_of_bin: torch.Tensor
    """[bins] int64, the same number of bins on every rank; a bin may be empty."""


def pack_tree(
    tokens: torch.Tensor, offsets: torch.Tensor, parents: torch.Tensor, leaves: torch.Tensor | None = None
) -> PackedTree:
    """Lay trees of segments out as one pack, children in their order.

    Segment n holds ``tokens[offsets[n] : offsets[n + 1]]`` ([S] int64, [N + 1] int64) and continues segment
    ``parents[n]`` < n ([N] int64; -1 at a root). ``leaves`` [any] int64: only these segments and what they inherit are
    kept (None: all). CPU tensors. Raises ValueError on other parents, offsets or leaves, and beyond int32 positions.
    """
    pack = torch.ops.trace_megatron.pack_tree if native.AVAILABLE else reference.pack_tree
    return PackedTree(*pack(tokens, offsets, parents, leaves))


def cut_tree(
    offsets: torch.Tensor, parents: torch.Tensor, leaves: torch.Tensor, tokens_per_bin: int, num_ranks: int = 1
) -> TreeCut:
    """Divide ``leaves`` [L] int64 over bins of at most ``tokens_per_bin`` packed tokens, and bins over ranks.

    Segments as in ``pack_tree``, which packs one bin by ``leaves[bin_of_leaf == bin]``. Each leaf is in one bin; leaves
    that are neighbours in preorder stay together; a single longer history has a bin of its own. Ranks are balanced by
    the attention blocks that their bins visit. Raises ValueError as ``pack_tree`` does.
    """
    cut = torch.ops.trace_megatron.cut_tree if native.AVAILABLE else reference.cut_tree
    return TreeCut(*cut(offsets, parents, leaves, tokens_per_bin, num_ranks))


def _fake_pack(tokens, offsets, parents, leaves):
    num_tokens = torch.library.get_ctx().new_dynamic_size()
    longs, ints = tokens.new_empty(num_tokens), tokens.new_empty(num_tokens, dtype=torch.int32)
    return longs, torch.empty_like(longs), ints, torch.empty_like(ints), torch.empty_like(parents)


def _fake_cut(offsets, parents, leaves, tokens_per_bin, num_ranks):
    return torch.empty_like(leaves), leaves.new_empty(torch.library.get_ctx().new_dynamic_size())


if native.AVAILABLE:
    torch.library.register_fake("trace_megatron::pack_tree", _fake_pack)
    torch.library.register_fake("trace_megatron::cut_tree", _fake_cut)
