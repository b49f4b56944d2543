"""The stated hardware: what a step is planned with. Peaks and bandwidths from the makers' data sheets."""

from __future__ import annotations

import difflib
from dataclasses import dataclass

from trace_megatron.errors import UserError
from trace_megatron.policy.flops import PEAK_TFLOPS

GIB = 2**30


@dataclass(frozen=True, slots=True)
class Device:
    """One GPU in its usual server."""

    memory_gib: float
    """Usable, after what the driver keeps."""
    tflops: float
    """Dense bfloat16 peak."""
    memory_gb_s: float
    """Of device memory."""
    link_gb_s: float
    """To the other GPUs of the server, one direction."""
    network_gb_s: float
    """To other servers, per GPU, one direction."""


DEVICES = {
    "A100-80G": Device(79.0, PEAK_TFLOPS["A100"], 2039.0, 300.0, 25.0),
    "L40S": Device(44.5, PEAK_TFLOPS["L40S"], 864.0, 25.0, 12.5),
    "H100": Device(79.0, PEAK_TFLOPS["H100"], 3350.0, 450.0, 50.0),
    "H200": Device(139.0, PEAK_TFLOPS["H200"], 4800.0, 450.0, 50.0),
    "B200": Device(178.0, PEAK_TFLOPS["B200"], 8000.0, 900.0, 50.0),
}


def device_named(name: str) -> Device:
    """Raises UserError with the nearest known name."""
    if name not in DEVICES:
        nearest = difflib.get_close_matches(name, DEVICES, n=1, cutoff=0.0)[0]
        raise UserError(f"unknown plan.device '{name}': did you mean '{nearest}'? Known: {', '.join(DEVICES)}")
    return DEVICES[name]
