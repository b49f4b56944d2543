"""The rollout engine protocol: token ids in; ids, processed logprobs and weight version out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol


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
    """Of the weights that sampled the first token; others may be from later ones, pushed meanwhile."""


class RolloutEngine(Protocol):
    """Concurrent requests on one event loop. Failures raise EngineError."""

    async def generate(
        self, token_ids: Sequence[int], settings: SamplingSettings, seed: int, affinity: str = ""
    ) -> Completion:
        """Sample one completion; the same (ids, settings, seed, weights) gives the same tokens in any batch.

        Requests of one ``affinity`` share a prefix: where there are several engines, they belong on the same one.
        """
        ...


class Engine(RolloutEngine, Protocol):
    """One engine with its life cycle and its weights, wherever it runs: what a pool holds and a weight sync updates."""

    weight_backend: str
    """Name of its backend in vLLM's weight-transfer registry."""
    dtype: str
    num_workers: int
    """Processes that take part in a weight transfer."""
    num_starts: int
    """A started engine knows nothing of the transfers of its earlier lives."""

    @property
    def alive(self) -> bool:
        """Whether it has started and nothing that ended it was seen."""
        ...

    @property
    def serving(self) -> bool:
        """Whether it is alive, with weights that may be sampled from."""
        ...

    async def start(self) -> None:
        """Wait until it can serve; raises UserError or EngineError. Once closed it can be started again."""
        ...

    async def control(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Await a method of vLLM's AsyncLLM (pause, weight update, resume, ...); EngineError if the engine died."""
        ...

    def block(self, reason: str) -> None:
        """Fail waiting and later requests with ``reason`` until ``unblock``; control calls still work."""
        ...

    def unblock(self, weight_version: int) -> None:
        """Serve requests again, from these weights."""
        ...

    def give_up(self, reason: str) -> None:
        """Take it for dead: whoever waits for it gets an EngineError."""
        ...

    async def close(self) -> None:
        """Give up what it holds, and fail what still waits for it. Safe to call twice."""
        ...


class EngineError(Exception):
    """One request, or the engine itself, failed."""
