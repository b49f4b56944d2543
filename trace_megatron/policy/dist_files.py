"""Megatron-Core's distributed checkpoints ("torch_dist"), read and written one tensor at a time without ranks.

Such a folder holds parts of global tensors under keys that no parallel layout shows in, so that any layout can load
it: layers and experts are numbered along leading axes of one tensor, and all of gate precedes all of up.
"""

from __future__ import annotations

import io
import itertools
import math
import os
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
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
from trace_megatron.policy.hf_files import file_stamp
from trace_megatron.policy.layout import split_layers
from trace_megatron.policy.names import (
    Layout,
    ParallelSizes,
    RowRun,
    Weight,
    checkpoint_keys,
    expert_owner,
    row_runs,
)
from trace_megatron.policy.rows import Piece, Rows, TargetFile, read_tensor, write_tensor
from trace_megatron.policy.stored_tensor import Window, frame, stored_tensor

_MODEL_KEYS = ("decoder.", "embedding.", "output_layer.")
_EXTRA_STATE = "_extra_state"
_DTYPES = {"float32", "bfloat16", "float16"}


class MegatronFolder:
    """The tensors of a distributed checkpoint, known to be there, of the right shape and whole before one is read."""

    index_name = INDEX
    """The file that makes a checkpoint of the folder."""

    def __init__(self, folder: str | Path, weights: Sequence[Weight], hf: HFModelConfig):
        """Raises UserError that names the file or tensor that is missing, left over, cut, or of another shape."""
        self._folder, self._hf = Path(folder), hf
        self._parts, self._sizes = self._read_index()
        self._grouped: dict[tuple[str, int], dict[tuple[int, ...], list[Part]]] = {}
        self._check(weights)

    def read(self, weight: Weight) -> list[torch.Tensor]:
        """The HF tensors of one weight."""
        with ExitStack() as stack:
            stored = zip(self.rows(weight, stack), weight.hf.values(), strict=True)
            return [read_tensor(rows, shape, self.dtype(weight)) for rows, shape in stored]

    def rows(self, weight: Weight, stack: ExitStack) -> list[Rows]:
        """Where the HF tensors of one weight lie, in files that ``stack`` closes."""
        itemsize = self.dtype(weight).itemsize
        pieces: list[list[Piece]] = [[] for _ in weight.hf]
        for (key, lead), runs in zip(self._keys(weight), self._runs(weight), strict=True):
            for part in self._parts_of(key, lead):
                file, start = self._open(part, stack)
                _add_pieces(pieces, runs, part, len(lead), itemsize, file, start)
        return [Rows.of(shape, itemsize, own) for shape, own in zip(weight.hf.values(), pieces, strict=True)]

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

    def _runs(self, weight: Weight) -> list[list[RowRun]]:
        """The rows of each of ``_keys``."""
        if len(self._keys(weight)) == 1:
            return [row_runs(weight, self._hf)]
        return [[RowRun(index, 0, 0, shape[0])] for index, shape in enumerate(weight.hf.values())]

    def _parts_of(self, key: str, lead: tuple[int, ...]) -> list[Part]:
        groups = self._grouped.get((key, len(lead)))
        if groups is None:
            groups = self._grouped[key, len(lead)] = defaultdict(list)
            for part in self._parts[key]:
                groups[part.offset[: len(lead)]].append(part)
        return groups[lead]

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
                    raise UserError(
                        f"expected all parts of '{key}' in '{self._folder}', each once, found others: save it again"
                    )
            used.update(pair for keys in checkpoint_keys(weight) for pair in keys)
            dtypes = {part.dtype for key, lead in keys for part in self._parts_of(key, lead)}
            if len(dtypes) > 1 or not dtypes <= _DTYPES:
                raise UserError(
                    f"expected '{keys[0][0]}' in '{self._folder}' as one of {', '.join(sorted(_DTYPES))}, found "
                    f"{' and '.join(sorted(dtypes))}: save it as one of them"
                )
        for key in self._sizes:
            if key.startswith(_MODEL_KEYS) and key not in used and _EXTRA_STATE not in key:
                raise UserError(f"expected no '{key}' in '{self._folder}', found it: config.json is of another model")
        for part in (part for parts in self._parts.values() for part in parts):
            file = self._folder / part.file
            if not file.is_file() or file.stat().st_size < part.start + part.length:
                raise UserError(f"expected '{part.key}' in '{file}', found it missing or cut: copy it again")

    def _open(self, part: Part, stack: ExitStack) -> tuple[BinaryIO, int]:
        """A file, and where in it the part's numbers begin."""
        path = self._folder / part.file
        file = stack.enter_context(path.open("rb", buffering=0))
        stored = Window(file, part.start, part.length)
        try:
            found = stored_tensor(stored)
            if found is None:  # a view, or of another kind: torch knows, and a file in memory stands in
                stored.seek(0)
                tensor = torch.load(stored, map_location="cpu", weights_only=True)
                shape, dtype, start = tuple(tensor.shape), tensor.dtype, 0
                file = stack.enter_context(TargetFile(os.memfd_create(part.key)))
                write_tensor(Rows.at(file, 0, (*shape, 1), dtype.itemsize), tensor)
            else:
                shape, dtype, start = found
                start += part.start
        except (RuntimeError, *BROKEN_PICKLE) as error:
            found = first_line(error)
            raise UserError(f"expected '{part.key}' in '{path}', found broken data: {found}: copy it again") from error
        if shape != part.shape or str(dtype) != f"torch.{part.dtype}":
            raise UserError(
                f"expected {part.dtype} {part.shape} of '{part.key}' in '{path}', found {dtype} {shape}: copy it again"
            )
        return file, start


