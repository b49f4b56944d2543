"""Which new tokens continue which known prefixes, and how their attention is divided over blocks of a GPU.

Legend: T new tokens, P prompts, H query heads, G key/value heads, W items (blocks' work), J tiles of 64 new tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch

from trace_megatron.ops.reference.forest import check_subtree_end

PAGE_TOKENS = 16
"""Tokens of a page of known keys and values; csrc/kernels/prefix_attention.h has the same."""
KEY_TILE = 64
"""Keys of a tile, as in that header."""
_MANY_BLOCKS = 256  # below, smaller blocks fill more of a GPU's 100 to 150 multiprocessors


@dataclass(frozen=True, slots=True)
class PrefixLayout:
    """New tokens, prompt by prompt, each prompt's with one prefix of known tokens. CPU tensors."""

    prompt_begin: torch.Tensor
    """[P + 1] int64: prompt p has new tokens ``prompt_begin[p]`` up to ``prompt_begin[p + 1]``."""
    prefix_lengths: torch.Tensor
    """[P] int64, known tokens that each of the prompt's new tokens sees; 0: none."""
    pages: torch.Tensor
    """int64: ceil(prefix_lengths[p] / PAGE_TOKENS) pages of each prompt's prefix in order, one prompt after the other.
    Page n is slots ``PAGE_TOKENS * n`` on of the pool."""
    subtree_end: torch.Tensor
    """[T] int32: new token i sees new token j if and only if ``j <= i < subtree_end[j]``; prompts see no other's."""


@dataclass(frozen=True, slots=True)
class PackedPrefixes:
    """Prefixes and new tokens as one forest: what attention without pages reads."""

    query_index: torch.Tensor
    """[T] int32, where each new token lies in the pack."""
    prefix_index: torch.Tensor
    """int64, where each known token lies."""
    slots: torch.Tensor
    """int64, the pool's slot of each known token."""
    subtree_end: torch.Tensor
    """int32 of the pack."""


@dataclass(frozen=True, slots=True)
class PrefixTiles:
    """The kernel's work list, in csrc/kernels/prefix_attention.h's words. int32."""

    items: torch.Tensor
    """[W, 6], the longest first."""
    key_tiles: torch.Tensor
    page_table: torch.Tensor
    subtree_end: torch.Tensor
    rows: int


