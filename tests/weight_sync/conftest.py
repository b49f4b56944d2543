"""One engine for all tests of a file. It has two threads: oneDNN may pack weights otherwise for one."""

import pytest

from tests.weight_sync.pushes import Weights
from trace_megatron.config import EngineConfig, SyncConfig
from trace_megatron.event_loop import EventLoop
from trace_megatron.policy.convert import hf_to_megatron, megatron_to_hf
from trace_megatron.policy.names import ParallelSizes
from trace_megatron.rollout.vllm_engine import VLLMEngine
from trace_megatron.weight_sync.push import WeightSync


@pytest.fixture(scope="module")
def old(tmp_path_factory):
    return Weights(tmp_path_factory.mktemp("old"), seed=1)


@pytest.fixture(scope="module")
def new(tmp_path_factory):
    return Weights(tmp_path_factory.mktemp("new"), seed=2)


@pytest.fixture(scope="module")
def loop():
    with EventLoop() as runner:
        yield runner


@pytest.fixture(scope="module")
def engine(loop, old, tmp_path_factory):
    """Up from an exported folder: ``old`` cut for four Megatron ranks and joined again, read by vLLM's own loader."""
    folder = tmp_path_factory.mktemp("converted")
    hf_to_megatron(old.folder, folder / "megatron", ParallelSizes(tensor=2, pipeline=2))
    megatron_to_hf(folder / "megatron", folder / "hf")
    engine = VLLMEngine(folder / "hf", EngineConfig(dtype="float32", kv_cache_gib=0.1, threads=2), max_model_len=512)
    loop.run(engine.start())
    yield engine
    loop.run(engine.close())


@pytest.fixture(scope="module")
def sync(engine):
    return WeightSync(engine, SyncConfig(bucket_mib=1))
