"""The index of a Megatron-Core distributed checkpoint: which part of which global tensor lies where in which file.

It is a pickle by its format. It is read with a list of the classes that an index is made of, and written by no code
of ours that a reader would have to trust.
"""

from __future__ import annotations

import importlib
import json
import pickle
import struct
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from trace_megatron.errors import UserError

INDEX = ".metadata"
_CONFIG, _COMMON = "metadata.json", "common.pt"
_BACKENDS = {"sharded_backend": "torch_dist", "sharded_backend_version": 1} | {
    "common_backend": "torch",
    "common_backend_version": 1,
}


BROKEN_PICKLE = (
    pickle.UnpicklingError,
    EOFError,
    AttributeError,
    LookupError,
    TypeError,
    ValueError,
    OverflowError,
    MemoryError,
    struct.error,
)
"""What reading a damaged pickle ends in."""


@dataclass(frozen=True, slots=True)
class Part:
    """One stored part of a global tensor, or (without shape) a stored object."""

    key: str
    offset: tuple[int, ...]
    shape: tuple[int, ...]
    dtype: str
    file: str
    start: int
    length: int

    def overlaps(self, other: Part) -> bool:
        """Whether both hold some element of the tensor."""
        sides = zip(self.offset, self.shape, other.offset, other.shape, strict=True)
        return all(a < b + m and b < a + n for a, n, b, m in sides)


def is_megatron_folder(folder: str | Path) -> bool:
    """Whether it holds a distributed checkpoint."""
    return (Path(folder) / INDEX).is_file() and (Path(folder) / _CONFIG).is_file()


def index_bytes(parts: Sequence[Part]) -> bytes:
    """The index of files that hold ``parts``."""
    # Imported here: it takes seconds, and whoever only reads an index never needs it.
    from torch.distributed.checkpoint.filesystem import _StorageInfo
    from torch.distributed.checkpoint.metadata import (
        BytesStorageMetadata,
        ChunkStorageMetadata,
        Metadata,
        MetadataIndex,
        TensorProperties,
        TensorStorageMetadata,
    )

    entries: dict[str, Any] = {}
    storage = {}
    for part in parts:
        place = _StorageInfo(part.file, part.start, part.length)
        if not part.dtype:
            entries[part.key] = BytesStorageMetadata()
            storage[MetadataIndex(part.key)] = place
            continue
        if part.key not in entries:
            properties = TensorProperties(dtype=getattr(torch, part.dtype))
            entries[part.key] = TensorStorageMetadata(properties, torch.Size(()), [])
        entry = entries[part.key]
        entry.chunks.append(ChunkStorageMetadata(torch.Size(part.offset), torch.Size(part.shape)))
        ends = [start + size for start, size in zip(part.offset, part.shape, strict=True)]
        entry.size = torch.Size([max(pair) for pair in zip(ends, entry.size or [0] * len(ends), strict=True)])
        storage[MetadataIndex(part.key, part.offset)] = place
    return pickle.dumps(Metadata(entries, storage_data=storage))


def write_index(folder: Path, index: bytes) -> None:
    """Make a checkpoint of the folder; its files must hold the parts."""
    torch.save({}, folder / _COMMON)
    (folder / INDEX).write_bytes(index)
    (folder / _CONFIG).write_text(json.dumps(_BACKENDS))