class PrefixPlan:
    """Made once for a forward pass, from the CPU's knowledge of its tokens; every layer reads it. Nothing is read back.

    Raises ValueError on a layout that contradicts itself.
    """

    def __init__(self, layout: PrefixLayout, num_heads: int, num_groups: int, device: torch.device | str = "cpu"):
        if num_groups < 1 or num_heads < 1 or num_heads % num_groups:
            raise ValueError(f"expected query heads a multiple of key heads, found {num_heads} and {num_groups}")
        _check(layout)
        self._layout = layout
        self.num_heads, self.num_groups = num_heads, num_groups
        self.device = torch.device(device)
        self.num_tokens = layout.subtree_end.numel()
        self.max_page = int(layout.pages.max()) if layout.pages.numel() else -1

    @property
    def has_prefixes(self) -> bool:
        return self._layout.pages.numel() > 0

    @cached_property
    def subtree_end(self) -> torch.Tensor:
        """[T] int32 of the new tokens, on the device."""
        return self._layout.subtree_end.to(self.device)

    @cached_property
    def packed(self) -> PackedPrefixes:
        layout, sizes = self._layout, self._layout.prompt_begin.diff()
        known_before = layout.prefix_lengths.cumsum(0)  # in the pack, up to and with the prompt's own
        shift = known_before.repeat_interleave(sizes)
        prompt = torch.arange(sizes.numel()).repeat_interleave(layout.prefix_lengths)
        offset = torch.arange(prompt.numel()) - (known_before - layout.prefix_lengths)[prompt]
        first_page = _page_begin(layout.prefix_lengths)[prompt]
        slots = layout.pages[first_page + offset // PAGE_TOKENS] * PAGE_TOKENS + offset % PAGE_TOKENS
        end = torch.empty(self.num_tokens + prompt.numel(), dtype=torch.int64)
        query_index = torch.arange(self.num_tokens) + shift
        prefix_index = torch.arange(prompt.numel()) + layout.prompt_begin[prompt]
        end[query_index] = layout.subtree_end + shift
        end[prefix_index] = layout.prompt_begin[prompt + 1] + known_before[prompt]
        return PackedPrefixes(
            *(x.to(self.device) for x in (query_index.int(), prefix_index, slots, end.int())),
        )

    @cached_property
    def tiles(self) -> PrefixTiles:
        """For blocks of 128 rows, or of 64 where few would be left. Raises ValueError as ``tiles_of``."""
        large = self.tiles_of(128)
        return large if large.items.size(0) * self.num_groups >= _MANY_BLOCKS else self.tiles_of(64)

    def tiles_of(self, rows: int) -> PrefixTiles:
        """Raises ValueError where rows or pages do not fit into int32."""
        heads_per_group = self.num_heads // self.num_groups
        most = max(self.num_tokens * heads_per_group, self.max_page * PAGE_TOKENS, self._layout.pages.numel())
        if most >= 2**31:
            raise ValueError(f"expected rows, slots and pages below 2^31, found {most}")
        return _tiles(self._layout, heads_per_group, rows, self.device)


def _tiles(layout: PrefixLayout, heads_per_group: int, rows: int, device: torch.device) -> PrefixTiles:
    first, num_rows, prompt = _row_tiles(layout.prompt_begin, heads_per_group, rows)
    lowest, highest = first // heads_per_group, (first + num_rows - 1) // heads_per_group
    end = layout.subtree_end.long()
    num_tiles = -(-end.numel() // KEY_TILE)
    padded = torch.cat([end, end.new_zeros(num_tiles * KEY_TILE - end.numel())]).view(num_tiles, KEY_TILE)
    tile = torch.arange(num_tiles) * KEY_TILE
    seen = (tile <= highest[:, None]) & (padded.amax(1) > lowest[:, None])
    full = (tile + KEY_TILE - 1 <= lowest[:, None]) & (padded.amin(1) > highest[:, None])
    item, key_tile = torch.nonzero(seen, as_tuple=True)
    counts = seen.sum(1)
    last = counts.cumsum(0)
    prefix = layout.prefix_lengths[prompt]
    items = torch.stack([first, num_rows, prefix, _page_begin(layout.prefix_lengths)[prompt], last - counts, last], 1)
    order = torch.argsort(counts + prefix // KEY_TILE, descending=True, stable=True)
    tensors = (items[order], 2 * key_tile + ~full[item, key_tile], layout.pages, layout.subtree_end)
    return PrefixTiles(*(x.to(torch.int32).to(device) for x in tensors), rows)


def _row_tiles(
    prompt_begin: torch.Tensor, heads_per_group: int, rows: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Of each item, [W] int64: first row, number of rows, prompt."""
    row_begin = prompt_begin * heads_per_group
    counts = (row_begin.diff() + rows - 1) // rows
    prompt = torch.arange(counts.numel()).repeat_interleave(counts)
    nth = torch.arange(prompt.numel()) - (counts.cumsum(0) - counts)[prompt]
    first = row_begin[prompt] + nth * rows
    return first, (row_begin[prompt + 1] - first).clamp(max=rows), prompt


def _page_begin(prefix_lengths: torch.Tensor) -> torch.Tensor:
    """[P] where each prompt's pages begin."""
    counts = (prefix_lengths + PAGE_TOKENS - 1) // PAGE_TOKENS
    return counts.cumsum(0) - counts


def _check(layout: PrefixLayout) -> None:
    begin, lengths, num_tokens = layout.prompt_begin, layout.prefix_lengths, layout.subtree_end.numel()
    if begin.shape != (lengths.numel() + 1,) or int(begin[0]) != 0 or int(begin[-1]) != num_tokens:
        raise ValueError(
            f"expected prompt_begin [{lengths.numel() + 1}] from 0 to {num_tokens}, found {list(begin.shape)} from "
            f"{begin[:1].tolist()} to {begin[-1:].tolist()}"
        )
    if bool((begin.diff() < 0).any()) or bool((lengths < 0).any()):
        raise ValueError("expected prompt_begin that does not fall and prefix_lengths of at least 0")
    num_pages = int(((lengths + PAGE_TOKENS - 1) // PAGE_TOKENS).sum())
    if layout.pages.shape != (num_pages,) or bool((layout.pages < 0).any()):
        raise ValueError(
            f"expected {num_pages} pages from 0 on, found {layout.pages.numel()}, the prefixes need as many"
        )
    check_subtree_end(layout.subtree_end, num_tokens)
    ends = begin[1:].repeat_interleave(begin.diff())
    beyond = torch.nonzero(layout.subtree_end > ends).flatten()
    if beyond.numel():
        token = int(beyond[0])
        raise ValueError(
            f"expected subtree_end[{token}] within its prompt, which ends at {int(ends[token])}, found "
            f"{int(layout.subtree_end[token])}"
        )
