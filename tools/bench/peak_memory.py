"""Peak of a process's resident memory; Linux keeps the mark, and forgets it when asked."""

from __future__ import annotations

import ctypes
from pathlib import Path


def reset_peak() -> int:
    """Start the peak of resident memory anew; returns what is resident, in KiB."""
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    return _read_kib("VmRSS")


def peak_kib() -> int:
    """Since ``reset_peak``."""
    return _read_kib("VmHWM")


def _read_kib(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{field}:"))