_ALLOWED = {
    ("torch.distributed.checkpoint.metadata", "Metadata"),
    ("torch.distributed.checkpoint.metadata", "MetadataIndex"),
    ("torch.distributed.checkpoint.metadata", "TensorStorageMetadata"),
    ("torch.distributed.checkpoint.metadata", "BytesStorageMetadata"),
    ("torch.distributed.checkpoint.metadata", "ChunkStorageMetadata"),
    ("torch.distributed.checkpoint.metadata", "TensorProperties"),
    ("torch.distributed.checkpoint.metadata", "StorageMeta"),
    ("torch.distributed.checkpoint.metadata", "_MEM_FORMAT_ENCODING"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch.distributed.checkpoint.planner", "SavePlan"),
    ("torch.distributed.checkpoint.planner", "WriteItem"),
    ("torch.distributed.checkpoint.planner", "WriteItemType"),
    ("torch.distributed.checkpoint.planner", "TensorWriteData"),
    ("megatron.core.dist_checkpointing.strategies.torch", "MCoreMetadata"),
    ("megatron.core.dist_checkpointing.strategies.torch", "MCoreSavePlan"),
    ("torch.serialization", "_get_layout"),
    ("torch", "Size"),
    ("pathlib", "PosixPath"),
    ("collections", "OrderedDict"),
}
"""What an index is made of, beside torch's dtypes; a pickle that names anything else is refused before it is called."""


_OUR_OWN = ("torch", "torch.serialization", "pathlib", "collections")
"""Modules of them that are called; of the other classes a record stands in for each, which holds what was stored."""


class _Record:
    """An object of some class of the list, without what that would do."""

    def __init__(self, *arguments: Any):
        self.arguments = arguments

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, dict):
            self.__dict__.update(state)
        else:
            self.state = state

    def _key(self) -> tuple[Any, ...]:
        return type(self), getattr(self, "fqn", None), getattr(self, "offset", None)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Record) and self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self._key())


_RECORDS = {pair: type(pair[1], (_Record,), {}) for pair in _ALLOWED if pair[0] not in _OUR_OWN}
_BYTES = _RECORDS["torch.distributed.checkpoint.metadata", "BytesStorageMetadata"]


class _IndexUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and isinstance(dtype := getattr(torch, name, None), torch.dtype):
            return dtype  # an optimizer's or a counter's may be any; the model's own are checked by its reader
        if (module, name) not in _ALLOWED:
            raise pickle.UnpicklingError(f"it names {module}.{name}, which no index contains")
        return _RECORDS.get((module, name)) or getattr(importlib.import_module(module), name)


def read_index(folder: Path) -> tuple[dict[str, list[Part]], dict[str, tuple[int, ...]]]:
    """Parts and global shape by key."""
    path = folder / INDEX
    if not is_megatron_folder(folder):
        raise UserError(f"expected a Megatron distributed checkpoint (.metadata, metadata.json) in '{folder}'")
    try:
        with path.open("rb") as file:
            index = _IndexUnpickler(file).load()
        parts: dict[str, list[Part]] = defaultdict(list)
        sizes = {}
        places = {(index.fqn, index.__dict__.get("offset")): place for index, place in index.storage_data.items()}
        for key, entry in index.state_dict_metadata.items():
            if isinstance(entry, _BYTES):
                continue
            sizes[key] = tuple(entry.size)
            dtype = entry.properties.state[0]
            if not isinstance(dtype, torch.dtype):
                raise TypeError(f"{dtype} as the dtype of '{key}'")
            for chunk in entry.chunks:
                place = places[key, chunk.offsets]
                if getattr(place, "transform_descriptors", None):
                    raise UserError(f"expected plain tensors in '{folder}', found '{key}' transformed: save it plainly")
                where = (place.relative_path, place.offset, place.length)
                if not isinstance(place.relative_path, str) or min(where[1:]) < 0:
                    raise ValueError(f"'{key}' at {where}")
                if not len(chunk.offsets) == len(chunk.sizes) == len(entry.size):
                    raise ValueError(f"a part of '{key}' at {chunk.offsets} of shape {chunk.sizes}")
                parts[key].append(
                    Part(key, tuple(chunk.offsets), tuple(chunk.sizes), str(dtype).removeprefix("torch."), *where)
                )
    except BROKEN_PICKLE as error:
        found = first_line(error)
        raise UserError(f"expected the index of a checkpoint in '{path}', found: {found}: copy it again") from error
    return parts, sizes


def first_line(error: BaseException) -> str:
    """What it says, without the advice that torch and pickle add."""
    return str(error).partition("\n")[0] or type(error).__name__
