"""The sender against a client that reads its buckets as an engine would."""

import pytest
import torch

from trace_megatron.errors import WeightSyncError
from trace_megatron.rollout.engine import EngineError
from trace_megatron.types import TensorInfo
from trace_megatron.weight_sync.sender import SharedMemorySender, SharedMemoryTrainerInfo
from trace_megatron.weight_sync.shared_memory import read_bucket
from trace_megatron.weight_sync.source import PolicySource

TENSORS = {f"tensor{index}": torch.full((10, index + 1), float(index)) for index in range(8)}
INFOS = [TensorInfo(name, tuple(tensor.shape), tensor.dtype) for name, tensor in TENSORS.items()]


class ReadingClient:
    """Notes each call; fails in the update of bucket ``failing``."""

    def __init__(self, failing=None):
        self.calls = []
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
            read = dict(read_bucket(update_info["path"], update_info["size"], update_info["entries"]))
            assert not read.keys() & self.received.keys()
            self.received |= read
            self.buckets.append(update_info)

    def finish_weight_update(self, weight_version=None):
        self.calls.append("finish")


def connect(client, bucket_bytes=1 << 20):
    source = PolicySource()
    info = SharedMemoryTrainerInfo(rank=0, bucket_bytes=bucket_bytes)
    return source, SharedMemorySender.trainer_init(info, client=client, source=source)


@pytest.mark.parametrize("bucket_bytes", [1, 700, 1 << 20])
def test_all_tensors_arrive_in_buckets_of_the_asked_size(bucket_bytes):
    client = ReadingClient()
    source, sender = connect(client, bucket_bytes)
    for _ in range(2):
        client.calls.clear()
        client.buckets.clear()
        client.received.clear()
        source.renew(INFOS, TENSORS.items())
        sender.send_weights()
        assert all(torch.equal(client.received[name], tensor) for name, tensor in TENSORS.items())
        assert client.calls == ["start"] + ["update"] * len(client.buckets) + ["finish"]
        *full, last = client.buckets
        largest = max(tensor.nbytes for tensor in TENSORS.values()) + 64
        assert all(bucket_bytes <= bucket["size"] < bucket_bytes + largest for bucket in full)
        assert [bucket["expected"] for bucket in full] == [[]] * len(full)
        assert last["expected"] == list(TENSORS)
        assert source.num_bytes == sum(tensor.nbytes for tensor in TENSORS.values())


def test_buckets_are_closed_when_the_engine_has_loaded_them():
    client = ReadingClient()
    source, sender = connect(client, bucket_bytes=700)
    source.renew(INFOS, TENSORS.items())
    sender.send_weights()
    for bucket in client.buckets:
        with pytest.raises(OSError):
            list(read_bucket(bucket["path"], bucket["size"], bucket["entries"]))


def wrong_shape():
    yield from list(TENSORS.items())[:3]
    yield "tensor3", torch.zeros(4, 10)


def wrong_dtype():
    yield "tensor0", TENSORS["tensor0"].bfloat16()


def unknown_name():
    yield "tensor99", torch.zeros(1)


def broken():
    yield "tensor0", TENSORS["tensor0"]
    raise ZeroDivisionError("out of tensors")


@pytest.mark.parametrize(
    ("tensors", "error", "message"),
    [
        (wrong_shape, WeightSyncError, r"'tensor3' as torch.float32 of shape \(10, 4\), found .* \(4, 10\)"),
        (wrong_dtype, WeightSyncError, r"'tensor0' as torch.float32 .* found torch.bfloat16"),
        (unknown_name, WeightSyncError, "'tensor99', which its metadata does not list"),
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
    assert "finish" not in client.calls and "abort" not in client.calls
    assert len(client.buckets) == failing
