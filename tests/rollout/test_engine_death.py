"""Two real vLLM engines, one of them killed in the middle of a step: the step's trees are those of a calm one."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import load_file
from scripted_engine import WordGame, build_prompts

from tests.tiny_models import write_tiny_model
from trace_megatron.algorithm.selectors import build_selector
from trace_megatron.algorithm.tree import check_tree, num_units, prefix_anchors
from trace_megatron.config import BudgetConfig, EngineConfig, MethodConfig, RolloutConfig, SyncConfig
from trace_megatron.event_loop import EventLoop
from trace_megatron.rollout.chat import ChatRenderer
from trace_megatron.rollout.collector import Collector
from trace_megatron.rollout.engine_process import processes_below
from trace_megatron.rollout.pool import EnginePool
from trace_megatron.rollout.vllm_engine import VLLMEngine
from trace_megatron.types import RolloutStatus, TensorInfo
from trace_megatron.weight_sync.push import WeightSync

CONFIG = RolloutConfig(max_turns=4, max_new_tokens=16, max_response_tokens=400, max_prompt_tokens=100)
ENGINE = EngineConfig(dtype="float32", kv_cache_gib=0.1, threads=1, num_engines=2)
COUNTS = [2, 3, 2, 1, 3, 1]
CONTINUATIONS = 2


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    shape = {"hidden": 128, "ffn": 256, "head_dim": 32, "initializer_range": 0.1}
    return write_tiny_model(tmp_path_factory.mktemp("model"), "llama", seed=3, **shape)


@pytest.fixture(scope="module")
def loop():
    with EventLoop() as runner:
        yield runner


@pytest.fixture(scope="module")
def pool(loop, folder):
    pool = EnginePool([VLLMEngine(folder, ENGINE, max_model_len=512, seed=1) for _ in range(2)], timeout_s=60.0)
    loop.run(pool.start())
    yield pool
    loop.run(pool.close())


def core_pids(pool) -> list[int]:
    return [process.pid for engine in pool for process in engine._llm.engine_core.resources.engine_manager.processes]


def collect(pool, folder, *, kill_after: int = 0):
    """A step's trees; with ``kill_after``, the first engine's process is killed when so many rollouts are done."""
    game, renderer = WordGame(), ChatRenderer.from_folder(folder)
    budget = BudgetConfig(candidates=len(COUNTS), rollouts=sum(COUNTS), continuations=CONTINUATIONS)
    selector = build_selector(MethodConfig(selector="trace"), budget)

    def score(trees):
        return [np.full(len(prefix_anchors(tree)), 0.5) for tree in trees]

    def kill(num_done, num_planned):
        if num_done == kill_after:
            os.kill(core_pids(pool)[0], signal.SIGKILL)

    async def run():
        collector = Collector(pool, game, renderer, selector, score, CONFIG, run_seed=1)
        prompts = build_prompts(renderer, game)
        return await collector.collect(prompts, COUNTS, 1, kill)

    return run


def test_a_step_survives_the_death_of_an_engine(loop, folder, pool):
    calm = loop.run(collect(pool, folder)())
    assert pool.counts() == {"alive": 2, "deaths": 0, "moved_requests": 0}
    assert sum(num_units(tree) for tree in calm) == sum(COUNTS) * (1 + CONTINUATIONS / 2)

    family = processes_below(core_pids(pool)[:1])
    struck = loop.run(collect(pool, folder, kill_after=5)())
    counts = pool.counts()
    assert counts["alive"] == 1 and counts["deaths"] == 1 and counts["moved_requests"] > 0
    assert not any(process.is_running() and process.status() != "zombie" for process in family)

    # No rollout lost, none doubled, the budget exact: the very same tokens, turns and anchors, tree by tree.
    assert len(struck) == len(calm)
    for before, after in zip(calm, struck, strict=True):
        check_tree(after)
        assert num_units(after) == num_units(before)
        for one, other in zip(before.rollouts, after.rollouts, strict=True):
            assert other.status is not RolloutStatus.ENGINE_ERROR
            assert (one.anchor, one.reward, one.status) == (other.anchor, other.reward, other.status)
            assert [turn.action_ids for turn in one.turns] == [turn.action_ids for turn in other.turns]
            for mine, theirs in zip(one.turns, other.turns, strict=True):
                assert mine.action_logprobs == pytest.approx(theirs.action_logprobs, abs=1e-4)

    # The dead one comes back, and serves from the next push on.
    loop.run(pool.heal())
    assert len(pool) == 2
    assert [engine.serving for engine in pool] == [False, True]
    tensors = load_file(folder / "model.safetensors")
    infos = [TensorInfo(name, tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()]
    sync = WeightSync(pool, SyncConfig(bucket_mib=1))
    loop.run(sync.push(infos, tensors.items(), version=3))
    assert all(engine.serving for engine in pool)
    again = loop.run(collect(pool, folder)())
    versions = {turn.weight_version for tree in again for rollout in tree.rollouts for turn in rollout.turns}
    assert versions == {3}
    first = [rollout.turns[0].action_ids for tree in again for rollout in tree.rollouts]
    assert first == [rollout.turns[0].action_ids for tree in calm for rollout in tree.rollouts]
