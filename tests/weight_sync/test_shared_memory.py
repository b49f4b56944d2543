"""Buckets of shared memory: what is read is what was written, for as long as somebody looks at it."""

import gc
import os

import pytest
import torch

from trace_megatron.memfd import ALIGNMENT, map_bytes, share
from trace_megatron.split_tensor import SplitTensor
from trace_megatron.weight_sync.shared_memory import Bucket, MappedBucket, group_parts, read_parts, register

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
        bucket.add(name, SplitTensor.of(tensor))
    bucket.lend()


def read(mapped, bucket):
    return {part.entry.name: part.tensor for part in mapped.read(bucket.entries)}


def test_round_trip(bucket):
    fill(bucket)
    mapped = MappedBucket(bucket.memory)
    for _ in range(2):
        found = read(mapped, bucket)
        assert found.keys() == TENSORS.keys()
        for name, tensor in TENSORS.items():
            assert found[name].dtype == tensor.dtype
            assert torch.equal(found[name], tensor)
            assert found[name].data_ptr() % ALIGNMENT == 0 or not found[name].numel()
        del found


def test_the_room_of_a_bucket_is_all_that_tensors_take(bucket):
    fill(bucket)
    room = bucket.capacity - -(-bucket.size // ALIGNMENT) * ALIGNMENT
    assert not bucket.has_room(SplitTensor.of(torch.ones(room + 1, dtype=torch.uint8)))
    exact = SplitTensor.of(torch.ones(room, dtype=torch.uint8))
    assert bucket.has_room(exact)
    bucket.add("exact", exact)
    assert bucket.size == bucket.capacity
    assert not bucket.has_room(SplitTensor.of(torch.ones(1)))


def test_it_is_returned_when_all_readers_have_let_go(bucket):
    fill(bucket)
    readers = [MappedBucket(bucket.memory) for _ in range(2)]
    views = [read(reader, bucket)["slice"][1:, 2:] for reader in readers]
    assert not bucket.returned
    for index, reader in enumerate(readers):
        assert not reader.try_return(index)  # a view of one tensor is alive
        assert not bucket.returned
        views[index] = None
        assert reader.try_return(index)
    assert bucket.returned
    bucket.clear()
    bucket.add("next", SplitTensor.of(torch.full((3,), 7.0)))
    bucket.lend()
    assert not bucket.returned
    assert torch.equal(read(readers[0], bucket)["next"], torch.full((3,), 7.0))


def test_tensors_outlive_their_bucket():
    bucket = Bucket(4096)
    fill(bucket)
    found = read(MappedBucket(bucket.memory), bucket)
    bucket.close()
    other = Bucket(65536)  # takes the file descriptor over
    other.add("noise", SplitTensor.of(torch.randn(10_000)))
    for name, tensor in TENSORS.items():
        assert torch.equal(found[name], tensor)
    other.close()


def test_nothing_outlives_its_users():
    mapped = lambda: open("/proc/self/maps").read().count("trace-megatron-weights")  # noqa: E731, SIM115
    gc.collect()
    before = mapped()
    bucket = Bucket(4096)
    fill(bucket)
    reader = MappedBucket(bucket.memory)
    found = read(reader, bucket)
    bucket.close()
    del reader
    assert mapped() > before
    del found
    assert mapped() == before


def test_no_file_has_a_name(bucket):
    before = set(os.listdir("/dev/shm"))
    fill(bucket)
    assert set(os.listdir("/dev/shm")) == before


def test_parts_are_copied_together_or_noted_where_they_lie(bucket):
    whole = torch.randn(12, 10)
    heads = whole.view(3, 4, 10)  # of three groups
    splits = {
        "rows": SplitTensor((12, 10), tuple(part.clone() for part in whole.split([5, 4, 3]))),
        "columns": SplitTensor((12, 10), tuple(part.clone() for part in whole.split([7, 3], dim=1)), axis=1),
        "groups": SplitTensor((6, 10), (heads[:, 1:3],)),
        "groups of two": SplitTensor((6, 10), (heads[:2, 1:3], heads[2:, 1:3].clone())),
    }
    expected = {"rows": whole, "columns": whole} | dict.fromkeys(
        ["groups", "groups of two"], heads[:, 1:3].flatten(0, 1)
    )
    assert {name: split.num_bytes for name, split in splits.items()} == {n: t.nbytes for n, t in expected.items()}
    for name, split in splits.items():
        assert torch.equal(split.join(), expected[name])
        bucket.add(name, split)
    found = read(MappedBucket(bucket.memory), bucket)
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor)
    del found
    shared = {name: [torch.nn.Parameter(part.clone()) for part in split.parts] for name, split in splits.items()}
    base = torch.nn.Parameter(whole.clone())
    share([base, *shared["rows"], shared["groups of two"][0]])
    share([*shared["columns"], shared["groups of two"][1]])
    shared["groups"] = [base.view(3, 4, 10)[:, 1:3]]
    bucket.clear()
    for name, split in splits.items():
        bucket.note(name, SplitTensor(split.shape, tuple(shared[name]), split.axis), range(len(split.parts)))
    assert not bucket.entries
    assert len(bucket.in_place) == 2
    assert not bucket.size
    parts = [part for memory, entries in bucket.in_place.items() for part in read_parts(map_bytes(memory), entries)]
    assert sorted(part.entry.checksum for part in parts) == sorted(
        i for s in splits.values() for i in range(len(s.parts))
    )
    grouped = group_parts(reversed(parts))
    for name, tensor in expected.items():
        assert torch.equal(grouped[name].join(), tensor)
    with torch.no_grad():
        shared["rows"][0].zero_()
    assert not grouped["rows"].join()[:5].any()  # the same memory


def test_any_view_of_a_parameter_is_noted_where_it_lies(bucket):
    base, scalar = torch.nn.Parameter(torch.randn(4, 6)), torch.nn.Parameter(torch.tensor(2.5))
    empty = torch.nn.Parameter(torch.empty(0, 4))
    share([base, empty, scalar])
    views = {
        "transposed": base.t(),
        "slice": base[1:3, 2:5],
        "expanded": base[:1].expand(5, 6),
        "bytes": base.data[1:].view(torch.uint8),
        "scalar": scalar,
        "empty": empty,
        "nothing of it": base[4:],
    }
    for name, view in views.items():
        bucket.note(name, SplitTensor.of(view))
    bucket.note("rows", SplitTensor((4, 6), (base[:0], base[:3], base[3:3], base[3:])))
    ((memory, entries),) = bucket.in_place.items()
    found = group_parts(read_parts(map_bytes(memory), entries))
    for name, tensor in (views | {"rows": base}).items():
        assert torch.equal(found[name].join(), tensor)


def test_register_twice_is_harmless():
    from vllm.distributed.weight_transfer import WeightTransferEngineFactory, WeightTransferTrainerFactory

    from trace_megatron.rollout.vllm_engine import SHARED_MEMORY_BACKEND

    register()
    register()
    assert SHARED_MEMORY_BACKEND in WeightTransferEngineFactory._registry
    assert SHARED_MEMORY_BACKEND in WeightTransferTrainerFactory._registry
