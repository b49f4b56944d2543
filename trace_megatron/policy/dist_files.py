"""Megatron-Core's distributed checkpoints ("torch_dist"), read and written one tensor at a time without ranks.

Such a folder holds parts of global tensors under keys that no parallel layout shows in, so that any layout can load
it: layers and experts are numbered along leading axes of one tensor, and all of gate precedes all of up.
"""

from __future__ import annotations

import io
import itertools
import math
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

import torch

from trace_megatron.config import PolicyConfig
from trace_megatron.errors import UserError
from trace_megatron.policy.dist_index import (
    BROKEN_PICKLE,
    INDEX,
    Part,
    first_line,
    index_bytes,
    read_index,
    write_index,
)
from trace_megatron.policy.hf_config import HFModelConfig
from trace_megatron.policy.hf_files import file_stamp, read_into, write_bytes
from trace_megatron.policy.layout import split_layers
from trace_megatron.policy.names import (
    Layout,
    ParallelSizes,
    Weight,
    checkpoint_keys,
    expert_owner,
    from_shards,
    to_shard,
)
from trace_megatron.policy.stored_tensor import Window, stored_tensor

_MODEL_KEYS = ("decoder.", "embedding.", "output_layer.")
_EXTRA_STATE = "_extra_state"


class MegatronFolder:
    """The tensors of a distributed checkpoint, known to be there, of the right shape and whole before one is read."""

    index_name = INDEX
    """The file that makes a checkpoint of the folder."""

    def __init__(self, folder: str | Path, weights: Sequence[Weight], hf: HFModelConfig):
        """Raises UserError that names the file or tensor that is missing, left over, cut, or of another shape."""
        self._folder, self._hf = Path(folder), hf
        self._parts, self._sizes = self._read_index()
        self._check(weights)

    def read(self, weight: Weight) -> list[torch.Tensor]:
        """The HF tensors of one weight."""
        keys = self._keys(weight)
        tensors = [self._assemble(key, lead) for key, lead in keys]
        return tensors if len(keys) > 1 else from_shards(weight, tensors, self._hf)

    def dtype(self, weight: Weight) -> torch.dtype:
        key, lead = self._keys(weight)[0]
        return getattr(torch, self._parts_of(key, lead)[0].dtype)

    def stamp(self) -> list[tuple[str, int, int]]:
        """Names, sizes and times of the files: different if one was replaced."""
        files = {part.file for parts in self._parts.values() for part in parts}
        return file_stamp({self._folder / file for file in files} | {self._folder / self.index_name})

    def _read_index(self) -> tuple[dict[str, list[Part]], dict[str, tuple[int, ...]]]:
        """Parts and global shape by key."""
        return read_index(self._folder)

    def _keys(self, weight: Weight) -> list[tuple[str, tuple[int, ...]]]:
        """Key and leading indices of what the weight is stored as: one tensor, or gate and up on their own."""
        lead = _lead(weight)
        for stacked, single in checkpoint_keys(weight):
            if stacked in self._sizes:
                return [(stacked, lead)]
            if single in self._sizes:
                return [(single, ())]
            if f"{single}_w" in self._sizes and f"{single}_v" in self._sizes:
                return [(f"{single}_w", ()), (f"{single}_v", ())]
        key = checkpoint_keys(weight)[0][0]
        raise UserError(f"expected '{key}' in '{self._folder}', found none: config.json is of another model")

    def _parts_of(self, key: str, lead: tuple[int, ...]) -> list[Part]:
        return [part for part in self._parts[key] if part.offset[: len(lead)] == lead]

    def _check(self, weights: Sequence[Weight]) -> None:
        used = set()
        for weight in weights:
            keys = self._keys(weight)
            used.update(key for key, _ in keys)
            shapes = [_whole_shape(weight)] if len(keys) == 1 else list(weight.hf.values())
            for (key, lead), shape in zip(keys, shapes, strict=True):
                counts = (self._hf.num_layers, self._hf.num_experts)[: len(lead)]
                found, expected = self._sizes[key], (*counts, *shape)
                padded = weight.layout is Layout.VOCAB and found[0] >= shape[0] and found[1:] == expected[1:]
                if found != expected and not padded:
                    raise UserError(
                        f"expected shape {expected} of '{key}' in '{self._folder}', found {found}: "
                        "config.json is of another model"
                    )
                parts = self._parts_of(key, lead)
                num_found = sum(math.prod(part.shape) for part in parts)
                twice = any(one.overlaps(other) for one, other in itertools.combinations(parts, 2))
                if num_found != math.prod(found[len(lead) :]) or twice:
                    raise UserError(f"expected all parts of '{key}' in '{self._folder}', found some: save it again")
            used.update(pair for keys in checkpoint_keys(weight) for pair in keys)
        for key in self._sizes:
            if key.startswith(_MODEL_KEYS) and key not in used and _EXTRA_STATE not in key:
                raise UserError(f"expected no '{key}' in '{self._folder}', found it: config.json is of another model")
        for part in (part for parts in self._parts.values() for part in parts):
            file = self._folder / part.file
            if not file.is_file() or file.stat().st_size < part.start + part.length:
                raise UserError(f"expected '{part.key}' in '{file}', found it missing or cut: copy it again")

    def _assemble(self, key: str, lead: tuple[int, ...]) -> torch.Tensor:
        parts = self._parts_of(key, lead)
        whole = torch.empty(self._sizes[key][len(lead) :], dtype=getattr(torch, parts[0].dtype))
        for part in parts:
            starts, sizes = part.offset[len(lead) :], part.shape[len(lead) :]
            self._read(part, whole[tuple(slice(a, a + size) for a, size in zip(starts, sizes, strict=True))])
        return whole

    def _read(self, part: Part, target: torch.Tensor) -> None:
        """Fill ``target``, of the part's shape without leading ones."""
        path = self._folder / part.file
        try:
            with path.open("rb", buffering=0) as file:
                stored = Window(file, part.start, part.length)
                found = stored_tensor(stored)
                if found is None:  # a view, or of another kind: torch knows
                    stored.seek(0)
                    tensor = torch.load(stored, map_location="cpu", weights_only=True)
                    shape, dtype = tuple(tensor.shape), tensor.dtype
                else:
                    shape, dtype, start = found
                if shape != part.shape or dtype is not target.dtype:
                    raise UserError(
                        f"expected {target.dtype} {part.shape} of '{part.key}' in '{path}', found {dtype} {shape}: "
                        "copy it again"
                    )
                if found is None:
                    target.copy_(tensor.view(target.shape))
                else:  # straight to its place: torch.load took five times as long through a part of a file
                    file.seek(part.start + start)
                    read_into(file, target)
        except (RuntimeError, *BROKEN_PICKLE) as error:
            found = first_line(error)
            raise UserError(f"expected '{part.key}' in '{path}', found broken data: {found}: copy it again") from error


