"""What of a pack is to be computed, and which known pages it continues.

A token is known where it and all tokens before it on its path lie in known pages. What begins below one known token
has one prefix, and forms a group: a prompt in the words of ``ops.PrefixLayout``.

Legend: T packed tokens, Q tokens of them that are computed, A histories.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
import torch

from trace_megatron.ops import PAGE_TOKENS, PrefixLayout
from trace_megatron.predictor.pack import HistoryBatch, Page


@dataclass(frozen=True, slots=True)
class Computed:
    """The tokens to compute, in the order in which they go through the backbone. CPU tensors."""

    positions: torch.Tensor
    """[Q] int64 in the pack. A last token that is known comes at the end, without descendants."""
    rows: torch.Tensor
    """[A] int64, where each history's last token is among them."""
    layout: PrefixLayout
    """Their prefixes in the pool."""
    known_slots: torch.Tensor
    """[T] int64, a known token's slot of the pool; -1: not known."""
    places: torch.Tensor
    """[T] int64, where a computed token is among them; -1: not computed."""


def find_computed(histories: HistoryBatch, known: Mapping[Page, int]) -> Computed:
    """``known``: pages of the pack that the pool holds, with their numbers."""
    parents = _parents(histories)
    pages = _PagesByToken(histories.num_tokens, known, parents)
    is_known = _closed(histories, pages.of_token >= 0)
    position_ids, ends = histories.position_ids.numpy(), histories.subtree_end.numpy().astype(np.int64)

    main = np.flatnonzero(~is_known)
    last = np.unique(histories.last_positions.numpy())
    again = last[is_known[last]]  # their hidden states are asked for
    positions = np.concatenate([main, again])
    new_ends = np.concatenate([np.arange(main.size) + ends[main] - main, main.size + 1 + np.arange(again.size)])

    before = parents[positions]
    starts = np.flatnonzero(np.concatenate([(before[: main.size] < 0) | is_known[before[: main.size]], again >= 0]))
    starts = starts[_differ(before[starts], starts >= main.size)]
    lengths = np.where(before[starts] < 0, 0, position_ids[before[starts]] + 1)
    chains = [pages.up_to(token) for token in before[starts].tolist()]
    layout = PrefixLayout(
        prompt_begin=torch.from_numpy(np.append(starts, positions.size)),
        prefix_lengths=torch.from_numpy(lengths),
        pages=torch.tensor([page for chain in chains for page in chain], dtype=torch.int64),
        subtree_end=torch.from_numpy(new_ends.astype(np.int32)),
    )
    places = np.full(histories.num_tokens, -1)
    places[positions] = np.arange(positions.size)
    slots = np.where(is_known, pages.of_token * PAGE_TOKENS + position_ids % PAGE_TOKENS, -1)
    return Computed(
        positions=torch.from_numpy(positions),
        rows=torch.from_numpy(places[histories.last_positions.numpy()]),
        layout=layout,
        known_slots=torch.from_numpy(slots),
        places=torch.from_numpy(places),
    )


def _parents(histories: HistoryBatch) -> np.ndarray:
    """[T] the token before each on its path, -1 at a root."""
    parents = np.arange(-1, histories.num_tokens - 1)
    for run in histories.runs:
        parents[run.begin] = run.parent
    return parents


def _closed(histories: HistoryBatch, in_page: np.ndarray) -> np.ndarray:
    """[T] bool: in a page, as all before it on its path."""
    is_known = in_page.copy()
    for run in histories.runs:
        tokens = is_known[run.begin : run.end]
        follows = run.parent < 0 or is_known[run.parent]
        tokens[int(np.argmin(np.append(tokens, False))) if follows else 0 :] = False
    return is_known


def _differ(parents: np.ndarray, apart: np.ndarray) -> np.ndarray:
    """Mask of groups that do not continue the one before: siblings share a prefix; those ``apart`` stand alone."""
    first = np.ones(parents.size, dtype=bool)
    first[1:] = (parents[1:] != parents[:-1]) | apart[1:]
    return first


class _PagesByToken:
    def __init__(self, num_tokens: int, known: Mapping[Page, int], parents: np.ndarray):
        self.of_token = np.full(num_tokens, -1)
        """[T] a page of the pool that holds the token; -1: none."""
        for page, number in known.items():
            self.of_token[list(page.positions)] = number
        self._before = {number: int(parents[page.positions[0]]) for page, number in known.items()}

    def up_to(self, token: int) -> Iterable[int]:
        """The pages that hold a known token and all before it on its path; none for -1."""
        pages = []
        while token >= 0:
            pages.append(int(self.of_token[token]))
            token = self._before[pages[-1]]
        return reversed(pages)
