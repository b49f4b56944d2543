"""Memory that other processes of the same user can map, and parameters that live in it.

It is anonymous (a memfd): it has no name to clean up, needs no room in /dev/shm (64 MB in a plain container), and
vanishes with its last user even if all are killed.
"""

from __future__ import annotations

import itertools
import mmap
import os
import warnings
import weakref
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import torch

ALIGNMENT = 64
"""Bytes between which tensors start: a cache line, and a multiple of every item size."""

_numbers = itertools.count()


class Memory(NamedTuple):
    """Memory of some process of this machine."""

    key: str
    """Of no other memory, unlike the path."""
    path: str
    """Where it can be opened while its owner has not closed it."""
    length: int
    """In bytes."""


class Place(NamedTuple):
    """Where a tensor starts."""

    memory: Memory
    offset: int
    """In bytes."""


class Memfd:
    """``length`` bytes of this process, mapped; whoever else has mapped them keeps them after ``close``."""

    def __init__(self, length: int, populate: bool = False):
        """``populate``: map all pages at once, instead of one fault each."""
        self._file = os.memfd_create("trace-megatron-weights")
        os.ftruncate(self._file, length)
        self.bytes = mmap.mmap(self._file, length, flags=mmap.MAP_SHARED | (mmap.MAP_POPULATE if populate else 0))
        pid = os.getpid()
        self.memory = Memory(f"{pid}-{next(_numbers)}", f"/proc/{pid}/fd/{self._file}", length)

    def close(self) -> None:
        """Let no other process open it any more."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


_parameters: dict[int, Memory] = {}
"""The memory of parameters, of this process and of those that it has mapped, by the address that it has here."""

_mapped: weakref.WeakValueDictionary[str, np.ndarray] = weakref.WeakValueDictionary()
"""What ``map_parameter`` has mapped, by the memory's key."""


@torch.no_grad()
def share(parameters: Iterable[torch.nn.Parameter]) -> None:
    """Move parameters on the CPU, with their values, to where other processes can read them: ``place_of`` says where.

    For parameters of which nothing else is a view. The memory is freed with the last of them.
    """
    offsets, end = {}, 0
    for parameter in parameters:
        offsets[parameter] = end
        end += -(-parameter.nbytes // ALIGNMENT) * ALIGNMENT
    if not end:
        return
    memfd = Memfd(end)
    array = np.frombuffer(memfd.bytes, dtype=np.uint8)
    _remember(array, memfd.memory)
    weakref.finalize(array, memfd.close)
    for parameter, offset in offsets.items():
        parameter.data = _tensor_at(array, offset, parameter.dtype, parameter.shape).copy_(parameter)


def map_parameter(place: Place, dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
    """A parameter that another process shares, only to be read. Raises OSError where that has closed its memory."""
    array = _mapped.get(place.memory.key)
    if array is None:
        array = map_bytes(place.memory)
        _mapped[place.memory.key] = array
        _remember(array, place.memory)
    return _tensor_at(array, place.offset, dtype, shape)


def place_of(tensor: torch.Tensor) -> Place | None:
    """Where other processes can read a tensor, or a view of one, that ``share`` moved or ``map_parameter`` mapped."""
    if tensor.device.type != "cpu":
        return None
    memory = _parameters.get(tensor.untyped_storage().data_ptr())
    # not by its address: that of an empty tensor is 0
    return Place(memory, tensor.storage_offset() * tensor.itemsize) if memory else None


def map_bytes(memory: Memory, writable: bool = False, populate: bool = False) -> np.ndarray:
    """uint8 [length]: the memory of another process. It stays mapped as long as the array or a view of it is alive."""
    access = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
    flags = mmap.MAP_SHARED | (mmap.MAP_POPULATE if populate else 0)
    with open(memory.path, "r+b" if writable else "rb") as file:
        return np.frombuffer(mmap.mmap(file.fileno(), memory.length, flags=flags, prot=access), dtype=np.uint8)


def as_tensor(array: np.ndarray) -> torch.Tensor:
    """The same memory; what is only to be read must not be written to, which torch does not see to."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says so too
        return torch.from_numpy(array)


def _remember(array: np.ndarray, memory: Memory) -> None:
    address = array.ctypes.data
    _parameters[address] = memory
    weakref.finalize(array, _parameters.pop, address, None)  # tensors keep it alive, and nothing else


def _tensor_at(array: np.ndarray, offset: int, dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
    end = offset + torch.Size(shape).numel() * dtype.itemsize
    return as_tensor(array)[offset:end].view(dtype).view(tuple(shape))
