"""How this process's allocator treats memory that was freed."""

from __future__ import annotations

import ctypes

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