class MegatronWriter:
    """Places the parts of a model in the layout of some ranks, and writes the index when all are there."""

    def __init__(self, folder: Path, hf: HFModelConfig, ranks: ParallelSizes):
        self._folder, self._hf, self._ranks = folder, hf, ranks
        self._parts: list[Part] = []
        self._ends: dict[str, int] = {}
        self._files: dict[str, TargetFile] = {}
        counts = split_layers(hf, PolicyConfig(pipeline_parallel=ranks.pipeline))
        self._stages = [stage for stage, count in enumerate(counts) for _ in range(count)]

    def skip(self, weight: Weight, dtype: torch.dtype) -> None:
        """The next weight is there, from a writer that did not come to its end."""
        self._reserve(weight, dtype)

    def place(self, weight: Weight, dtype: torch.dtype) -> list[Rows]:
        """Where the next weight's HF tensors go; what surrounds them is written."""
        runs, pieces = row_runs(weight, self._hf), [[] for _ in weight.hf]
        for part in self._reserve(weight, dtype):
            file = self._file(part.file, part.start)
            before, behind = frame(part.shape, dtype)
            file.write_at(part.start, before)
            file.write_at(part.start + part.length - len(behind), behind)
            _add_pieces(pieces, runs, part, len(_lead(weight)), dtype.itemsize, file, part.start + len(before))
        return [Rows.of(shape, dtype.itemsize, own) for shape, own in zip(weight.hf.values(), pieces, strict=True)]

    def write_extra_states(self) -> None:
        """Empty objects that Megatron's layers ask for when they load: Transformer Engine keeps FP8 scales there."""
        stored = io.BytesIO()
        torch.save([None], stored)
        for key in _extra_states(self._hf):
            part = self._append(Part(key, (), (), "", _file_name(0), 0, len(stored.getbuffer())))
            self._file(part.file, part.start).write_at(part.start, stored.getbuffer())

    def open_files(self) -> list[int]:
        """Descriptors of what may not be on the disk yet."""
        return [file.fileno() for file in self._files.values()]

    def close(self) -> None:
        """After the last weight: the index, without which the folder is no checkpoint."""
        index = index_bytes(self._parts)  # takes seconds of imports, while the disk is still at work
        for file in self._files.values():
            os.fdatasync(file.fileno())
            file.close()
        write_index(self._folder, index)

    def _reserve(self, weight: Weight, dtype: torch.dtype) -> list[Part]:
        """The weight's parts, behind all that was placed before: the same places in every run."""
        lead, new, size = _lead(weight), [], self._ranks.tensor
        first = self._stage(weight) * self._ranks.per_stage
        if weight.expert is not None:  # whole on one rank
            size, first = 1, first + expert_owner(self._hf, weight.expert, self._ranks.expert)
        for rank, offset, shape in _cuts(weight, size):
            length = sum(map(len, frame((1,) * len(lead) + shape, dtype))) + dtype.itemsize * math.prod(shape)
            for key in _written_keys(weight, self._hf):
                part = Part(
                    key,
                    (*lead, *offset),
                    (1,) * len(lead) + shape,
                    str(dtype).removeprefix("torch."),
                    _file_name(first + rank),
                    0,
                    length,
                )
                new.append(self._append(part))
        return new

    def _append(self, part: Part) -> Part:
        """The part at the end of its file."""
        part = replace(part, start=self._ends.get(part.file, 0))
        self._ends[part.file] = part.start + part.length
        self._parts.append(part)
        return part

    def _file(self, name: str, end: int) -> TargetFile:
        """What lies behind ``end`` when it is opened is of no use."""
        if name not in self._files:
            self._files[name] = TargetFile.cut(self._folder / name, b"", end)
        return self._files[name]

    def _stage(self, weight: Weight) -> int:
        if weight.layer is not None:
            return self._stages[weight.layer]
        return (
            0
            if weight.layout is Layout.VOCAB and weight.megatron[0].startswith("embedding.")
            else (self._ranks.pipeline - 1)
        )


def _file_name(rank: int) -> str:
    return f"__{rank}_0.distcp"


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


def _cuts(weight: Weight, size: int) -> Iterator[tuple[int, tuple[int, ...], tuple[int, ...]]]:
    """Tensor-parallel rank, offset in the global tensor and shape of all parts; of a vocabulary, padded rows too."""
    shape, axis = _whole_shape(weight), weight.layout.split_axis
    if axis is None:
        yield 0, (0,) * len(shape), shape
        return
    lengths = [own[0] for own in weight.hf.values()] if weight.layout is Layout.GATE_UP else [shape[axis]]
    start = 0
    for length in lengths:
        step = -(-length // size)
        for rank in range(size):
            offset, piece = [0] * len(shape), list(shape)
            offset[axis], piece[axis] = start + rank * step, step
            yield rank, tuple(offset), tuple(piece)
        start += length


def _add_pieces(
    pieces: list[list[Piece]],
    runs: Sequence[RowRun],
    part: Part,
    num_leading: int,
    itemsize: int,
    file: BinaryIO,
    start: int,
) -> None:
    """Add to each HF tensor's pieces what it has of a stored part, whose numbers begin at ``start`` of ``file``."""
    (row, *columns), (num_rows, *num_columns) = part.offset[num_leading:], part.shape[num_leading:]
    left, width = itemsize * sum(columns), itemsize * math.prod(num_columns)
    for run in runs:
        low, high = max(row, run.start), min(row + num_rows, run.start + run.count)
        if low < high:
            rows = range(run.first + low - run.start, run.first + high - run.start)
            pieces[run.tensor].append(Piece(file, start + (low - row) * width, rows, range(left, left + width)))


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
