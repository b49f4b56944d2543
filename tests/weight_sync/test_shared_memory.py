"""Buckets of shared memory: what is read is what was written, for as long as somebody looks at it."""

import os

import pytest
import torch

from trace_megatron.weight_sync.shared_memory import ALIGNMENT, Bucket, MappedBucket, register

TENSORS = {
    "float32": torch.randn(3, 5),
    "bfloat16": torch.randn(7, 3).bfloat16(),
    "int64": torch.arange(5),
    "scalar": torch.tensor(2.5),
    "empty": torch.empty(0, 4),
    "transposed": torch.randn(4, 6).t(),
    "slice": torch.randn(8, 8)[2:5, 1:7],
    "bool": torch.tensor([True, False, True]),
    "gradient": torch.nn.Parameter(torch.randn(2, 2)),
}


@pytest.fixture
def bucket():
    bucket = Bucket(4096, num_readers=2)
    yield bucket
    bucket.close()


def fill(bucket):
    for name, tensor in TENSORS.items():
        assert bucket.add(name, tensor)
    bucket.lend()


def test_round_trip(bucket):
    fill(bucket)
    mapped = MappedBucket(bucket.path, bucket.length)
    for _ in range(2):
        read = dict(mapped.read(bucket.entries))
        assert read.keys() == TENSORS.keys()
        for name, tensor in TENSORS.items():
            assert read[name].dtype == tensor.dtype
            assert torch.equal(read[name], tensor)
            assert read[name].data_ptr() % ALIGNMENT == 0 or not read[name].numel()
        del read


def test_a_tensor_without_room_is_not_added(bucket):
    fill(bucket)
    size, entries = bucket.size, list(bucket.entries)
    assert not bucket.add("large", torch.zeros(1024))
    assert (bucket.size, bucket.entries) == (size, entries)
    assert bucket.add("exact", torch.ones(bucket.capacity - -(-size // ALIGNMENT) * ALIGNMENT, dtype=torch.uint8))
    assert not bucket.add("more", torch.ones(1))


def test_it_is_returned_when_all_readers_have_let_go(bucket):
    fill(bucket)
    readers = [MappedBucket(bucket.path, bucket.length) for _ in range(2)]
    views = [dict(reader.read(bucket.entries))["slice"][1:, 2:] for reader in readers]
    assert not bucket.returned
    for index, reader in enumerate(readers):
        assert not reader.try_return(index)  # a view of one tensor is alive
        assert not bucket.returned
        views[index] = None
        assert reader.try_return(index)
    assert bucket.returned
    bucket.clear()
    bucket.add("next", torch.full((3,), 7.0))
    bucket.lend()
    assert not bucket.returned
    assert torch.equal(dict(readers[0].read(bucket.entries))["next"], torch.full((3,), 7.0))


def test_tensors_outlive_their_bucket():
    bucket = Bucket(4096)
    fill(bucket)
    read = dict(MappedBucket(bucket.path, bucket.length).read(bucket.entries))
    bucket.close()
    other = Bucket(65536)  # takes the file descriptor over
    other.add("noise", torch.randn(10_000))
    for name, tensor in TENSORS.items():
        assert torch.equal(read[name], tensor)
    other.close()


def test_nothing_outlives_its_users():
    mapped = lambda: open("/proc/self/maps").read().count("trace-megatron-weights")  # noqa: E731, SIM115
    before = mapped()
    bucket = Bucket(4096)
    fill(bucket)
    reader = MappedBucket(bucket.path, bucket.length)
    read = dict(reader.read(bucket.entries))
    bucket.close()
    del reader
    assert mapped() > before
    del read
    assert mapped() == before


def test_no_file_has_a_name(bucket):
    before = set(os.listdir("/dev/shm"))
    fill(bucket)
    assert set(os.listdir("/dev/shm")) == before


def test_register_twice_is_harmless():
    from vllm.distributed.weight_transfer import WeightTransferEngineFactory, WeightTransferTrainerFactory

    from trace_megatron.rollout.vllm_engine import SHARED_MEMORY_BACKEND

    register()
    register()
    assert SHARED_MEMORY_BACKEND in WeightTransferEngineFactory._registry
    assert SHARED_MEMORY_BACKEND in WeightTransferTrainerFactory._registry
