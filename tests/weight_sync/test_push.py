"""Weights pushed into a live vLLM engine: before, after, and when something goes wrong. One engine for all tests.

It has two threads: oneDNN may pack weights otherwise for one.
"""

import asyncio
import os
import signal
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tests.tiny_models import write_tiny_model
from trace_megatron.config import EngineConfig, SyncConfig
from trace_megatron.errors import UserError, WeightSyncError
from trace_megatron.event_loop import EventLoop
from trace_megatron.memfd import share
from trace_megatron.policy.convert import hf_to_megatron, megatron_to_hf
from trace_megatron.policy.names import ParallelSizes
from trace_megatron.rollout.engine import EngineError, SamplingSettings
from trace_megatron.rollout.engine_main import shared_files
from trace_megatron.rollout.engine_process import processes_below
from trace_megatron.rollout.vllm_engine import VLLMEngine
from trace_megatron.split_tensor import SplitTensor
from trace_megatron.types import TensorInfo
from trace_megatron.weight_sync import shared_memory, transfer
from trace_megatron.weight_sync.push import WeightSync
from trace_megatron.weight_sync.verify import verify

SHAPE = {"tied": True, "hidden": 128, "ffn": 256, "head_dim": 32, "vocab": 300, "initializer_range": 0.15}
PROMPTS = [[(7 * index + position) % 250 for position in range(70)] for index in range(4)]
"""Longer than two blocks: the engine caches their prefixes."""

WITHHELD = "model.layers.1.self_attn.v_proj.weight"


def settings(temperature=1.0):
    return SamplingSettings(temperature, 1.0, 12, (258,))


class Weights:
    """A random model: its tensors, and the logprobs that transformers gives."""

    def __init__(self, folder, seed):
        self.folder = write_tiny_model(folder, "llama", seed=seed, **SHAPE)
        self.tensors = load_file(self.folder / "model.safetensors")
        self.infos = [TensorInfo(name, tuple(value.shape), value.dtype) for name, value in self.tensors.items()]
        self._model = AutoModelForCausalLM.from_pretrained(self.folder, dtype=torch.float64)

    @torch.no_grad()
    def score(self, pairs, temperature=1.0):
        scores = []
        for prompt, completion in pairs:
            logits = self._model(torch.tensor([[*prompt, *completion]])).logits[0, len(prompt) - 1 : -1]
            logprobs = (logits / temperature).log_softmax(-1)
            scores.append(logprobs.gather(1, torch.tensor(completion)[:, None])[:, 0].tolist())
        return scores


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


def sample(loop, engine, temperature=1.0):
    async def all_prompts():
        requests = [engine.generate(prompt, settings(temperature), seed) for seed, prompt in enumerate(PROMPTS)]
        return await asyncio.gather(*requests)

    return loop.run(all_prompts())


def assert_samples_from(loop, engine, weights, version):
    for temperature in (1.0, 0.7):
        for _ in range(2):  # the second time from cached prefixes
            completions = sample(loop, engine, temperature)
            pairs = [(prompt, completion.token_ids) for prompt, completion in zip(PROMPTS, completions, strict=True)]
            expected = [logprob for scores in weights.score(pairs, temperature) for logprob in scores]
            found = [logprob for completion in completions for logprob in completion.logprobs]
            torch.testing.assert_close(torch.tensor(found), torch.tensor(expected), atol=1e-4, rtol=0)
            assert {completion.weight_version for completion in completions} == {version}


def push(loop, sync, weights, version, tensors=None, infos=None):
    tensors = weights.tensors.items() if tensors is None else tensors
    return loop.run(sync.push(weights.infos if infos is None else infos, tensors, version))


def test_a_push_replaces_the_weights(loop, engine, sync, old, new):
    assert not sync.verify_due
    assert_samples_from(loop, engine, old, version=0)  # what was on disk
    assert old.score([(PROMPTS[0], (1, 2))])[0] != pytest.approx(new.score([(PROMPTS[0], (1, 2))])[0], abs=0.1)
    stats = push(loop, sync, new, version=7)
    assert_samples_from(loop, engine, new, version=7)
    assert stats.bytes == sum(tensor.nbytes for tensor in new.tensors.values())
    assert stats.bytes > 2**20  # more than one bucket
    assert 0 < stats.write_s + stats.load_s + stats.finish_s < 2 * stats.seconds
    assert sync.verify_due
    push(loop, sync, old, version=8)
    assert_samples_from(loop, engine, old, version=8)
    assert not sync.verify_due


def test_a_tensor_that_changed_on_its_way_is_named(loop, engine, old, new, monkeypatch):
    add, changed = shared_memory.Bucket.add, "model.layers.1.mlp.down_proj.weight"

    # a bit in transit: what is copied is not what the trainer has
    def flip(self, name, split, checksums):
        add(self, name, SplitTensor.of(split.join() + (name == changed) * 1e-3), checksums)

    sync = WeightSync(engine, SyncConfig(bucket_mib=1))
    with monkeypatch.context() as patch:
        patch.setattr(shared_memory.Bucket, "add", flip)
        with pytest.raises(WeightSyncError, match=f"{changed}.*checksum"):
            push(loop, sync, new, version=8)
    with pytest.raises(EngineError, match="weight sync failed"):
        sample(loop, engine)
    assert push(loop, sync, old, version=8).checksum_s > 0
    assert push(loop, sync, old, version=8).checksum_s == 0
    assert_samples_from(loop, engine, old, version=8)


