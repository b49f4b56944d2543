"""The colocation's stages: their order, their limits, and a failure injected into every transition."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field

import pytest

from trace_megatron.errors import ColocationError
from trace_megatron.rollout.engine import EngineError
from trace_megatron.weight_sync.colocation import Colocation, Stage

LIMIT_S = 0.2


@dataclass
class FakeEngine:
    log: list
    name: str = "engine"
    faults: dict = field(default_factory=dict)
    """Call -> "hang" or an exception."""
    reason: str = ""

    async def control(self, method, *args):
        call = f"{method} {args[0]}"
        self.log.append(f"{self.name} {call}")
        fault = self.faults.get(call)
        if fault == "hang":
            await asyncio.sleep(60)
        if fault is not None:
            raise fault

    def give_up(self, reason):
        self.reason = reason


@dataclass
class FakeTrainer:
    log: list
    faults: dict = field(default_factory=dict)

    def offload(self):
        self._do("offload")

    def onload(self):
        self._do("onload")

    def _do(self, call):
        self.log.append(call)
        if self.faults.get(call) == "hang":
            time.sleep(30)
        if self.faults.get(call) is not None:
            raise self.faults[call]


def build(num_engines=2, **options):
    log = []
    engines = [FakeEngine(log, f"engine {index}") for index in range(num_engines)]
    trainer = FakeTrainer(log)
    used = iter(range(1, 100))
    places = Colocation(
        lambda: [e for e in engines if not e.reason], trainer, lambda: float(next(used)), LIMIT_S, **options
    )
    return places, engines, trainer, log


async def one_step(places):
    await places.begin_training()
    assert places.stage is Stage.TRAINING
    await places.begin_push()
    assert places.stage is Stage.RECEIVING
    await places.end_push(places.engines())
    assert places.stage is Stage.SAMPLING


def test_nobody_holds_memory_that_the_other_needs():
    places, _, _, log = build(num_engines=1)
    asyncio.run(one_step(places))
    assert log == [
        "engine 0 sleep 2",
        "onload",
        "offload",
        "engine 0 wake_up ['weights']",
        "engine 0 wake_up ['kv_cache']",
    ]
    metrics = places.metrics()
    assert [metrics[f"{stage}_used_gib"] for stage in ("asleep", "training", "offloaded", "receiving", "sampling")] == [
        1.0, 2.0, 3.0, 4.0, 5.0,
    ]  # fmt: skip
    assert all(metrics[f"{stage}_s"] >= 0 for stage in Stage)


def test_not_enabled_it_does_nothing():
    places, _, _, log = build(enabled=False)
    asyncio.run(places.begin_training())
    asyncio.run(places.begin_push())
    asyncio.run(places.end_push([]))
    assert log == [] and places.metrics() == {}


def test_the_first_push_finds_engines_that_sample():
    places, _, _, log = build()
    asyncio.run(places.begin_push())
    asyncio.run(places.end_push(places.engines()))
    assert log == [] and places.stage is Stage.SAMPLING


def test_a_push_that_is_tried_again_finds_all_in_place():
    places, _, _, log = build(num_engines=1)

    async def run():
        await places.begin_training()
        await places.begin_push()
        await places.begin_push()
        await places.end_push(places.engines())

    asyncio.run(run())
    assert log.count("offload") == 1 and places.stage is Stage.SAMPLING


@pytest.mark.parametrize("fault", ["hang", EngineError("out of memory")], ids=["hangs", "fails"])
@pytest.mark.parametrize("call", ["sleep 2", "wake_up ['weights']", "wake_up ['kv_cache']"])
def test_an_engine_that_fails_is_given_up_and_the_others_go_on(call, fault):
    places, engines, _, log = build()
    engines[0].faults[call] = fault
    start_s = time.perf_counter()
    asyncio.run(one_step(places))
    assert time.perf_counter() - start_s < 10
    assert call.split()[0] in engines[0].reason
    assert engines[1].reason == ""
    assert [line for line in log if line.startswith("engine 1")] == [
        "engine 1 sleep 2",
        "engine 1 wake_up ['weights']",
        "engine 1 wake_up ['kv_cache']",
    ]


@pytest.mark.parametrize("fault", ["hang", RuntimeError("CUDA out of memory")], ids=["hangs", "fails"])
@pytest.mark.parametrize(("call", "before"), [("onload", Stage.ASLEEP), ("offload", Stage.TRAINING)])
def test_a_trainer_that_fails_ends_the_run_with_its_stage(call, before, fault):
    places, _, trainer, _ = build()
    trainer.faults[call] = fault
    start_s = time.perf_counter()
    words = "within 0.2 s" if fault == "hang" else "out of memory"
    with pytest.raises(ColocationError, match=rf"{call}.*{before}") as error:
        asyncio.run(one_step(places))
    assert words in str(error.value)
    assert time.perf_counter() - start_s < 10  # the thread that hangs holds nobody up
    assert places.stage is before


def test_a_bug_in_an_engine_is_not_swallowed():
    places, engines, _, _ = build()
    engines[0].faults["sleep 2"] = AttributeError("a bug")
    with pytest.raises(AttributeError):
        asyncio.run(places.begin_training())


def test_stages_cannot_be_skipped():
    places, engines, _, _ = build()
    with pytest.raises(ColocationError, match="expected trainer and engines to be training, found them asleep"):
        places.stage = Stage.ASLEEP
        asyncio.run(places.begin_push())
    with pytest.raises(ColocationError, match="expected trainer and engines to be receiving, found them training"):
        places.stage = Stage.TRAINING
        asyncio.run(places.end_push(engines))