class MegatronWriter:
    """Writes the parts of a model in the layout of some ranks, and the index when all are there."""

    def __init__(self, folder: Path, hf: HFModelConfig, ranks: ParallelSizes, parts: Sequence[Part] = ()):
        """``parts`` are there from a writer that did not come to its end; anything behind them is cut off."""
        self._folder, self._hf, self._ranks = folder, hf, ranks
        self._parts = list(parts)
        self._files: dict[str, BinaryIO] = {}
        counts = split_layers(hf, PolicyConfig(pipeline_parallel=ranks.pipeline))
        self._stages = [stage for stage, count in enumerate(counts) for _ in range(count)]

    def write(self, weight: Weight, tensors: list[torch.Tensor]) -> list[Part]:
        """Store a weight's HF tensors; returns what was stored."""
        lead, new, size = _lead(weight), [], self._ranks.tensor
        first = self._stage(weight) * self._ranks.per_stage
        if weight.expert is not None:  # whole on one rank
            size, first = 1, first + expert_owner(self._hf, weight.expert, self._ranks.expert)
        for rank, offset, piece in _cut(weight, tensors, self._hf, size):
            file = self._file(first + rank)
            for key in _written_keys(weight, self._hf):
                stored = piece.view((1,) * len(lead) + piece.shape)
                new.append(_save(stored, key, (*lead, *offset), file))
        self._parts += new
        return new

    def write_extra_states(self) -> None:
        """Empty objects that Megatron's layers ask for when they load: Transformer Engine keeps FP8 scales there."""
        file = self._file(0)
        stored = io.BytesIO()
        torch.save([None], stored)
        for key in _extra_states(self._hf):
            start = file.seek(0, os.SEEK_END)
            file.write(stored.getbuffer())
            self._parts.append(Part(key, (), (), "", Path(file.name).name, start, stored.tell()))

    def open_files(self) -> list[int]:
        """Descriptors of what was written to."""
        return [file.fileno() for file in self._files.values()]

    def flush(self) -> None:
        """Bring what was written to the disk."""
        for file in self._files.values():
            os.fdatasync(file.fileno())

    def close(self) -> None:
        """After the last weight: the index, without which the folder is no checkpoint."""
        index = index_bytes(self._parts)  # takes seconds of imports, while the disk is still at work
        self.flush()
        for file in self._files.values():
            file.close()
        write_index(self._folder, index)

    def _file(self, rank: int) -> BinaryIO:
        name = f"__{rank}_0.distcp"
        if name not in self._files:
            path = self._folder / name
            path.touch()
            file = path.open("r+b", buffering=0)
            file.truncate(max((part.start + part.length for part in self._parts if part.file == name), default=0))
            file.seek(0, os.SEEK_END)
            self._files[name] = file
        return self._files[name]

    def _stage(self, weight: Weight) -> int:
        if weight.layer is not None:
            return self._stages[weight.layer]
        return (
            0
            if weight.layout is Layout.VOCAB and weight.megatron[0].startswith("embedding.")
            else (self._ranks.pipeline - 1)
        )


