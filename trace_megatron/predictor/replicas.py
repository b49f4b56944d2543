"""The predictor on several ranks: each holds a replica, scores its share of the histories, and adds its gradients.

The driver sends every call, with all histories, to the other ranks; every rank takes its share by the same rule.

Legend: R ranks, N paths, A anchors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import torch

from trace_megatron.predictor.pack import HistoryPath


class Replicas(Protocol):
    """The ranks that hold the same predictor; ``policy.worker.Policy.replicas`` is one."""

    rank: int
    size: int

    def send(self, arguments: Mapping[str, Any], tensors: Sequence[torch.Tensor]) -> None:
        """From the driver to ``Replica.repeat`` on every other rank; ``arguments`` are JSON values."""
        ...

    def add(self, tensor: torch.Tensor) -> None:
        """Replace ``tensor`` by its sum over the ranks, on all of them. They call it in the same order."""
        ...


class OneReplica:
    """No other rank."""

    rank, size = 0, 1

    def send(self, arguments: Mapping[str, Any], tensors: Sequence[torch.Tensor]) -> None:
        """Nobody listens."""

    def add(self, tensor: torch.Tensor) -> None:
        """The sum over one rank."""


class Shares:
    """Which rank scores which histories: about equal tokens for all, a prompt where it was scored before if it can.

    Its keys and values are kept there. Every rank keeps the same record, so all agree without a message.
    """

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        self._owners: dict[bytes, int] = {}  # prompt: rank

    def forget(self) -> None:
        """As the keys and values are forgotten."""
        self._owners.clear()

    def mine(self, paths: Sequence[HistoryPath], rank: int) -> list[HistoryPath]:
        """The paths of this rank."""
        if self._num_ranks == 1:
            return list(paths)
        prompts: dict[bytes, list[HistoryPath]] = {}
        for path in paths:
            prompts.setdefault(path.prompt_ids.tobytes(), []).append(path)
        sizes = {prompt: _num_tokens(group) for prompt, group in prompts.items()}
        loads = [0] * self._num_ranks
        fair = sum(sizes.values()) / self._num_ranks
        for prompt in sorted(sizes, key=lambda prompt: (-sizes[prompt], prompt)):
            owner = self._owners.get(prompt)
            if owner is None or loads[owner] + sizes[prompt] > 1.1 * fair + max(sizes.values()) / 2:
                owner = loads.index(min(loads))
            self._owners[prompt] = owner
            loads[owner] += sizes[prompt]
        return [path for prompt, group in prompts.items() if self._owners[prompt] == rank for path in group]


def _num_tokens(group: Sequence[HistoryPath]) -> int:
    """Tokens of one prompt's paths, the prompt once."""
    prompt_length = group[0].prompt_length
    return prompt_length + sum(path.token_ids.size - prompt_length for path in group)


def as_tensors(paths: Sequence[HistoryPath]) -> list[torch.Tensor]:
    """int64 tensors that ``as_paths`` reads back."""
    lengths = [np.array(path.lengths, dtype=np.int64) for path in paths]
    rows = [np.array(path.rows, dtype=np.int64) for path in paths]
    sizes = [(path.token_ids.size, len(path.lengths), path.prompt_length) for path in paths]
    none = np.zeros(0, dtype=np.int64)
    return [
        torch.tensor(sizes, dtype=torch.int64).reshape(len(paths), 3),
        *(torch.from_numpy(np.concatenate([none, *parts])) for parts in ([p.token_ids for p in paths], lengths, rows)),
    ]


def as_paths(tensors: Sequence[torch.Tensor]) -> list[HistoryPath]:
    """The paths that ``as_tensors`` wrote."""
    sizes, *flat = (tensor.numpy() for tensor in tensors)
    token_ends, anchor_ends = np.cumsum(sizes[:, 0]), np.cumsum(sizes[:, 1])
    ids = np.split(flat[0], token_ends[:-1]) if len(sizes) else []
    lengths, rows = (np.split(values, anchor_ends[:-1]) if len(sizes) else [] for values in flat[1:])
    return [
        HistoryPath(path_ids, tuple(path_lengths.tolist()), tuple(path_rows.tolist()), int(prompt_length))
        for path_ids, path_lengths, path_rows, prompt_length in zip(ids, lengths, rows, sizes[:, 2], strict=True)
    ]
