"""What a weight sync took."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class SyncParts:
    """Seconds of one transfer, as in SyncStats."""

    gather_s: float = 0.0
    write_s: float = 0.0
    load_s: float = 0.0
    finish_s: float = 0.0
    checksum_s: float = 0.0


@dataclass(frozen=True, slots=True)
class SyncStats:
    """One push. The parts are 0 with vLLM's own backends."""

    seconds: float
    """From pause to resume."""
    bytes: int
    """Of all tensors."""
    pause_s: float
    """Until running requests stand still; the first bucket is filled meanwhile."""
    gather_s: float
    """Waiting for the policy's tensors."""
    write_s: float
    """Copying into shared memory."""
    load_s: float
    """The engine's loading; with several buckets, gathering and writing go on meanwhile."""
    finish_s: float
    """The engine's last step."""
    checksum_s: float
    """The trainer's share of verifying every tensor; the engine's is in ``load_s``. 0 where this push was not."""