def _lead(weight: Weight) -> tuple[int, ...]:
    return tuple(index for index in (weight.layer, weight.expert) if index is not None)


def _whole_shape(weight: Weight) -> tuple[int, ...]:
    shapes = list(weight.hf.values())
    return (sum(shape[0] for shape in shapes), *shapes[0][1:])


def _written_keys(weight: Weight, hf: HFModelConfig) -> list[str]:
    """One key, in general Transformer Engine's, by which Megatron's own layers call themselves in a checkpoint too.

    Only the norm before experts has one name with Transformer Engine, which does not fuse it, and another without.
    """
    keys = [stacked for stacked, _ in checkpoint_keys(weight)]
    before_experts = hf.num_experts > 0 and weight.megatron[0].endswith("pre_mlp_layernorm.weight")
    return keys if before_experts else keys[-1:]


def _cut(
    weight: Weight, tensors: list[torch.Tensor], hf: HFModelConfig, size: int
) -> Iterator[tuple[int, tuple[int, ...], torch.Tensor]]:
    """Tensor-parallel rank, offset in the global tensor, and the piece, for all ranks."""
    if weight.layout is Layout.GATE_UP:
        num_rows = tensors[0].shape[0]
        for half, tensor in enumerate(tensors):
            for rank, piece in enumerate(tensor.chunk(size)):
                yield rank, (half * num_rows + rank * piece.shape[0], 0), piece
        return
    axis = weight.layout.split_axis
    if axis is None:
        yield 0, (0,) * tensors[0].ndim, tensors[0]
        return
    whole = to_shard(weight, tensors, hf, 0, 1)
    step = -(-whole.shape[axis] // size)
    for rank in range(size):
        piece = whole.narrow(axis, rank * step, min(step, whole.shape[axis] - rank * step))
        if piece.shape[axis] < step:  # padded rows of a vocabulary
            piece = torch.nn.functional.pad(piece, (0, 0, 0, step - piece.shape[axis]))
        yield rank, tuple(rank * step if index == axis else 0 for index in range(whole.ndim)), piece


def _save(tensor: torch.Tensor, key: str, offset: tuple[int, ...], file: BinaryIO) -> Part:
    tensor = _alone(tensor)
    start = file.tell()
    checked = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)  # only an unzip would look at them; a third of the time
    try:
        torch.save(tensor, _InPieces(file))
    finally:
        torch.serialization.set_crc32_options(checked)
    dtype = str(tensor.dtype).removeprefix("torch.")
    return Part(key, offset, tuple(tensor.shape), dtype, Path(file.name).name, start, file.tell() - start)


def _alone(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor as all of its storage, of which torch.save writes everything; a copy only where rows are cut."""
    if tensor.untyped_storage().nbytes() == tensor.nbytes and tensor.is_contiguous():
        return tensor
    if not tensor.is_contiguous():
        return tensor.clone(memory_format=torch.contiguous_format)
    return torch.from_numpy(tensor.view(-1).view(torch.uint8).numpy()).view(tensor.dtype).view(tensor.shape)


class _InPieces:
    """What torch.save needs of a file, over one that is written piece by piece."""

    def __init__(self, file: BinaryIO):
        self._file = file

    def write(self, view: memoryview | bytes) -> int:
        write_bytes(self._file, memoryview(view))
        return len(view)

    def flush(self) -> None:
        """Nothing is buffered."""


def _extra_states(hf: HFModelConfig) -> Iterator[str]:
    """The keys of one object per module, numbered as layers and experts are."""
    modules = ["self_attention.linear_qkv", "self_attention.linear_proj", "self_attention.core_attention"]
    if hf.qk_norm:
        modules += ["self_attention.q_layernorm", "self_attention.k_layernorm"]
    linears = ("linear_fc1", "linear_fc2")
    if not hf.num_experts:
        modules += [f"mlp.{name}" for name in linears]
    else:
        modules.append("pre_mlp_layernorm")
    for layer in range(hf.num_layers):
        for module in modules:
            yield f"decoder.layers.{module}.{_EXTRA_STATE}/shard_{layer}_{hf.num_layers}"
        for expert in range(hf.num_experts):
            for name in linears:
                place = f"{layer}.{expert}_{hf.num_layers}.{hf.num_experts}"
                yield f"decoder.layers.mlp.experts.experts.{name}.{_EXTRA_STATE}/shard_{place}"
    yield f"decoder.final_layernorm.{_EXTRA_STATE}/shard_0_1"
