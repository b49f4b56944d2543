"""Buckets of tensors in anonymous shared memory, and the plug-in that names our backend to vLLM.

A bucket is a memfd: it has no name to clean up, needs no room in /dev/shm (64 MB in a plain container), and vanishes
with its last user even if both sides are killed. Both sides keep it mapped from sync to sync, since the first touch of
a page costs more than copying it. One byte per reader at its start says whether that reader may still look at what it
holds: its owner fills it again only when all have let go, so that no buffer is reused before it was read.
"""

from __future__ import annotations

import itertools
import math
import mmap
import os
import socket
import weakref
import zlib
from collections.abc import Iterator, Sequence
from contextlib import suppress

import numpy as np
import torch

from trace_megatron.rollout.vllm_engine import SHARED_MEMORY_BACKEND

ALIGNMENT = 64
"""Bytes between which tensors start: a cache line, and a multiple of every item size."""

MAX_READERS = 4096
"""The bytes before the first tensor: a page."""

Entry = tuple[str, str, tuple[int, ...], int]
"""Name, dtype name, shape and offset in bytes of one tensor of a bucket."""

_numbers = itertools.count()


class Bucket:
    """Memory for ``capacity`` bytes of tensors that are copied one after the other; mapped as a whole at once."""

    def __init__(self, capacity: int, num_readers: int = 1):
        assert num_readers <= MAX_READERS
        self.key = f"{os.getpid()}-{next(_numbers)}"
        """Of no other bucket, unlike the path."""
        self.length = MAX_READERS + capacity
        self._num_readers = num_readers
        self._file = os.memfd_create("trace-megatron-weights")
        os.ftruncate(self._file, self.length)
        self._memory = mmap.mmap(self._file, self.length, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
        self._bytes = torch.frombuffer(self._memory, dtype=torch.uint8)
        self.clear()

    def clear(self) -> None:
        """Forget the tensors."""
        self.entries: list[Entry] = []
        self._end = MAX_READERS

    @property
    def capacity(self) -> int:
        """Bytes of tensors that have room."""
        return self.length - MAX_READERS

    @property
    def size(self) -> int:
        """Bytes of tensors, gaps included."""
        return self._end - MAX_READERS

    @property
    def path(self) -> str:
        """Where another process of the same user can open it while it is not closed."""
        return f"/proc/{os.getpid()}/fd/{self._file}"

    def add(self, name: str, tensor: torch.Tensor) -> bool:
        """Copy ``tensor`` (any device, any strides) to the end; False, with nothing done, where it has no room."""
        offset = -(-self._end // ALIGNMENT) * ALIGNMENT
        end = offset + tensor.numel() * tensor.itemsize
        if end > self.length:
            return False
        if end > offset:
            self._bytes[offset:end].view(tensor.dtype).view(tensor.shape).copy_(tensor.detach())
        self.entries.append((name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), offset))
        self._end = end
        return True

    def lend(self) -> None:
        """Mark it as in use by all readers; each of them takes its mark away."""
        self._bytes[: self._num_readers] = 1

    def take_back(self) -> None:
        """Take all marks away."""
        self._bytes[: self._num_readers] = 0

    def send(self, connection: socket.socket) -> None:
        """Write header and tensors to a stream, their length in front."""
        connection.sendall(self._end.to_bytes(8, "little"))
        with open(self.path, "rb") as file:
            connection.sendfile(file, 0, self._end)

    @property
    def returned(self) -> bool:
        """Whether no reader looks at it."""
        return not self._bytes[: self._num_readers].any()

    def close(self) -> None:
        """Readers that have mapped it keep the memory."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
            self._bytes = None
            self._memory.close()


class MappedBucket:
    """A reader's side of a bucket."""

    def __init__(self, path: str, length: int):
        with open(path, "r+b") as file:
            # Populating maps all pages at once instead of one fault each.
            self._memory = mmap.mmap(file.fileno(), length, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
        self._last_read: weakref.ref[np.ndarray] | None = None

    def read(self, entries: Sequence[Entry]) -> Iterator[tuple[str, torch.Tensor]]:
        """The tensors as views of the memory; ``try_return`` knows whether one of them is still alive."""
        array = np.frombuffer(self._memory, dtype=np.uint8)  # the base of all, and so alive as long as one of them
        self._last_read = weakref.ref(array)
        yield from views(array, entries)

    def try_return(self, reader: int) -> bool:
        """Let the owner fill it again; False where a tensor, or a view of one, is alive."""
        if self._last_read is not None and self._last_read() is not None:
            return False
        self._memory[reader] = 0
        return True


def views(array: np.ndarray, entries: Sequence[Entry]) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of a bucket whose bytes are ``array``."""
    memory = torch.from_numpy(array)
    for name, dtype_name, shape, offset in entries:
        dtype = getattr(torch, dtype_name)
        num_bytes = math.prod(shape) * dtype.itemsize
        yield name, memory[offset : offset + num_bytes].view(dtype).view(tuple(shape))


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
