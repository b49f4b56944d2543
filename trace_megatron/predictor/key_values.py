"""Keys and values of prompts, kept from their root pass for the scores of their prefixes.

They lie in pages of 16 tokens, found by a digest of all tokens up to the page's end: prompts that open alike share
pages, and a page is right wherever its digest is met. The least recently used pages go first. Pages hold for one
version of the predictor's weights: whoever changes the weights calls ``clear``.

Legend: T packed tokens, Q tokens of them that are computed, G key/value heads, D head dim, S slots of the pool.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from trace_megatron.ops import PAGE_TOKENS, PrefixPlan, prefix_attention
from trace_megatron.predictor.pack import HistoryBatch, Page
from trace_megatron.predictor.prefixes import find_computed

if TYPE_CHECKING:  # the scorer needs torch alone
    from transformers import PreTrainedConfig


class KeyValuePages:
    """The pool and its index. Not thread-safe: the predictor's lock covers it."""

    def __init__(self, config: PreTrainedConfig, dtype: torch.dtype, device: torch.device, max_bytes: int):
        """``max_bytes``: of keys and values; memory is taken when the first page is kept."""
        num_groups = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        self._row, self._num_heads = (num_groups, head_dim), config.num_attention_heads
        self._num_layers, self._dtype, self._device = config.num_hidden_layers, dtype, device
        token_bytes = 2 * self._num_layers * num_groups * head_dim * dtype.itemsize
        self._num_pages = max_bytes // (token_bytes * PAGE_TOKENS)
        self._pool: torch.Tensor | None = None  # [layers, 2, S, G, D]
        self._pages: OrderedDict[bytes, int] = OrderedDict()  # digest -> page, the least recently used first
        self._free = list(range(self._num_pages))

    def __len__(self) -> int:
        """Pages held."""
        return len(self._pages)

    @property
    def max_pages(self) -> int:
        return self._num_pages

    def clear(self) -> None:
        """Forget every page; the pool's memory is given back."""
        self._pages.clear()
        self._free = list(range(self._num_pages))
        self._pool = None

    @contextmanager
    def open(self, histories: HistoryBatch, keep: bool) -> Iterator[KeyValues]:
        """What one forward over ``histories`` needs; with ``keep``, the prompts' new pages are kept if it succeeds."""
        known = [page for page in histories.pages if page.digest in self._pages]
        for page in reversed(known):  # a prompt's first pages stay the longest: later ones are of no use without them
            self._pages.move_to_end(page.digest)
        fresh = [page for page in histories.pages if page.digest not in self._pages] if keep else []
        taken = self._take(len(fresh), {page.digest for page in known})
        kept = dict(zip((page.digest for page in fresh), taken, strict=False))  # the pool may be too small for all
        if kept and self._pool is None:
            shape = (self._num_layers, 2, self._num_pages * PAGE_TOKENS, *self._row)
            self._pool = torch.empty(shape, dtype=self._dtype, device=self._device)
        try:
            yield KeyValues(
                histories,
                self._pool,
                {page: self._pages[page.digest] for page in known},
                {page: kept[page.digest] for page in fresh if page.digest in kept},
                self._num_heads,
                self._row[0],
                self._device,
            )
        except BaseException:
            self._free += taken
            raise
        self._pages.update(reversed(kept.items()))

    def _take(self, count: int, in_use: set[bytes]) -> list[int]:
        """Up to ``count`` pages, free ones first, then the least recently used that this forward does not read."""
        taken = [self._free.pop() for _ in range(min(count, len(self._free)))]
        while len(taken) < count and self._pages and next(iter(self._pages)) not in in_use:
            taken.append(self._pages.popitem(last=False)[1])
        return taken


class KeyValues:
    """The keys and values of one forward: those computed, beside those known."""

    def __init__(
        self,
        histories: HistoryBatch,
        pool: torch.Tensor | None,
        known: dict[Page, int],
        kept: dict[Page, int],
        num_heads: int,
        num_groups: int,
        device: torch.device,
    ):
        computed = find_computed(histories, known)
        self.positions, self.rows = computed.positions, computed.rows
        """[Q] packed positions that are computed, in their order; [A] where each history's last token is among them."""
        self._plan = PrefixPlan(computed.layout, num_heads, num_groups, device)
        self._pool = pool
        positions, slots = _positions_and_slots(kept)
        fresh = computed.known_slots[positions] < 0
        self._kept_places, self._kept_slots = computed.places[positions[fresh]].to(device), slots[fresh].to(device)
        # tokens that a new page shares with a known one
        self._copied_from = computed.known_slots[positions[~fresh]].to(device)
        self._copied_to = slots[~fresh].to(device)

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
        """q [Q, H, D], k, v [Q, G, D] of the computed tokens -> [Q, H, D]; keeps what is to be kept."""
        if self._pool is None:
            return prefix_attention(q, k, v, None, None, self._plan, scale)
        for pool, rows in zip(self._pool[layer], (k, v), strict=True):
            if self._kept_slots.numel():
                pool[self._kept_slots] = rows[self._kept_places]
            if self._copied_to.numel():
                pool[self._copied_to] = pool[self._copied_from]
        return prefix_attention(q, k, v, *self._pool[layer], self._plan, scale)


def _positions_and_slots(pages: dict[Page, int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Of every token of the pages: its place in the pack and in the pool, int64."""
    offsets = torch.arange(PAGE_TOKENS)
    if not pages:
        return offsets[:0], offsets[:0]
    positions = torch.tensor([page.positions for page in pages]).flatten()
    return positions, (torch.tensor(list(pages.values()))[:, None] * PAGE_TOKENS + offsets).flatten()
