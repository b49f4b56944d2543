"""Tensors as rows of bytes in files: read, written, and copied from files to files a block at a time.

Whatever cuts or fuses a tensor, its parts are rectangles of it: some rows, or some columns of some rows.
"""

from __future__ import annotations

import io
import math
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import BinaryIO

import numpy as np
import torch

from trace_megatron.errors import UserError

_BLOCK_BYTES = 2**20
"""Stays in a core's cache between being read and being written: as cheap as the kernel's own copy_file_range."""
_STRETCH_BYTES = 2**24


class TargetFile(io.FileIO):
    """Written to by several threads, one at a time: who waits for the kernel's own lock of a file keeps a core busy."""

    def __init__(self, file: Path | int):
        super().__init__(file, "r+")
        self._writing = Lock()

    @classmethod
    def cut(cls, path: Path, header: bytes, offset: int) -> TargetFile:
        """What lies before ``offset`` stays, or is the header; nothing is behind."""
        if offset == len(header):
            path.write_bytes(header)
        file = cls(path)
        file.truncate(offset)
        return file

    def write_at(self, place: int, content: bytes | np.ndarray) -> None:
        """All of it."""
        view = memoryview(content).cast("B")
        while view:
            with self._writing:
                count = os.pwrite(self.fileno(), view, place)
            view, place = view[count:], place + count


@dataclass(frozen=True, slots=True)
class Piece:
    """A rectangle of a tensor that lies in a file without gaps, row by row."""

    file: BinaryIO
    """A TargetFile where it is written to."""
    start: int
    rows: range
    columns: range
    """In bytes."""


@dataclass(frozen=True, slots=True)
class Rows:
    """A tensor [N, ...] as N rows of ``width`` bytes, and the pieces that hold them."""

    num_rows: int
    width: int
    pieces: Sequence[Piece]

    @classmethod
    def of(cls, shape: Sequence[int], itemsize: int, pieces: Sequence[Piece]) -> Rows:
        return cls(shape[0], itemsize * math.prod(shape[1:]), pieces)

    @classmethod
    def at(cls, file: BinaryIO, start: int, shape: Sequence[int], itemsize: int) -> Rows:
        """All of them one after the other."""
        rows = cls.of(shape, itemsize, ())
        return cls(rows.num_rows, rows.width, (Piece(file, start, range(rows.num_rows), range(rows.width)),))


def read_tensor(source: Rows, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """In memory of its own."""
    tensor = torch.empty(tuple(shape), dtype=dtype)
    array = _bytes(tensor, source.width)
    for first, stop in _blocks(source):
        _read(source, array[first:stop], first)
    return tensor


def write_tensor(target: Rows, tensor: torch.Tensor) -> None:
    """From any device."""
    array = _bytes(tensor.detach().cpu().contiguous(), target.width)
    _write_all(target, (array[first:stop] for first, stop in _blocks(target)))


def copy_rows(source: Rows, target: Rows) -> None:
    """Both cut in any way. Some piece holds each byte; what several of ``target``'s hold goes to each."""
    assert (source.num_rows, source.width) == (target.num_rows, target.width), (source, target)
    _write_all(target, _read_all(source))


def _read_all(source: Rows) -> Iterator[np.ndarray]:
    """Block by block, each in the memory of the one before."""
    memory = np.empty((_rows_of_block(source), source.width), np.uint8)
    begun = 0
    for first, stop in _blocks(source):
        block = memory[: stop - first]
        _read(source, block, first)
        yield block
        if _is_stretch(source, begun, stop):
            # The source's pages make room for the target's: memory long unused costs a virtual machine five times as
            # much. From the beginning: a page that lies across the end of a stretch is let go with the next one.
            _let_go(source, 0, stop)
            begun = stop


def _write_all(target: Rows, blocks: Iterable[np.ndarray]) -> None:
    first = begun = 0
    for block in blocks:
        for piece, rows, columns, place in _overlaps(target, first, first + len(block)):
            piece.file.write_at(place, np.ascontiguousarray(block[rows, columns]))
        first += len(block)
        if _is_stretch(target, begun, first):
            # Linux begins to write the pages out, and keeps them: left alone, it waits for a tenth of the memory.
            _let_go(target, begun, first)
            begun = first


def _is_stretch(tensor: Rows, begun: int, stop: int) -> bool:
    return (stop - begun) * tensor.width >= _STRETCH_BYTES or stop == tensor.num_rows


def _let_go(tensor: Rows, first: int, stop: int) -> None:
    """Drop the pages of these rows, or begin to write them out where they have changed."""
    for piece, rows, _, place in _overlaps(tensor, first, stop):
        length = (rows.stop - rows.start) * len(piece.columns)
        if length >= _BLOCK_BYTES // 2:
            with suppress(OSError):  # advice, which a file system need not take
                os.posix_fadvise(piece.file.fileno(), place, length, os.POSIX_FADV_DONTNEED)


def _read(source: Rows, block: np.ndarray, first: int) -> None:
    """Fill ``block`` with the rows from ``first`` on."""
    for piece, rows, columns, place in _overlaps(source, first, first + len(block)):
        view = block[rows, columns]
        if view.flags.c_contiguous:
            _read_at(piece.file, place, view)
        else:
            apart = np.empty(view.shape, np.uint8)
            _read_at(piece.file, place, apart)
            view[...] = apart


def _overlaps(tensor: Rows, first: int, stop: int) -> Iterator[tuple[Piece, slice, slice, int]]:
    """Of each piece that holds some of the rows: which of them and which columns, and where in the file they begin."""
    for piece in tensor.pieces:
        low, high = max(first, piece.rows.start), min(stop, piece.rows.stop)
        if low < high:
            place = piece.start + (low - piece.rows.start) * len(piece.columns)
            yield piece, slice(low - first, high - first), slice(piece.columns.start, piece.columns.stop), place


def _blocks(tensor: Rows) -> Iterator[tuple[int, int]]:
    """First row and stop of each."""
    step = _rows_of_block(tensor)
    for first in range(0, tensor.num_rows, step):
        yield first, min(first + step, tensor.num_rows)


def _rows_of_block(tensor: Rows) -> int:
    return max(1, min(tensor.num_rows, _BLOCK_BYTES // max(1, tensor.width)))


def _read_at(file: BinaryIO, place: int, array: np.ndarray) -> None:
    view = memoryview(array.reshape(-1))
    while view:
        count = os.preadv(file.fileno(), [view], place)
        if not count:
            raise UserError(f"expected {len(view)} more bytes in '{file.name}', found its end: download it again")
        view, place = view[count:], place + count


def _bytes(tensor: torch.Tensor, width: int) -> np.ndarray:
    return tensor.view(-1).view(torch.uint8).numpy().reshape(-1, width)
