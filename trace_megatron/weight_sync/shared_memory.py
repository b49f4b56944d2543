"""Buckets of tensors in anonymous shared memory, and the plug-in that names our backend to vLLM.

A bucket is a memfd: it has no name to clean up, needs no room in /dev/shm (64 MB in a plain container), and vanishes
with its last user even if both sides are killed. Its owner fills it once; a reader maps it, and the memory lives as
long as any tensor read from it, so that no buffer is ever reused before it was read.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator, Sequence
from contextlib import suppress

import numpy as np
import torch

from trace_megatron.rollout.vllm_engine import SHARED_MEMORY_BACKEND

ALIGNMENT = 64
"""Bytes between which tensors start: a cache line, and a multiple of every item size."""

Entry = tuple[str, str, tuple[int, ...], int]
"""Name, dtype name, shape and offset in bytes of one tensor of a bucket."""


class Bucket:
    """Tensors copied one after the other into shared memory; closed by its owner when every reader has mapped it."""

    def __init__(self) -> None:
        self._file = os.fdopen(os.memfd_create("trace-megatron-weights"), "wb", buffering=0)
        self.size = 0
        self.entries: list[Entry] = []

    @property
    def path(self) -> str:
        """Where another process of the same user can open it while it is not closed."""
        return f"/proc/{os.getpid()}/fd/{self._file.fileno()}"

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Copy ``tensor`` (any device, any strides) to the end."""
        tensor = tensor.detach().cpu().contiguous()
        offset = -(-self.size // ALIGNMENT) * ALIGNMENT
        self._file.seek(offset)
        view = memoryview(tensor.reshape(-1).view(torch.uint8).numpy())
        self.size = offset + len(view)
        while len(view):  # one write moves at most 2 GiB
            view = view[self._file.write(view) :]
        self.entries.append((name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), offset))

    def close(self) -> None:
        self._file.close()


def read_bucket(path: str, size: int, entries: Sequence[Entry]) -> Iterator[tuple[str, torch.Tensor]]:
    """The bucket's tensors, as views of its memory; they stay valid after its owner has closed it."""
    with open(path, "r+b") as file:
        # Populating maps all pages at once instead of one fault each.
        memory = mmap.mmap(file.fileno(), size, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE) if size else None
    for name, dtype_name, shape, offset in entries:
        dtype = getattr(torch, dtype_name)
        num_bytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        if num_bytes == 0:
            yield name, torch.empty(tuple(shape), dtype=dtype)
        else:
            raw = torch.frombuffer(memory, dtype=torch.uint8, count=num_bytes, offset=offset)
            yield name, raw.view(dtype).view(tuple(shape))


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