def test_shared_parameters_are_read_where_they_are_and_not_kept(loop, engine, old, new):
    """In halves, as two tensor-parallel ranks hold them: first by vLLM's loader, then straight into their places."""
    halves = {}
    for name, tensor in new.tensors.items():
        axis = int(tensor.ndim == 2 and "down_proj" in name)
        halves[name] = axis, [torch.nn.Parameter(half.clone(), False) for half in tensor.chunk(2, dim=axis)]
    for rank in range(2):
        share(parts[rank] for _, parts in halves.values())
    splits = {name: SplitTensor(new.tensors[name].shape, tuple(parts), axis) for name, (axis, parts) in halves.items()}
    sync = WeightSync(engine, SyncConfig(bucket_mib=1))
    with pytest.raises(WeightSyncError, match=WITHHELD):
        push(loop, sync, old, version=8, tensors=iter(withheld(old)[0]))
    for version, weights in enumerate((new, old, new), start=9):
        for name, (axis, parts) in halves.items():
            for part, half in zip(parts, weights.tensors[name].chunk(2, dim=axis), strict=True):
                part.copy_(half)
        stats = push(loop, sync, weights, version, tensors=splits.items())
        assert (stats.checksum_s > 0) == (version == 9)
        assert not any(bucket.size for bucket in sync._transfer._sender._buckets)
        for _, parts in halves.values():
            for part in parts:
                part.fill_(float("nan"))  # as the trainer's next step may
        assert_samples_from(loop, engine, weights, version)
    sync._transfer.close()
    push(loop, WeightSync(engine, SyncConfig(bucket_mib=1)), old, version=8)


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


def test_the_verifier_knows_whose_weights_they_are(loop, engine, sync, old, new):
    push(loop, sync, new, version=9)
    difference = verify(loop.run, engine, new.score, PROMPTS, settings(), sync.tolerance)
    assert difference.max < 1e-4
    assert difference.mean < difference.max
    with pytest.raises(WeightSyncError, match="differ from the trainer's by up to"):
        verify(loop.run, engine, old.score, PROMPTS, settings(), sync.tolerance)
    with pytest.raises(WeightSyncError, match="temperature"):
        verify(loop.run, engine, new.score, PROMPTS, settings(0.7), sync.tolerance)


def withheld(weights):
    return [item for item in weights.tensors.items() if item[0] != WITHHELD], weights.infos


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


@contextmanager
def held_back(tensors):
    """The tensors' iterator, which waits before its last one, and the event that lets it go on."""
    go_on = threading.Event()

    def iterate():
        *most, last = tensors
        yield from most
        assert go_on.wait(30)
        yield last

    try:
        yield iterate(), go_on
    finally:
        go_on.set()


def test_a_request_during_a_push_waits_for_the_new_weights(loop, engine, sync, new):
    async def race(tensors, go_on):
        pushing = asyncio.create_task(sync.push(new.infos, tensors, version=30))
        await asyncio.sleep(0.2)
        request = asyncio.create_task(engine.generate(PROMPTS[0], settings(), seed=0))
        await asyncio.sleep(0.3)
        assert not request.done() and not pushing.done()
        go_on.set()
        await pushing
        return await request

    with held_back(new.tensors.items()) as (tensors, go_on):
        assert loop.run(race(tensors, go_on)).weight_version == 30
    assert_samples_from(loop, engine, new, version=30)


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


def test_running_requests_go_on_with_the_new_weights(loop, engine, sync, old, new):
    """Every token has the logprob of the weights that sampled it: the old weights' cache is computed anew."""

    async def race():
        some_tokens = SamplingSettings(1.0, 1.0, 4, ())  # when they are sampled, the others have as many
        requests = [
            asyncio.create_task(engine.generate(prompt, SamplingSettings(1.0, 1.0, 100 + 4 * seed, ()), seed))
            for seed, prompt in enumerate(PROMPTS)
        ]
        await engine.generate(PROMPTS[0], some_tokens, seed=9)
        await sync.push(old.infos, old.tensors.items(), version=40)
        await engine.generate(PROMPTS[0], some_tokens, seed=9)
        await sync.push(new.infos, new.tensors.items(), version=41)
        return await asyncio.gather(*requests)

    completions = loop.run(race())
    pairs = [(prompt, completion.token_ids) for prompt, completion in zip(PROMPTS, completions, strict=True)]
    for completion, by_old, by_new in zip(completions, old.score(pairs), new.score(pairs), strict=True):
        found = torch.tensor(completion.logprobs)
        is_old, is_new = ((found - torch.tensor(scores)).abs() < 1e-4 for scores in (by_old, by_new))
        of_version_40 = torch.nonzero(~is_new).flatten()  # the versions before and after have the same weights
        first, last = int(of_version_40[0]), int(of_version_40[-1])
        assert 0 < first <= last < len(found) - 1
        assert is_old[first : last + 1].all()
        assert completion.weight_version == 33  # that of its oldest token


def test_a_bucket_size_of_nothing_is_refused(engine):
    with pytest.raises(UserError, match=r"sync\.bucket_mib"):
        WeightSync(engine, SyncConfig(bucket_mib=0))


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
