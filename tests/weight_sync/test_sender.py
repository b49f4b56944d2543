"""The sender against a client that reads its buckets as an engine would."""

import zlib

import pytest
import torch

from trace_megatron.errors import WeightSyncError
from trace_megatron.memfd import map_bytes, share
from trace_megatron.rollout.engine import EngineError
from trace_megatron.split_tensor import SplitTensor
from trace_megatron.types import TensorInfo
from trace_megatron.weight_sync.sender import SharedMemorySender, SharedMemoryTrainerInfo
from trace_megatron.weight_sync.shared_memory import MappedBucket, group_parts, read_parts
from trace_megatron.weight_sync.source import PolicySource

TENSORS = {f"tensor{index}": torch.full((10, index + 1), float(index)) for index in range(8)}
INFOS = [TensorInfo(name, tuple(tensor.shape), tensor.dtype) for name, tensor in TENSORS.items()]


class ReadingClient:
    """Notes each call; fails in the update of bucket ``failing``; with ``holds`` it returns no bucket before finish."""

    def __init__(self, failing=None, holds=False):
        self.calls = []
        self.holds = holds
        self.mapped = {}
        self.received = {}
        self.buckets = []
        self.failing = failing

    def init_weight_transfer_engine(self, init_info):
        self.calls.append("init")

    def start_weight_update(self):
        self.calls.append("start")

    def update_weights(self, update_info):
        self.calls.append("abort" if update_info["aborted"] else "update")
        if len(self.buckets) == self.failing:
            raise EngineError("the engine's process ended")
        if not update_info["aborted"]:
            memory = update_info["memory"]
            bucket = self.mapped.setdefault(memory.key, MappedBucket(memory))
            read = {part.entry.name: part.tensor.clone() for part in bucket.read(update_info["entries"])}
            for other, entries in update_info["in_place"]:
                splits = group_parts(read_parts(map_bytes(other), entries))
                read |= {name: split.join().clone() for name, split in splits.items()}
            assert not read.keys() & self.received.keys()
            self.received |= read
            self.buckets.append(update_info)
            if not self.holds:
                assert bucket.try_return(0)

    def finish_weight_update(self, weight_version=None):
        self.calls.append("finish")
        for bucket in self.mapped.values():
            assert bucket.try_return(0)


def connect(client, bucket_bytes=1 << 20):
    source = PolicySource(split=True)
    info = SharedMemoryTrainerInfo(rank=0, bucket_bytes=bucket_bytes)
    return source, SharedMemorySender.trainer_init(info, client=client, source=source)


@pytest.mark.parametrize("holds", [False, True])
@pytest.mark.parametrize("bucket_bytes", [1, 400, 1 << 20])
def test_all_tensors_arrive_in_buckets_of_the_asked_size(bucket_bytes, holds):
    client = ReadingClient(holds=holds)
    source, sender = connect(client, bucket_bytes)
    keys = []
    for _ in range(3):
        client.calls.clear()
        client.buckets.clear()
        client.received.clear()
        source.renew(INFOS, TENSORS.items())
        sender.send_weights()
        assert all(torch.equal(client.received[name], tensor) for name, tensor in TENSORS.items())
        assert client.calls == ["start"] + ["update"] * len(client.buckets) + ["finish"]
        assert all(_size(bucket) <= max(bucket_bytes, _largest(bucket)) for bucket in client.buckets)
        *full, last = client.buckets
        assert [bucket["expected"] for bucket in full] == [[]] * len(full)
        assert last["expected"] == list(TENSORS)
        assert source.num_bytes == sum(tensor.nbytes for tensor in TENSORS.values())
        keys.append({bucket["memory"].key for bucket in client.buckets})
    assert keys[2] <= keys[0] | keys[1]  # the same memory
    if not holds and bucket_bytes == 400:
        assert len(keys[0]) <= 3 < len(client.buckets)  # one is filled, one is loaded
    if holds:
        assert len(keys[0]) == len(client.buckets)  # never one that somebody reads


def _size(bucket):
    first, last = bucket["entries"][0], bucket["entries"][-1]
    return last.offset + 4 * last.shape[0] * last.shape[1] - first.offset


