"""Buckets of tensors in anonymous shared memory, and the plug-in that names our backend to vLLM.

Both sides keep a bucket mapped from sync to sync, since the first touch of a page costs more than copying it. One byte
per reader at its start says whether that reader may still look at what it holds: its owner fills it again only when all
have let go, so that no buffer is reused before it was read.

Beside the tensors that were copied into it a bucket names others, which are read where they lie.
"""

from __future__ import annotations

import socket
import weakref
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import zip_longest
from typing import NamedTuple

import numpy as np
import torch

from trace_megatron.memfd import ALIGNMENT, Memfd, Memory, as_tensor, map_bytes, place_of
from trace_megatron.rollout.vllm_engine import SHARED_MEMORY_BACKEND
from trace_megatron.split_tensor import SplitTensor

MAX_READERS = 4096
"""The bytes before the first tensor: a page."""


class Entry(NamedTuple):
    """Part of a tensor in shared memory; JSON values."""

    name: str
    """Of the tensor."""
    dtype: str
    shape: tuple[int, ...]
    """Of the whole tensor."""
    offset: int
    """In bytes, of the part."""
    sizes: tuple[int, ...]
    """Of the part as it lies there; see ``SplitTensor``."""
    strides: tuple[int, ...]
    """In elements."""
    axis: int = 0
    start: int = 0
    """Where along ``axis`` the part begins in the whole."""
    checksum: int | None = None
    """Of the owner's part; None: not to be verified."""


class Part(NamedTuple):
    """What an entry describes."""

    entry: Entry
    tensor: torch.Tensor


class Bucket:
    """Memory for ``capacity`` bytes of tensors that are copied one after the other; mapped as a whole at once."""

    def __init__(self, capacity: int, num_readers: int = 1):
        assert num_readers <= MAX_READERS
        self._num_readers = num_readers
        self._memfd = Memfd(MAX_READERS + capacity, populate=True)
        self._bytes = torch.frombuffer(self._memfd.bytes, dtype=torch.uint8)
        self.memory = self._memfd.memory
        self.clear()

    def clear(self) -> None:
        """Forget the tensors."""
        self.entries: list[Entry] = []
        """Of what was copied into it."""
        self.in_place: dict[Memory, list[Entry]] = {}
        """Of what is read where it lies."""
        self._end = MAX_READERS

    @property
    def capacity(self) -> int:
        """Bytes of tensors that have room."""
        return self.memory.length - MAX_READERS

    @property
    def size(self) -> int:
        """Bytes of tensors, gaps included."""
        return self._end - MAX_READERS

    def has_room(self, split: SplitTensor) -> bool:
        """Whether ``add`` can take it."""
        return self._next() + split.num_bytes <= self.memory.length

    def add(self, name: str, split: SplitTensor, checksums: Sequence[int] = ()) -> None:
        """Copy a tensor (any device, any strides) behind those before it; there must be room. ``checksums``: its own,
        if it is to be verified."""
        offset = self._next()
        self._end = offset + split.num_bytes
        whole = self._bytes[offset : self._end].view(split.dtype).view(split.shape)
        split.copy_to(whole)
        entry = Entry(name, _name(split.dtype), split.shape, offset, split.shape, whole.stride(), 0, 0, *checksums)
        self.entries.append(entry)

    def note(self, name: str, split: SplitTensor, checksums: Sequence[int] = ()) -> None:
        """Have a tensor of which every part is in shared memory read there, which takes no room.

        It must stay as it is until all readers have let go of the bucket. ``checksums``: of the parts, if they are to
        be verified.
        """
        for part, start, value in zip_longest(split.parts, split.starts(), checksums):
            memory, offset = place_of(part)
            layout = tuple(part.shape), part.stride()
            entry = Entry(name, _name(part.dtype), split.shape, offset, *layout, split.axis, start, value)
            self.in_place.setdefault(memory, []).append(entry)

    def _next(self) -> int:
        return -(-self._end // ALIGNMENT) * ALIGNMENT

    def lend(self) -> None:
        """Mark it as in use by all readers; each of them takes its mark away."""
        self._bytes[: self._num_readers] = 1

    def take_back(self) -> None:
        """Take all marks away."""
        self._bytes[: self._num_readers] = 0

    def send(self, connection: socket.socket) -> None:
        """Write header and tensors to a stream, their length in front."""
        connection.sendall(self._end.to_bytes(8, "little"))
        with open(self.memory.path, "rb") as file:
            connection.sendfile(file, 0, self._end)

    @property
    def returned(self) -> bool:
        """Whether no reader looks at it."""
        return not self._bytes[: self._num_readers].any()

    def close(self) -> None:
        """Readers that have mapped it keep the memory."""
        self._memfd.close()
        self._bytes = None
        self._memfd.bytes.close()


class MappedBucket:
    """A reader's side of a bucket."""

    def __init__(self, memory: Memory):
        # Populating maps all pages at once instead of one fault each.
        self._array = map_bytes(memory, writable=True, populate=True)
        self._last_read: weakref.ref[np.ndarray] | None = None

    def read(self, entries: Iterable[Entry]) -> Iterator[Part]:
        """The tensors as views of the memory; ``try_return`` knows whether one of them is still alive."""
        array = self._array.view()  # the base of all, and so alive as long as one of them
        self._last_read = weakref.ref(array)
        yield from read_parts(array, entries)

    def try_return(self, reader: int) -> bool:
        """Let the owner fill it again; False where a tensor, or a view of one, is alive."""
        if self._last_read is not None and self._last_read() is not None:
            return False
        self._array[reader] = 0
        return True


def read_parts(array: np.ndarray, entries: Iterable[Entry]) -> Iterator[Part]:
    """What lies in the memory ``array``, uint8, as views of it."""
    memory = as_tensor(array)
    elements: dict[str, torch.Tensor] = {}
    """The same by dtype."""
    for entry in entries:
        if entry.dtype not in elements:
            dtype = getattr(torch, entry.dtype)
            elements[entry.dtype] = memory[: memory.numel() // dtype.itemsize * dtype.itemsize].view(dtype)
        typed = elements[entry.dtype]
        yield Part(entry, typed.as_strided(entry.sizes, entry.strides, entry.offset // typed.itemsize))


def group_parts(parts: Iterable[Part]) -> dict[str, SplitTensor]:
    """Tensors by name, of which every part is there."""
    by_name: dict[str, list[Part]] = {}
    for part in parts:
        by_name.setdefault(part.entry.name, []).append(part)
    return {name: _split(sorted(found, key=lambda part: part.entry.start)) for name, found in by_name.items()}


def _split(parts: Sequence[Part]) -> SplitTensor:
    entry = parts[0].entry
    return SplitTensor(tuple(entry.shape), tuple(part.tensor for part in parts), entry.axis)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def checksum(tensor: torch.Tensor) -> int:
    """CRC-32 of the tensor's bytes."""
    return zlib.crc32(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy())


def register() -> None:
    """Entry point ``vllm.general_plugins``: called in each of vLLM's processes, ours and other people's.

    Adds the backend's name to vLLM's registries; nothing is imported until an engine asks for it.
    """
    from vllm.distributed.weight_transfer import WeightTransferEngineFactory, WeightTransferTrainerFactory

    for factory, module, class_name in (
        (WeightTransferEngineFactory, "receiver", "SharedMemoryReceiver"),
        (WeightTransferTrainerFactory, "sender", "SharedMemorySender"),
    ):
        with suppress(ValueError):  # vLLM calls its plug-ins more than once
            factory.register_engine(SHARED_MEMORY_BACKEND, f"trace_megatron.weight_sync.{module}", class_name)
