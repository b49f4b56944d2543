"""Histories packed for the predictor: tokens that begin several histories alike are laid out, and computed, once.

A value depends on the tokens alone. So, other than for the policy's loss, equal tokens are shared wherever they come
from: the chat template's opening by all prompts, twin rollouts by each other. Twins then score exactly alike: which of
them receives budget is decided by their order, not by float noise.

Legend: T packed tokens, A anchors of a batch.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from trace_megatron.algorithm.tree import history_ids, rollout_turns
from trace_megatron.ops import PAGE_TOKENS
from trace_megatron.types import ROOT, Anchor, RolloutTree

Request = tuple[RolloutTree, Sequence[Anchor]]
"""Histories of one tree; ROOT is the prompt alone, with or without rollouts."""


@dataclass(frozen=True, slots=True)
class Page:
    """A page of a prompt's tokens in a pack: prompts are known by whole pages, a shorter rest is computed again."""

    digest: bytes
    """Of all tokens up to the page's end: what a token's keys and values depend on."""
    positions: tuple[int, ...]
    """[PAGE_TOKENS] in the pack."""


@dataclass(frozen=True, slots=True)
class Run:
    """Packed tokens ``begin`` up to ``end``, each the parent of the next."""

    begin: int
    end: int
    parent: int
    """Of the first; -1: it is a root."""


@dataclass(frozen=True, slots=True)
class HistoryBatch:
    """A forest of histories; token i attends to token j if and only if ``j <= i < subtree_end[j]``."""

    tokens: torch.Tensor
    """[T] int64."""
    position_ids: torch.Tensor
    """[T] int64, depth on the path."""
    subtree_end: torch.Tensor
    """[T] int32."""
    last_positions: torch.Tensor
    """[A] int64, position of the last token of each history."""
    rows: torch.Tensor
    """[A] int64, place of each history in the requested order."""
    pages: tuple[Page, ...] = ()
    """The prompts' whole pages, each once."""
    runs: tuple[Run, ...] = ()
    """Of all tokens, in order."""

    @property
    def num_tokens(self) -> int:
        return self.tokens.numel()


@dataclass(frozen=True, slots=True)
class HistoryPath:
    """The longest requested history of one rollout, with the shorter ones that lie on it."""

    token_ids: np.ndarray
    """[T] int64."""
    lengths: tuple[int, ...]
    """[A] tokens of each history."""
    rows: tuple[int, ...]
    """[A] place of each history in the requested order."""
    prompt_length: int
    """Tokens of the prompt."""

    @property
    def prompt_ids(self) -> np.ndarray:
        return self.token_ids[: self.prompt_length]


def pack_histories(requests: Sequence[Request], tokens_per_batch: int) -> list[HistoryBatch]:
    """Pack every anchor of every request; ``rows`` count through the requests in order.

    A batch holds at most ``tokens_per_batch`` tokens, except that a single longer path gets a batch of its own.
    Raises ValueError where a tree has no such history.
    """
    return pack_paths(history_paths(requests), tokens_per_batch)


def pack_paths(paths: Sequence[HistoryPath], tokens_per_batch: int) -> list[HistoryBatch]:
    """``pack_histories`` of paths."""
    batches: list[HistoryBatch] = []
    group: list[HistoryPath] = []
    load = 0
    for path in sorted(paths, key=lambda path: path.token_ids.astype(">u4").tobytes()):  # ordered as the ids are
        added = path.token_ids.size - (_num_shared(group[-1], path) if group else 0)
        if group and load + added > tokens_per_batch:
            batches.append(_assemble(group))
            group, load, added = [], 0, path.token_ids.size
        group.append(path)
        load += added
    return [*batches, _assemble(group)] if group else batches


def history_paths(requests: Sequence[Request]) -> list[HistoryPath]:
    """The paths that hold every anchor of every request. Raises ValueError where a tree has no such history."""
    paths = []
    row = itertools.count()
    for tree, anchors in requests:
        prompt_length = len(tree.prompt.token_ids)
        if not prompt_length:
            raise ValueError(f"prompt {tree.prompt.prompt_id}: expected at least one token, found none")
        marks: dict[int, list[tuple[int, int]]] = {}
        for anchor in anchors:
            marks.setdefault(anchor.rollout, []).append((anchor.turn, next(row)))
        for rollout, turns_and_rows in marks.items():
            longest = Anchor(rollout, max(turn for turn, _ in turns_and_rows))
            turns = () if longest == ROOT else rollout_turns(tree, rollout)
            sizes = [len(turn.action_ids) + len(turn.observation_ids) for turn in turns]
            ends = list(itertools.accumulate(sizes, initial=prompt_length))
            ids = np.array(history_ids(tree, longest), dtype=np.int64)
            lengths = tuple(ends[turn] for turn, _ in turns_and_rows)
            paths.append(HistoryPath(ids, lengths, tuple(row for _, row in turns_and_rows), prompt_length))
    return paths


def _page_digests(prompt_ids: np.ndarray) -> list[bytes]:
    num_pages = prompt_ids.size // PAGE_TOKENS
    running = hashlib.blake2b(digest_size=16)
    digests = []
    for page in prompt_ids[: num_pages * PAGE_TOKENS].reshape(num_pages, PAGE_TOKENS):
        running.update(page.tobytes())
        digests.append(running.digest())
    return digests


def _num_shared(first: HistoryPath, second: HistoryPath) -> int:
    """Tokens that two paths begin with alike."""
    size = min(first.token_ids.size, second.token_ids.size)
    differing = np.flatnonzero(first.token_ids[:size] != second.token_ids[:size])
    return int(differing[0]) if differing.size else size


def _assemble(group: Sequence[HistoryPath]) -> HistoryBatch:
    """Lay sorted paths out as a forest in preorder: neighbours share most, an open path is closed where they part."""
    tokens: list[int] = []
    depths: list[int] = []
    ends: list[int] = []
    open_path: list[int] = []  # positions of the current path's tokens, by depth
    last_positions: list[int] = []
    pages: dict[bytes, Page] = {}
    runs: list[Run] = []
    for index, path in enumerate(group):
        shared = _num_shared(group[index - 1], path) if index else 0
        for position in open_path[shared:]:
            ends[position] = len(tokens)
        fresh = path.token_ids[shared:].tolist()
        if fresh:
            runs.append(Run(len(tokens), len(tokens) + len(fresh), open_path[shared - 1] if shared else -1))
        open_path[shared:] = range(len(tokens), len(tokens) + len(fresh))
        tokens += fresh
        depths += range(shared, shared + len(fresh))
        ends += [0] * len(fresh)
        last_positions += [open_path[length - 1] for length in path.lengths]
        if index and shared >= path.prompt_length == group[index - 1].prompt_length:
            continue  # the same prompt: its pages are there
        for number, digest in enumerate(_page_digests(path.prompt_ids)):
            if digest not in pages:
                first = number * PAGE_TOKENS
                pages[digest] = Page(digest, tuple(open_path[first : first + PAGE_TOKENS]))
    for position in open_path:
        ends[position] = len(tokens)
    return HistoryBatch(
        tokens=torch.tensor(tokens, dtype=torch.int64),
        position_ids=torch.tensor(depths, dtype=torch.int64),
        subtree_end=torch.tensor(ends, dtype=torch.int32),
        last_positions=torch.tensor(last_positions, dtype=torch.int64),
        rows=torch.tensor([row for path in group for row in path.rows], dtype=torch.int64),
        pages=tuple(pages.values()),
        runs=tuple(runs),
    )
