"""Push the policy's weights into a live engine: pause, start, update, finish, reset the prefix cache, resume."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Collection, Iterable, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

import torch

from trace_megatron.config import SyncConfig
from trace_megatron.errors import UserError, WeightSyncError
from trace_megatron.rollout.engine import Engine, EngineError
from trace_megatron.rollout.pool import EnginePool
from trace_megatron.rollout.vllm_engine import SHARED_MEMORY_BACKEND
from trace_megatron.split_tensor import SplitTensor
from trace_megatron.types import TensorInfo
from trace_megatron.weight_sync.control import control_all
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

    A push reaches every engine that is alive when it begins. After a failed one a second one repairs an engine of one
    worker that uses our backend. Any other is taken for dead, so that a pool starts it again: of several workers'
    errors vLLM 0.32 reads one, and takes the rest for answers to what is asked next.
    """

    def __init__(self, engines: Engine | Collection[Engine] | EnginePool, config: SyncConfig):
        """``engines``: a collection of engines, or a pool, whose living ones are looked up at every push."""
        if config.bucket_mib < 1:
            raise UserError(f"expected at least 1 for 'sync.bucket_mib', found {config.bucket_mib}")
        self._engines = engines if isinstance(engines, Collection | EnginePool) else [engines]
        backends = {engine.weight_backend for engine in self._engines}
        if len(self._engines) > 1 and backends != {SHARED_MEMORY_BACKEND}:
            raise UserError(
                f"expected weight backend '{SHARED_MEMORY_BACKEND}' of several engines, found {sorted(backends)}"
            )
        self._dtype = next(iter(self._engines)).dtype
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
        return self._config.verify_tolerance or {"float32": 1e-3, "bfloat16": 1.0}[self._dtype]

    async def push(
        self,
        infos: Sequence[TensorInfo],
        tensors: Iterable[tuple[str, torch.Tensor | SplitTensor]],
        version: int,
        before_resume: Callable[[Sequence[Engine]], Awaitable[None]] | None = None,
    ) -> SyncStats:
        """Replace the engine's weights by ``tensors`` (HF names, every one of ``infos``, on any device).

        Requests that are running stop where they are and go on with the new weights, the keys and values of their
        history computed anew: each of their tokens has the logprob of the version that sampled it. Raises
        WeightSyncError that names the tensor; the engine then stays paused and fails requests until a push succeeds.
        ``before_resume`` is awaited with the engines when they hold the weights and run no requests yet.
        """
        started = time.perf_counter()
        tensors = iter(tensors)
        sending: asyncio.Task | None = None
        checked = self._is_verified(self._num_pushes + 1)
        engines = list(self._engines)
        try:
            if not engines:
                raise EngineError("no engine is alive")
            paused = asyncio.run_coroutine_threadsafe(_pause(engines), asyncio.get_running_loop())
            transfer = self._connected(engines)
            sending = asyncio.create_task(asyncio.to_thread(transfer.send, infos, tensors, paused, checked))
            num_bytes, parts = await asyncio.shield(sending)
            await asyncio.gather(
                control_all(engines, "reset_prefix_cache"), control_all(engines, "update_weight_version", str(version))
            )
            if before_resume:
                await before_resume(engines)
            for engine in engines:  # before the first of them can answer from the new weights
                engine.unblock(version)
            await control_all(engines, "resume_generation")
        except BaseException as error:
            for engine in engines:
                engine.block("a weight sync failed half-way, and the engine's weights are a mixture")
            if sending is not None:  # where this task was cancelled, the thread still runs
                await asyncio.wait((sending,))
            for engine in engines:
                if sending is not None and (engine.num_workers > 1 or engine.weight_backend != SHARED_MEMORY_BACKEND):
                    engine.give_up("a weight sync failed, which only one worker that uses shared memory survives")
            await asyncio.to_thread(_drain, tensors)
            if isinstance(error, EngineError | WeightSyncError):
                raise WeightSyncError(f"pushing weight version {version} failed: {error}") from error
            raise
        self._num_pushes += 1
        return SyncStats(time.perf_counter() - started, num_bytes, paused.result(), **asdict(parts))

    def _connected(self, engines: Sequence[Engine]) -> Transfer:
        """The connection to these engines: a new one where one of them died, or was started again."""
        if self._transfer is None or not self._transfer.connects(engines):
            # Imported here: vLLM takes seconds, and only the rank with an engine needs it.
            from trace_megatron.weight_sync.transfer import Transfer

            if self._transfer is not None:
                self._transfer.close()
            self._transfer = Transfer(engines, asyncio.get_running_loop(), self._config)
        return self._transfer


async def _pause(engines: Sequence[Engine]) -> float:
    """Seconds until the requests of all stand still."""
    started = time.perf_counter()
    await control_all(engines, "pause_generation", mode="keep", clear_cache=True)
    return time.perf_counter() - started


def _drain(tensors: Iterable[tuple[str, torch.Tensor | SplitTensor]]) -> None:
    """Take what is left: the trainer's other ranks gather in step with this one, and would wait for it."""
    for _ in tensors:
        pass
