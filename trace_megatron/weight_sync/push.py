"""Push the policy's weights into a live engine: pause, start, update, finish, reset the prefix cache, resume."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import torch

from trace_megatron.config import SyncConfig
from trace_megatron.errors import UserError, WeightSyncError
from trace_megatron.rollout.engine import EngineError
from trace_megatron.rollout.vllm_engine import SHARED_MEMORY_BACKEND, VLLMEngine
from trace_megatron.types import TensorInfo
from trace_megatron.weight_sync.stats import SyncStats

if TYPE_CHECKING:
    from trace_megatron.weight_sync.transfer import Transfer


class WeightSync:
    """Pushes weights into one engine, or the same into several, from the rank that owns them.

    The trainer's other ranks run the policy's iterator to its end at the same time; its tensors are needed on this rank
    alone. The backend is the engine's ``weight_backend``: our shared memory, which any engine on this machine
    understands, or vLLM's own ``ipc`` (an engine on this rank's device, a trainer of one rank) and ``nccl`` (an engine
    on other devices). The latter two need GPUs and have never been run.

    A push that is to be verified carries every tensor's checksum, with our backend: the engine's workers compare it
    with what they received before they load it.

    After a failed push a second one repairs an engine of one worker that uses our backend. Any other needs a new one:
    of several workers' errors vLLM 0.32 reads one, and takes the rest for answers to what is asked next.
    """

    def __init__(self, engines: VLLMEngine | Sequence[VLLMEngine], config: SyncConfig):
        if config.bucket_mib < 1:
            raise UserError(f"expected at least 1 for 'sync.bucket_mib', found {config.bucket_mib}")
        self._engines = list(engines) if isinstance(engines, Sequence) else [engines]
        backends = {engine.weight_backend for engine in self._engines}
        if len(self._engines) > 1 and backends != {SHARED_MEMORY_BACKEND}:
            raise UserError(
                f"expected weight backend '{SHARED_MEMORY_BACKEND}' of several engines, found {sorted(backends)}"
            )
        self._config = config
        self._transfer: Transfer | None = None
        self._num_pushes = 0

    @property
    def verify_due(self) -> bool:
        """Whether the push just made is one to verify: the first, and every ``sync.verify_every``-th."""
        return self._is_verified(self._num_pushes)

    def _is_verified(self, num_pushes: int) -> bool:
        every = self._config.verify_every
        return num_pushes == 1 or (every > 0 and num_pushes > 0 and num_pushes % every == 0)

    @property
    def tolerance(self) -> float:
        """Allowed logprob difference for the engine's dtype."""
        return self._config.verify_tolerance or {"float32": 1e-3, "bfloat16": 1.0}[self._engines[0].config.dtype]

    async def push(
        self, infos: Sequence[TensorInfo], tensors: Iterable[tuple[str, torch.Tensor]], version: int
    ) -> SyncStats:
        """Replace the engine's weights by ``tensors`` (HF names, every one of ``infos``, on any device).

        Requests that are running finish first, with the old weights; later ones wait for the new. Raises
        WeightSyncError that names the tensor; the engine then stays paused and fails requests until a push succeeds.
        """
        started = time.perf_counter()
        tensors = iter(tensors)
        sending: asyncio.Task | None = None
        checked = self._is_verified(self._num_pushes + 1)
        try:
            await self._control("pause_generation", mode="wait", clear_cache=True)
            pause_s = time.perf_counter() - started
            sending = asyncio.create_task(asyncio.to_thread(self._connected().send, infos, tensors, checked))
            num_bytes, parts = await asyncio.shield(sending)
            await self._control("reset_prefix_cache")
            await self._control("update_weight_version", str(version))
            await self._control("resume_generation")
        except BaseException as error:
            for engine in self._engines:
                engine.block("a weight sync failed half-way, and the engine's weights are a mixture")
            if sending is not None:  # where this task was cancelled, the thread still runs
                await asyncio.wait((sending,))
            await asyncio.to_thread(_drain, tensors)
            if isinstance(error, EngineError | WeightSyncError):
                raise WeightSyncError(f"pushing weight version {version} failed: {error}") from error
            raise
        for engine in self._engines:
            engine.unblock()
        self._num_pushes += 1
        return SyncStats(time.perf_counter() - started, num_bytes, pause_s, **asdict(parts))

    async def _control(self, method: str, *args: Any, **kwargs: Any) -> None:
        """Await a method of all engines; raise the first error when all have ended."""
        calls = (engine.control(method, *args, **kwargs) for engine in self._engines)
        for result in await asyncio.gather(*calls, return_exceptions=True):
            if isinstance(result, BaseException):
                raise result

    def _connected(self) -> Transfer:
        if self._transfer is None:
            # Imported here: vLLM takes seconds, and only the rank with an engine needs it.
            from trace_megatron.weight_sync.transfer import Transfer

            self._transfer = Transfer(self._engines, asyncio.get_running_loop(), self._config.bucket_mib * 2**20)
        return self._transfer


def _drain(tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Take what is left: the trainer's other ranks gather in step with this one, and would wait for it."""
    for _ in tensors:
        pass
