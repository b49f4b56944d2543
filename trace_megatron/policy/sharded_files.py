"""How Megatron's distributed checkpoints are stored: each rank's tensors in one safetensors file.

Why not Megatron's own storage (torch_dist): it writes through a spawned server process and processes forked from this
one, threads, sockets and all, and it reads the index of a checkpoint with pickle.

A tensor of a file is one shard of a global tensor, named ``key|offset`` with the shard's offset in the global shape.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.dict_utils import dict_list_map_outplace, nested_values
from megatron.core.dist_checkpointing.mapping import is_main_replica
from megatron.core.dist_checkpointing.strategies.base import LoadShardedStrategy, SaveShardedStrategy
from safetensors import safe_open
from safetensors.torch import save_file

BACKEND, VERSION = "trace_megatron_safetensors", 1


class SafetensorsSave(SaveShardedStrategy):
    """Every rank writes the shards whose main copy it holds."""

    def __init__(self):
        super().__init__(BACKEND, VERSION)

    def save(self, sharded_state_dict: Any, checkpoint_dir: str | Path) -> None:
        shards = [shard for shard in nested_values(sharded_state_dict) if is_main_replica(shard.replica_id)]
        tensors = {_entry(shard): shard.data.detach().cpu().contiguous() for shard in shards}
        save_file(tensors, Path(checkpoint_dir) / f"rank_{dist.get_rank():05d}.safetensors")


class SafetensorsLoad(LoadShardedStrategy):
    """Every rank reads what overlaps its own shards, however the files are cut."""

    def load(self, sharded_state_dict: Any, checkpoint_dir: str | Path) -> Any:
        with ExitStack() as stack:
            pieces = _open_pieces(Path(checkpoint_dir), stack)
            return dict_list_map_outplace(lambda shard: _read(shard, pieces[shard.key]), sharded_state_dict)

    def load_tensors_metadata(self, checkpoint_dir: str | Path) -> Any:
        raise NotImplementedError("the files do not store global shapes: load with the state of a model")

    def check_backend_compatibility(self, loaded_backend: str) -> None:
        if loaded_backend != BACKEND:
            raise CheckpointingException(f"expected a checkpoint stored as {BACKEND}, found {loaded_backend}")

    def check_version_compatibility(self, loaded_version: int) -> None:
        if loaded_version != VERSION:
            raise CheckpointingException(f"expected version {VERSION} of {BACKEND}, found {loaded_version}")


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
            numbers = tuple(map(int, offset.split(","))) if offset else ()
            pieces[key].append(_Piece(file, name, numbers, tuple(file.get_slice(name).get_shape())))
    return pieces


def _read(shard: ShardedTensor, pieces: Sequence[_Piece]) -> torch.Tensor:
    """This rank's shard, put together from the stored pieces that overlap it."""
    result = torch.zeros(shard.local_shape, dtype=shard.dtype)
    num_read, stacked = 0, shard.prepend_axis_num
    for piece in pieces:
        if piece.offset[:stacked] != shard.global_offset[:stacked]:
            continue
        starts = shard.global_offset[stacked:]
        lows = [max(a, b) for a, b in zip(starts, piece.offset[stacked:], strict=True)]
        highs = [
            min(a + n, b + m)
            for a, n, b, m in zip(starts, shard.local_shape, piece.offset[stacked:], piece.shape, strict=True)
        ]
        if any(low >= high for low, high in zip(lows, highs, strict=True)):
            continue
        source = tuple(
            slice(low - start, high - start)
            for low, high, start in zip(lows, highs, piece.offset[stacked:], strict=True)
        )
        target = tuple(slice(low - start, high - start) for low, high, start in zip(lows, highs, starts, strict=True))
        result[target] = piece.file.get_slice(piece.name)[source]
        num_read += result[target].numel()
    # Only the padded rows of a vocabulary may differ from layout to layout.
    if num_read != result.numel() and not shard.allow_shape_mismatch:
        raise CheckpointingException(f"expected all of '{shard.key}', found {num_read} of {result.numel()} numbers")
    return result
