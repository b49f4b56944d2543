"""Weights pushed into a live vLLM engine: before, after, and meanwhile."""

import asyncio

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
from trace_megatron.config import SyncConfig
from trace_megatron.errors import UserError, WeightSyncError
from trace_megatron.memfd import share
from trace_megatron.rollout.engine import EngineError, SamplingSettings
from trace_megatron.split_tensor import SplitTensor
from trace_megatron.weight_sync import shared_memory
from trace_megatron.weight_sync.push import WeightSync
from trace_megatron.weight_sync.verify import verify


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


def test_the_verifier_knows_whose_weights_they_are(loop, engine, sync, old, new):
    push(loop, sync, new, version=9)
    difference = verify(loop.run, engine, new.score, PROMPTS, settings(), sync.tolerance)
    assert difference.max < 1e-4
    assert difference.mean < difference.max
    with pytest.raises(WeightSyncError, match="differ from the trainer's by up to"):
        verify(loop.run, engine, old.score, PROMPTS, settings(), sync.tolerance)
    with pytest.raises(WeightSyncError, match="temperature"):
        verify(loop.run, engine, new.score, PROMPTS, settings(0.7), sync.tolerance)


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

    push(loop, sync, new, version=39)
    completions = loop.run(race())
    pairs = [(prompt, completion.token_ids) for prompt, completion in zip(PROMPTS, completions, strict=True)]
    for completion, by_old, by_new in zip(completions, old.score(pairs), new.score(pairs), strict=True):
        found = torch.tensor(completion.logprobs)
        is_old, is_new = ((found - torch.tensor(scores)).abs() < 1e-4 for scores in (by_old, by_new))
        of_version_40 = torch.nonzero(~is_new).flatten()  # the versions before and after have the same weights
        first, last = int(of_version_40[0]), int(of_version_40[-1])
        assert 0 < first <= last < len(found) - 1
        assert is_old[first : last + 1].all()
        assert completion.weight_version == 39  # that of its oldest token


def test_a_bucket_size_of_nothing_is_refused(engine):
    with pytest.raises(UserError, match=r"sync\.bucket_mib"):
        WeightSync(engine, SyncConfig(bucket_mib=0))
