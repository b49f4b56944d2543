"""Trainer and engines on the same devices, one of them at a time: who holds memory when, as a state machine.

    SAMPLING --sleep--> ASLEEP --onload--> TRAINING --offload--> OFFLOADED --wake weights--> RECEIVING
    RECEIVING --push--> RECEIVING --wake cache--> SAMPLING

Asleep, an engine holds neither weights nor cache; offloaded, the trainer holds its weights alone: gradients are given
up (they are zero between steps), the optimizer's states and main weights are in host memory. The trainer's weights
stay, since they are what is pushed.

Source of the order: vLLM's sleep mode, whose weights and cache wake apart so that the two copies of the weights and the
cache never need room together.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

from trace_megatron.errors import ColocationError
from trace_megatron.log import say
from trace_megatron.rollout.engine import Engine, EngineError

DISCARD = 2
"""vLLM's level of sleep that keeps nothing: a push follows."""


class Stage(StrEnum):
    SAMPLING = "sampling"
    ASLEEP = "asleep"
    TRAINING = "training"
    OFFLOADED = "offloaded"
    RECEIVING = "receiving"


class TrainerMemory(Protocol):
    """What of the policy the colocation moves; each call acts on all ranks and blocks."""

    def offload(self) -> None: ...

    def onload(self) -> None: ...


@dataclass(slots=True)
class Colocation:
    """Walks engines and trainer through the stages, each step within ``limit_s``. Not enabled, it does nothing.

    An engine that fails to sleep or to wake is taken for dead, so that the pool starts it again; the stage is reached
    with the others. A trainer that fails ends the run with ColocationError, which names step and stage.
    """

    engines: Callable[[], Sequence[Engine]]
    """Those that are alive."""
    trainer: TrainerMemory
    measure: Callable[[], float]
    """GiB in use on this rank's device (or, on a CPU, by its processes)."""
    limit_s: float
    enabled: bool = True
    stage: Stage = Stage.SAMPLING
    used_gib: dict[str, float] = field(default_factory=dict)
    """At the end of the last transition into each stage."""
    seconds: dict[str, float] = field(default_factory=dict)
    """Of that transition."""

    async def begin_training(self) -> None:
        """Before a policy update: engines give their memory up, the trainer takes its back."""
        if not self.enabled or self.stage is Stage.TRAINING:
            return
        self._expect(Stage.SAMPLING)
        await self._enter(Stage.ASLEEP, self._each_engine("sleep", DISCARD, "wait"))
        await self._enter(Stage.TRAINING, self._on_trainer(self.trainer.onload))

    async def begin_push(self) -> None:
        """Before a weight push: the trainer gives its memory up but for its weights, engines wake for theirs.

        Engines that sample are awake already, as at the start of a run; a push that is tried again finds all in place.
        """
        if not self.enabled or self.stage in (Stage.SAMPLING, Stage.RECEIVING):
            return
        self._expect(Stage.TRAINING)
        await self._enter(Stage.OFFLOADED, self._on_trainer(self.trainer.offload))
        await self._enter(Stage.RECEIVING, self._each_engine("wake_up", ["weights"]))

    async def end_push(self, engines: Sequence[Engine]) -> None:
        """Within a push, when the weights are in place and before requests run: ``engines`` get their cache back."""
        if not self.enabled or self.stage is Stage.SAMPLING:
            return
        self._expect(Stage.RECEIVING)
        await self._enter(Stage.SAMPLING, self._each_engine("wake_up", ["kv_cache"], engines=engines))

    def _expect(self, stage: Stage) -> None:
        if self.stage is not stage:
            raise ColocationError(f"expected trainer and engines to be {stage}, found them {self.stage}")

    async def _enter(self, stage: Stage, step: Awaitable[None]) -> None:
        start_s = time.perf_counter()
        await step
        self.stage = stage
        self.seconds[stage] = time.perf_counter() - start_s
        self.used_gib[stage] = self.measure()

    async def _each_engine(self, method: str, *args: object, engines: Sequence[Engine] | None = None) -> None:
        engines = list(self.engines() if engines is None else engines)
        results = await asyncio.gather(
            *(asyncio.wait_for(engine.control(method, *args), self.limit_s) for engine in engines),
            return_exceptions=True,
        )
        for engine, result in zip(engines, results, strict=True):
            if isinstance(result, TimeoutError):
                engine.give_up(f"{method} did not end within {self.limit_s:g} s")
            elif isinstance(result, EngineError):
                engine.give_up(f"{method} failed: {result}")
            elif isinstance(result, BaseException):
                raise result
            if isinstance(result, BaseException):
                say(f"an engine did not {method.replace('_', ' ')} ({result or 'time-out'}): it will be started again")

    async def _on_trainer(self, call: Callable[[], None]) -> None:
        """In a thread that nobody waits for at the end, so that a rank that hangs ends the run instead."""
        loop, done = asyncio.get_running_loop(), asyncio.get_running_loop().create_future()

        def settle(error: Exception | None) -> None:
            if not done.done():
                done.set_result(error)

        def work() -> None:
            error = None
            try:
                call()
            except Exception as raised:
                error = raised
            with suppress(RuntimeError):  # the loop is closed: nobody waits any more
                loop.call_soon_threadsafe(settle, error)

        threading.Thread(target=work, name="trainer-memory", daemon=True).start()
        try:
            error = await asyncio.wait_for(done, self.limit_s)
        except TimeoutError:
            raise ColocationError(
                f"the trainer did not {call.__name__} its memory within {self.limit_s:g} s, from stage {self.stage}"
            ) from None
        if error is not None:
            raise ColocationError(
                f"the trainer failed to {call.__name__} its memory, from stage {self.stage}: {error}"
            ) from error

    def metrics(self) -> dict[str, float]:
        """``STAGE_used_gib`` and ``STAGE_s`` of the stages passed; nothing where it is not enabled."""
        return {f"{stage}_used_gib": used for stage, used in self.used_gib.items()} | {
            f"{stage}_s": seconds for stage, seconds in self.seconds.items()
        }
