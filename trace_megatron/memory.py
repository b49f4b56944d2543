"""How this process's allocator treats memory that was freed, and how much memory is in use."""

from __future__ import annotations

import ctypes
from contextlib import suppress

import psutil
import torch

_M_TRIM_THRESHOLD, _M_MMAP_MAX, _M_ARENA_MAX = -1, -4, -8  # <malloc.h>


def keep_freed_memory() -> None:
    """Let glibc hand freed memory out again instead of returning it to the system, in all of this process.

    For streams of large tensors that each live for a moment: the first touch of a fresh page costs more than copying
    it. Where there is no glibc, nothing changes.
    """
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        libc.mallopt(_M_MMAP_MAX, 0)
        libc.mallopt(_M_ARENA_MAX, 1)  # the heaps of other threads hold nothing large: they would map it anew each time
        libc.mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)


def used_memory_gib() -> float:
    """On a CUDA device, by whoever uses it; else the resident memory of this process and its children."""
    if torch.cuda.is_available():
        free, total = torch.cuda.mem_get_info()
        return (total - free) / 2**30
    used = 0
    this = psutil.Process()
    for process in (this, *this.children(recursive=True)):
        with suppress(psutil.NoSuchProcess):
            used += process.memory_info().rss
    return used / 2**30
