"""One seed for every request, so that what a rollout samples depends on nothing but its place in the run."""

from __future__ import annotations

import hashlib
import json

from trace_megatron.types import Anchor

SEED_BITS = 63
"""vLLM carries a seed as a signed 64-bit integer."""


def request_seed(run_seed: int, step: int, prompt_id: str, anchor: Anchor, k: int, turn: int) -> int:
    """The seed in [0, 2^63) of the ``turn``-th request of the ``k``-th rollout that starts at ``anchor``."""
    place = json.dumps([run_seed, step, prompt_id, anchor.rollout, anchor.turn, k, turn])
    digest = hashlib.blake2b(place.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> (64 - SEED_BITS)