def _largest(bucket):
    return max(4 * entry.shape[0] * entry.shape[1] for entry in bucket["entries"])


def test_a_bucket_that_is_never_returned_is_replaced():
    client = ReadingClient(holds=True)
    client.finish_weight_update = lambda weight_version=None: None
    source, sender = connect(client, bucket_bytes=1 << 20)
    for _ in range(3):
        client.received.clear()
        source.renew(INFOS, TENSORS.items())
        sender.send_weights()
        assert len(sender._buckets) == 1
    assert len({bucket["memory"].key for bucket in client.buckets}) == 3
    sender.close()
    assert not sender._buckets


def test_checksums_travel_where_they_are_asked_for():
    client = ReadingClient()
    source, sender = connect(client, bucket_bytes=400)
    for asked in (False, True, False):
        client.buckets.clear()
        client.received.clear()
        sender.with_checksums = asked
        source.renew(INFOS, TENSORS.items())
        sender.send_weights()
        found = [entry.checksum for bucket in client.buckets for entry in bucket["entries"]]
        assert found == [zlib.crc32(tensor.numpy().tobytes()) if asked else None for tensor in TENSORS.values()]
        assert (sender.parts.checksum_s > 0) == asked


@pytest.mark.parametrize("bucket_bytes", [1, 1 << 20])
def test_parameters_that_the_engine_can_read_are_not_copied(bucket_bytes):
    shared = {name: torch.nn.Parameter(tensor.clone(), requires_grad=False) for name, tensor in TENSORS.items()}
    del shared["tensor5"]  # is on another machine
    share(shared.values())
    client = ReadingClient()
    source, sender = connect(client, bucket_bytes)
    for scale in (1, 2, 3):
        client.buckets.clear()
        client.received.clear()
        source.renew(INFOS, ((name, shared.get(name, tensor * scale)) for name, tensor in TENSORS.items()))
        sender.send_weights()
        assert all(torch.equal(client.received[name], tensor * scale) for name, tensor in TENSORS.items())
        assert [entry.name for bucket in client.buckets for entry in bucket["entries"]] == ["tensor5"]
        assert len(client.buckets) == 2  # all before it, then it and all behind it
        for parameter in shared.values():
            parameter *= (scale + 1) / scale
    sender.close()


def wrong_shape():
    yield from list(TENSORS.items())[:3]
    yield "tensor3", torch.zeros(4, 10)


def wrong_dtype():
    yield "tensor0", TENSORS["tensor0"].bfloat16()


def unknown_name():
    yield "tensor99", torch.zeros(1)


def part_missing():
    yield "tensor0", SplitTensor((10, 1), (torch.zeros(4, 1), torch.zeros(5, 1)))


def broken():
    yield "tensor0", TENSORS["tensor0"]
    raise ZeroDivisionError("out of tensors")


@pytest.mark.parametrize(
    ("tensors", "error", "message"),
    [
        (wrong_shape, WeightSyncError, r"'tensor3' as torch.float32 of shape \(10, 4\), found .* \(4, 10\)"),
        (wrong_dtype, WeightSyncError, r"'tensor0' as torch.float32 .* found torch.bfloat16"),
        (unknown_name, WeightSyncError, "'tensor99', which its metadata does not list"),
        (part_missing, WeightSyncError, r"parts of \(10, 1\) in all of tensor 'tensor0', found 9 elements"),
        (broken, ZeroDivisionError, "out of tensors"),
    ],
)
def test_a_policy_that_breaks_its_word_aborts_the_update(tensors, error, message):
    client = ReadingClient()
    source, sender = connect(client)
    source.renew(INFOS, tensors())
    with pytest.raises(error, match=message):
        sender.send_weights()
    assert client.calls == ["init", "start", "abort"]


@pytest.mark.parametrize("failing", [0, 1, 3])
def test_an_engine_that_fails_stops_the_stream(failing):
    client = ReadingClient(failing)
    source, sender = connect(client, bucket_bytes=1)
    source.renew(INFOS, TENSORS.items())
    with pytest.raises(EngineError):
        sender.send_weights()
    assert "finish" not in client.calls
    assert client.calls.index("abort") == len(client.calls) - 1  # for others that did not fail
    assert len(client.buckets) == failing
