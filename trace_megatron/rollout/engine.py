"""The rollout engine protocol: token ids in; ids, processed logprobs and weight version out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class SamplingSettings:
    temperature: float
    top_p: float
    max_new_tokens: int
    stop_token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Completion:
    token_ids: tuple[int, ...]
    """Sampled ids, the stop token included."""
    logprobs: tuple[float, ...]
    """Processed logprobs of ``token_ids``."""
    stopped: bool
    """True: a stop token ended it; False: a length limit did."""
    weight_version: int


class RolloutEngine(Protocol):
    """Concurrent requests on one event loop. Failures raise EngineError."""

    async def generate(self, token_ids: Sequence[int], settings: SamplingSettings, seed: int) -> Completion:
        """Sample one completion; the same (ids, settings, seed, weights) gives the same tokens in any batch."""
        ...


class EngineError(Exception):
    """One request, or the engine itself, failed."""
