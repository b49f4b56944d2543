"""Tensors that are spread over ranks, in one safetensors file per rank, readable by ranks that spread them otherwise.

Megatron describes the spreading (``ShardedTensor``). Its own storage is not used: it writes through a spawned server
process and processes forked from this one, threads and sockets included, and it reads a checkpoint's index with pickle.

A tensor of a file is one shard of a global tensor, named ``key|offset`` with the shard's offset in the global shape.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.dict_utils import dict_list_map_outplace, nested_values
from megatron.core.dist_checkpointing.mapping import apply_factory_merges, is_main_replica
from megatron.core.dist_checkpointing.state_dict_utils import load_preprocess, save_preprocess
from safetensors import safe_open
from safetensors.torch import save_file


def shards_to_write(state: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Collective over all ranks: this rank's entries of the file, views of the state whose main copy it holds.

    Megatron checks that every part of every global tensor has exactly one main copy.
    """
    sharded, _ = save_preprocess(dict(state))
    shards = [shard for shard in nested_values(sharded) if is_main_replica(shard.replica_id)]
    return {_entry(shard): shard.data for shard in shards}


def write_shards(tensors: Mapping[str, torch.Tensor], folder: Path, rank: int) -> None:
    """Write what ``shards_to_write`` gave to this rank, on its own."""
    contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(contiguous, folder / f"rank_{rank:05d}.safetensors")


def read_shards(state: Mapping[str, Any], folder: Path) -> dict[str, torch.Tensor]:
    """This rank's tensors under the names of ``state``, put together from whatever files hold parts of them."""
    sharded, _, factories = load_preprocess(dict(state))
    with ExitStack() as stack:
        pieces = _open_pieces(folder, stack)
        loaded = dict_list_map_outplace(lambda shard: _read(shard, pieces[shard.key]), sharded)
    return apply_factory_merges(loaded, factories)


@dataclass(frozen=True, slots=True)
class _Piece:
    """One stored shard."""

    file: Any
    name: str
    offset: tuple[int, ...]
    """In the global tensor; longer than the shape where the global tensor stacks layers along leading axes."""
    shape: tuple[int, ...]


def _entry(shard: ShardedTensor) -> str:
    return f"{shard.key}|{','.join(map(str, shard.global_offset))}"


def _open_pieces(folder: Path, stack: ExitStack) -> dict[str, list[_Piece]]:
    pieces: dict[str, list[_Piece]] = defaultdict(list)
    for path in sorted(folder.glob("rank_*.safetensors")):
        file = stack.enter_context(safe_open(path, framework="pt"))
        for name in file.keys():  # noqa: SIM118, safe_open is no mapping
            key, _, offset = name.rpartition("|")
            shape = tuple(file.get_slice(name).get_shape())
            pieces[key].append(_Piece(file, name, tuple(map(int, offset.split(","))), shape))
    return pieces


def _read(shard: ShardedTensor, pieces: Sequence[_Piece]) -> torch.Tensor:
    result = torch.zeros(shard.local_shape, dtype=shard.dtype)
    num_read, stacked = 0, shard.prepend_axis_num
    start = shard.global_offset[stacked:]
    for piece in pieces:
        if piece.offset[:stacked] != shard.global_offset[:stacked]:
            continue
        piece_start = piece.offset[stacked:]
        low = [max(a, b) for a, b in zip(start, piece_start, strict=True)]
        ends = zip(start, shard.local_shape, piece_start, piece.shape, strict=True)
        high = [min(a + n, b + m) for a, n, b, m in ends]
        if any(a >= b for a, b in zip(low, high, strict=True)):
            continue
        source, target = (
            tuple(slice(a - s, b - s) for a, b, s in zip(low, high, origin, strict=True))
            for origin in (piece_start, start)
        )
        result[target] = piece.file.get_slice(piece.name)[source]
        num_read += result[target].numel()
    # Only the padded rows of a vocabulary may differ from layout to layout.
    if num_read != result.numel() and not shard.allow_shape_mismatch:
        raise ValueError(f"expected all of '{shard.key}', found {num_read} of its {result.numel()} numbers")
    return result
