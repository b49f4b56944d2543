"""Buckets of shared memory: what is read is what was written, for as long as somebody looks at it."""

import os

import pytest
import torch

from trace_megatron.weight_sync.shared_memory import ALIGNMENT, Bucket, read_bucket, register

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
    bucket = Bucket()
    yield bucket
    bucket.close()


def fill(bucket):
    for name, tensor in TENSORS.items():
        bucket.add(name, tensor)


def test_round_trip(bucket):
    fill(bucket)
    read = dict(read_bucket(bucket.path, bucket.size, bucket.entries))
    assert read.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        assert read[name].dtype == tensor.dtype
        assert torch.equal(read[name], tensor)
        assert read[name].data_ptr() % ALIGNMENT == 0 or not read[name].numel()


def test_tensors_outlive_their_bucket():
    bucket = Bucket()
    fill(bucket)
    read = dict(read_bucket(bucket.path, bucket.size, bucket.entries))
    bucket.close()
    other = Bucket()  # takes the file descriptor over
    other.add("noise", torch.randn(10_000))
    for name, tensor in TENSORS.items():
        assert torch.equal(read[name], tensor)
    other.close()


def test_nothing_outlives_its_tensors():
    mapped = lambda: "trace-megatron-weights" in open("/proc/self/maps").read()  # noqa: E731, SIM115
    bucket = Bucket()
    fill(bucket)
    read = dict(read_bucket(bucket.path, bucket.size, bucket.entries))
    bucket.close()
    assert mapped()
    del read
    assert not mapped()


def test_an_empty_bucket(bucket):
    assert list(read_bucket(bucket.path, bucket.size, bucket.entries)) == []


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
