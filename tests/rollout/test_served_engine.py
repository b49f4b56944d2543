"""A real `vllm serve` as a rollout engine: tokens, weights over TCP, and what goes wrong."""

from __future__ import annotations

import asyncio
import os
import signal

import pytest
import torch
from safetensors.torch import load_file
from served import free_port, serve
from transformers import AutoModelForCausalLM

from tests.tiny_models import write_tiny_model
from trace_megatron.config import EngineConfig, SyncConfig
from trace_megatron.errors import UserError, WeightSyncError
from trace_megatron.event_loop import EventLoop
from trace_megatron.rollout.engine import Completion, EngineError, SamplingSettings
from trace_megatron.rollout.pool import EnginePool
from trace_megatron.rollout.served_engine import ServedEngine
from trace_megatron.types import TensorInfo
from trace_megatron.weight_sync.push import WeightSync

CONFIG = EngineConfig(dtype="float32")
SETTINGS = SamplingSettings(0.8, 1.0, 12, (258,))
PROMPTS = [[(7 * index + position) % 250 for position in range(20)] for index in range(6)]
SHAPE = {"hidden": 128, "ffn": 256, "head_dim": 32, "initializer_range": 0.1}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    return [write_tiny_model(root / f"{seed}", "llama", seed=seed, **SHAPE) for seed in (3, 4)]


@pytest.fixture(scope="module")
def server(folders, tmp_path_factory):
    with serve(folders[0], tmp_path_factory.mktemp("log") / "server.log") as running:
        yield running


@pytest.fixture(scope="module")
def loop():
    with EventLoop() as runner:
        yield runner


@pytest.fixture(scope="module")
def pool(loop, server):
    pool = EnginePool([ServedEngine(server[0], CONFIG, 512)], timeout_s=60.0)
    loop.run(pool.start())
    yield pool
    loop.run(pool.close())


def sample(loop, engine):
    async def ask():
        return await asyncio.gather(*(engine.generate(prompt, SETTINGS, seed) for seed, prompt in enumerate(PROMPTS)))

    return loop.run(ask())


def push(loop, sync, folder, version, left_out=""):
    tensors = {name: value for name, value in load_file(folder / "model.safetensors").items() if name != left_out}
    infos = [TensorInfo(name, tuple(value.shape), value.dtype) for name, value in tensors.items()]
    return loop.run(sync.push(infos, tensors.items(), version))


def assert_samples_from(loop, engine, folder, version):
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    for prompt, completion in zip(PROMPTS, sample(loop, engine), strict=True):
        with torch.no_grad():
            logits = model(torch.tensor([[*prompt, *completion.token_ids]])).logits[0, len(prompt) - 1 : -1]
        expected = (logits / SETTINGS.temperature).log_softmax(-1)[
            range(len(completion.token_ids)), completion.token_ids
        ]
        torch.testing.assert_close(torch.tensor(completion.logprobs).double(), expected, atol=1e-4, rtol=0)
        assert completion.weight_version == version


@pytest.mark.parametrize("address", ["", "127.0.0.1"], ids=["shared memory", "TCP"])
def test_a_server_samples_from_the_weights_that_were_pushed(loop, pool, folders, address):
    (engine,) = pool
    sync = WeightSync(pool, SyncConfig(bucket_mib=1, address=address))
    push(loop, sync, folders[1], version=1)  # the first one is checked by checksums
    assert_samples_from(loop, pool, folders[1], version=1)
    with pytest.raises(WeightSyncError, match=r"no tensor fills.*embed_tokens"):
        push(loop, sync, folders[1], version=2, left_out="model.embed_tokens.weight")
    with pytest.raises(EngineError, match="mixture"):
        sample(loop, engine)
    push(loop, sync, folders[0], version=3)
    assert_samples_from(loop, pool, folders[0], version=3)
    for version in range(4, 7):  # buckets are filled again
        push(loop, sync, folders[version % 2], version)
        assert_samples_from(loop, pool, folders[version % 2], version)


def test_a_request_that_the_server_refuses_is_an_error_of_its_own(loop, pool):
    with pytest.raises(EngineError, match="maximum model length"):
        loop.run(pool.generate([1] * 600, SETTINGS, 0))
    assert len(pool) == 1


def test_a_server_whose_weights_were_changed_by_another_is_taken_for_dead(loop, pool, folders):
    (engine,) = pool
    loop.run(engine.control("update_weight_version", "99"))
    with pytest.raises(EngineError, match="another trainer"):
        sample(loop, pool)
    assert len(pool) == 0
    loop.run(pool.heal())
    push(loop, WeightSync(pool, SyncConfig(bucket_mib=1)), folders[0], version=7)
    assert_samples_from(loop, pool, folders[0], version=7)


def test_what_cannot_serve_is_refused_in_a_sentence(loop, server):
    def refusal(url, max_model_len=512):
        engine = ServedEngine(url, CONFIG, max_model_len)
        with pytest.raises((UserError, EngineError)) as error:
            loop.run(engine.start())
        assert not engine.alive
        return str(error.value)

    assert "--max-model-len 1024" in refusal(server[0], 1024)
    assert "cannot be reached" in refusal(f"http://127.0.0.1:{free_port()}")


def test_a_server_that_is_killed_fails_its_requests_at_once(loop, pool, server):
    async def ask():
        long = SamplingSettings(1.0, 1.0, 400, ())
        requests = [asyncio.create_task(pool.generate(prompt, long, seed)) for seed, prompt in enumerate(PROMPTS * 20)]
        await requests[0]
        os.killpg(server[1].pid, signal.SIGKILL)
        return await asyncio.wait_for(asyncio.gather(*requests, return_exceptions=True), 20)

    errors = [answer for answer in loop.run(ask()) if not isinstance(answer, Completion)]
    assert errors and all(isinstance(error, EngineError) and "cannot be reached" in str(error) for error in errors)
    assert len(pool) == 0
