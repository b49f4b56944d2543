"""What a device's memory and arithmetic allow at best. Peaks from the makers' data sheets, dense bfloat16."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Peak:
    tflops: float
    gb_s: float


PEAKS = {
    "A100": Peak(312.0, 2039.0),
    "L40S": Peak(362.0, 864.0),
    "H100": Peak(989.0, 3350.0),
    "H200": Peak(989.0, 4800.0),
    "B200": Peak(2250.0, 8000.0),
}


def peak_of(name: str) -> Peak | None:
    """Of the device that calls itself so; None where it is not known."""
    return next((peak for key, peak in PEAKS.items() if key in name.upper()), None)


def floor_ms(num_bytes: float, operations: float, peak: Peak | None) -> float | None:
    """The longer of moving the bytes once and of the operations at peak."""
    return None if peak is None else max(num_bytes / peak.gb_s / 1e6, operations / peak.tflops / 1e9)


def measure_ms(call: Callable[[], object], device: torch.device) -> float:
    """Median of several calls after a few others; on a GPU by its own clock, the cache cleared before each."""
    if device.type != "cuda":
        call()
        times = []
        for _ in range(3):
            start_s = time.perf_counter()
            call()
            times.append(1000.0 * (time.perf_counter() - start_s))
        return sorted(times)[1]
    scratch = torch.empty(256 * 2**20, dtype=torch.uint8, device=device)  # more than any L2
    for _ in range(5):
        call()
    times = []
    for _ in range(20):
        scratch.zero_()
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        call()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return sorted(times)[len(times) // 2]
