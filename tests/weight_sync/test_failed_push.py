"""Pushes that fail: who is told what, and what the next push finds."""

import asyncio
import os
import signal
import time
from pathlib import Path

import pytest
import torch

from tests.weight_sync.pushes import (
    PROMPTS,
    WITHHELD,
    assert_samples_from,
    held_back,
    push,
    sample,
    settings,
    withheld,
)
from trace_megatron.errors import WeightSyncError
from trace_megatron.memfd import share
from trace_megatron.rollout.engine import EngineError, SamplingSettings
from trace_megatron.rollout.engine_main import shared_files
from trace_megatron.rollout.engine_process import processes_below
from trace_megatron.types import TensorInfo
from trace_megatron.weight_sync import shared_memory, transfer


def test_a_rank_that_ended_before_its_weights_were_read_is_told_of(loop, engine, sync, old, monkeypatch):
    parameters = {name: torch.nn.Parameter(tensor.clone(), False) for name, tensor in old.tensors.items()}
    share(parameters.values())
    place_of = shared_memory.place_of

    def ended(tensor):
        place = place_of(tensor)
        return place._replace(memory=place.memory._replace(key="of another", path="/proc/0/fd/3"))

    with monkeypatch.context() as patch:
        patch.setattr(shared_memory, "place_of", ended)
        with pytest.raises(WeightSyncError, match="memory of a trainer's rank, '/proc/0/fd/3', found: No such file"):
            push(loop, sync, old, version=9, tensors=parameters.items())
    push(loop, sync, old, version=9, tensors=parameters.items())
    assert_samples_from(loop, engine, old, version=9)


def withheld_everywhere(weights):
    return withheld(weights)[0], [info for info in weights.infos if info.name != WITHHELD]


def unknown(weights):
    name = "model.layers.9.mlp.gate_proj.weight"
    return [*weights.tensors.items(), (name, torch.zeros(3))], [*weights.infos, TensorInfo(name, (3,), torch.float32)]


def another_shape(weights):
    name = "model.layers.1.mlp.down_proj.weight"
    tensors = weights.tensors | {name: torch.zeros(5, 7)}
    infos = [TensorInfo(name, (5, 7), torch.float32) if info.name == name else info for info in weights.infos]
    return list(tensors.items()), infos


def not_as_announced(weights):
    return list((weights.tensors | {"model.norm.weight": torch.zeros(3)}).items()), weights.infos


def twice(weights):
    # far enough apart to arrive in different buckets
    return [*weights.tensors.items(), next(iter(weights.tensors.items()))], weights.infos


@pytest.mark.parametrize(
    ("mistake", "name"),
    [
        (withheld, WITHHELD),
        (withheld_everywhere, "model.layers.1.self_attn.qkv_proj"),
        (unknown, "model.layers.9.mlp.gate_proj.weight"),
        (another_shape, "model.layers.1.mlp.down_proj.weight"),
        (not_as_announced, "model.norm.weight"),
        (twice, "model.embed_tokens.weight"),
    ],
)
def test_a_wrong_set_of_tensors_stops_the_engine_until_a_push_succeeds(loop, engine, sync, old, mistake, name):
    tensors, infos = mistake(old)
    left = iter(tensors)
    with pytest.raises(WeightSyncError, match=name):
        push(loop, sync, old, version=20, tensors=left, infos=infos)
    assert next(left, None) is None  # other trainer ranks are not left waiting
    with pytest.raises(EngineError, match="weight sync failed"):
        sample(loop, engine)
    assert loop.run(engine.control("is_paused"))
    push(loop, sync, old, version=21)
    assert_samples_from(loop, engine, old, version=21)


def test_an_engine_whose_update_fails_elsewhere_leaves_it_too(loop, engine, sync, old, monkeypatch):
    def fail(self, weight_version=None):
        raise EngineError("another engine's weights are not whole")

    with monkeypatch.context() as patch:
        patch.setattr(transfer.EngineClient, "finish_weight_update", fail)
        with pytest.raises(WeightSyncError, match="another engine"):
            push(loop, sync, old, version=20)
    push(loop, sync, old, version=21)
    assert_samples_from(loop, engine, old, version=21)


def test_a_request_during_a_push_that_fails_is_told(loop, engine, sync, new):
    async def race(tensors, go_on):
        pushing = asyncio.create_task(sync.push(new.infos, tensors, version=31))
        await asyncio.sleep(0.2)
        request = asyncio.create_task(engine.generate(PROMPTS[0], settings(), seed=0))
        await asyncio.sleep(0.3)
        go_on.set()
        with pytest.raises(WeightSyncError, match=WITHHELD):
            await pushing
        with pytest.raises(EngineError, match="weight sync failed"):
            await request

    with held_back(withheld(new)[0]) as (tensors, go_on):
        loop.run(race(tensors, go_on))


def test_a_cancelled_push_leaves_the_engine_paused(loop, engine, sync, new):
    async def cancel(tensors, go_on):
        pushing = asyncio.create_task(sync.push(new.infos, tensors, version=32))
        await asyncio.sleep(0.2)
        pushing.cancel()
        await asyncio.sleep(0.1)
        go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await pushing
        with pytest.raises(EngineError):
            await engine.generate(PROMPTS[0], settings(), seed=0)

    push(loop, sync, new, version=31)
    with held_back(new.tensors.items()) as (tensors, go_on):
        loop.run(cancel(tensors, go_on))
    push(loop, sync, new, version=33)
    assert_samples_from(loop, engine, new, version=33)


def test_an_engine_that_dies_fails_everything_at_once(loop, engine, sync, old):
    """Last: it ends the engine."""
    core = engine._llm.engine_core.resources.engine_manager.processes[0]
    family = processes_below([core.pid])
    files = set().union(*(shared_files(member.pid) for member in family))
    folder = Path(engine._folder.name)
    assert files and folder.is_dir()

    async def kill():
        endless = SamplingSettings(1.0, 1.0, 400, ())
        requests = [asyncio.create_task(engine.generate(PROMPTS[0], endless, seed)) for seed in range(8)]
        with held_back(old.tensors.items()) as (tensors, go_on):
            await asyncio.sleep(0.1)
            pushing = asyncio.create_task(sync.push(old.infos, tensors, version=50))
            await asyncio.sleep(0.1)
            os.kill(core.pid, signal.SIGKILL)
            killed = time.perf_counter()
            await asyncio.wait(requests)
            seconds = time.perf_counter() - killed
            go_on.set()
            with pytest.raises(WeightSyncError, match="process ended"):
                await pushing
        return [request.exception() for request in requests], seconds

    errors, seconds = loop.run(kill())
    assert all(isinstance(error, EngineError) and "exit code -9" in str(error) for error in errors), errors
    assert seconds < 5
    with pytest.raises(EngineError, match="process ended"):
        sample(loop, engine)
    loop.run(engine.close())
    loop.run(engine.close())
    assert not any(member.is_running() for member in family)
    assert not any(file.exists() for file in files)
    assert not folder.exists()
    with pytest.raises(EngineError, match="not running"):
        sample(loop, engine)
