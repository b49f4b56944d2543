"""The trainer's side of a weight sync through shared memory."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from typing import ClassVar, Self

from vllm.distributed.weight_transfer.base import (
    TrainerInitInfo,
    TrainerWeightTransferEngine,
    VLLMWeightSyncClient,
    WeightSource,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

from trace_megatron.memfd import ALIGNMENT, Memory, place_of
from trace_megatron.rollout.engine import EngineError
from trace_megatron.rollout.vllm_engine import SHARED_MEMORY_BACKEND
from trace_megatron.split_tensor import SplitTensor
from trace_megatron.weight_sync.bucket_server import BucketServer
from trace_megatron.weight_sync.shared_memory import Bucket, Entry, checksum
from trace_megatron.weight_sync.stats import SyncParts

_NUM_PARTS = 8
"""Of a model, at least: the engine loads one while the next is written."""
_SMALLEST_BYTES = 2**24
"""Below, a call into the engine costs more than its overlap saves."""


@dataclass
class SharedMemoryInitInfo(WeightTransferInitInfo):
    """Nothing to agree on."""


@dataclass
class BucketInfo(WeightTransferUpdateInfo):
    """One bucket, as JSON-able values."""

    memory: Memory | None = None
    entries: list[Entry] = field(default_factory=list)
    in_place: list[tuple[Memory, list[Entry]]] = field(default_factory=list)
    """Of tensors that are read where the trainer keeps them, and changes them after the update."""
    expected: list[str] = field(default_factory=list)
    """On the last bucket: the names of all tensors of this update."""
    aborted: bool = False
    """The sender gave up: end this update as failed."""
    first_reader: int = 0
    """The number, among all readers of the bucket, of the engine's first worker."""


@dataclass
class SharedMemoryTrainerInfo(TrainerInitInfo):
    backend: ClassVar[str] = SHARED_MEMORY_BACKEND

    bucket_bytes: int
    num_readers: int = 1
    """Workers of all engines."""
    address: str = ""
    """This host's, for engines on other hosts: they fetch the buckets over TCP. Empty: all map the same memory."""


class SharedMemorySender(TrainerWeightTransferEngine[SharedMemoryTrainerInfo]):
    """In the trainer: streams a PolicySource, filling one bucket while the engine loads the one before.

    What an engine on this machine can read where it is (``memfd.share``) is not copied.
    """

    init_info_cls = SharedMemoryTrainerInfo

    def __init__(self, *, client: VLLMWeightSyncClient, source: WeightSource, info: SharedMemoryTrainerInfo):
        super().__init__(client=client, source=source)
        self._info = info
        self._buckets: list[Bucket] = []
        self._server = BucketServer(info.address) if info.address else None
        self.with_checksums = False
        """Whether the next update carries every tensor's checksum, which the receivers compare with what they got."""
        self.parts = SyncParts()

    @classmethod
    def trainer_init(
        cls, init_info: SharedMemoryTrainerInfo, *, client: VLLMWeightSyncClient, source: WeightSource | None = None
    ) -> Self:
        assert source is not None
        client.init_weight_transfer_engine({})
        return cls(client=client, source=source, info=init_info)

    def send_weights(self) -> None:
        """One start, the buckets, one finish. An error leaves the engine's weights half-updated."""
        self.parts = SyncParts()
        self._discard([bucket for bucket in self._buckets if not bucket.returned])
        try:
            self._send_buckets()
            started = time.perf_counter()
            self.client.finish_weight_update()
            self.parts.finish_s = time.perf_counter() - started
        except BaseException:
            self._discard(list(self._buckets))
            # To fail is vLLM's only way to leave an update: all receivers must, not only one that raised this error.
            with suppress(EngineError):
                self.client.update_weights(vars(BucketInfo(aborted=True)))
            raise

    def close(self) -> None:
        """Give the shared memory back."""
        self._discard(list(self._buckets))
        if self._server:
            self._server.close()

    def _send_buckets(self) -> None:
        infos = self.source.metadata()
        expected = [info.name for info in infos]
        total = sum(math.prod(info.shape) * info.dtype.itemsize + ALIGNMENT for info in infos)
        capacity = min(self._info.bucket_bytes, max(total // _NUM_PARTS, _SMALLEST_BYTES))
        with ThreadPoolExecutor(max_workers=1) as loader:
            # Meanwhile the first bucket is filled: an engine whose requests still run is not ready at once.
            loading: Future[None] = loader.submit(self.client.start_weight_update)
            tensors = _Peekable(iter(self.source), self.parts)
            while True:
                bucket = self._fill(tensors, capacity)
                loading.result()
                last = tensors.peek() is None
                loading = loader.submit(self._load, bucket, expected if last else [])
                if last:
                    loading.result()
                    return

    def _fill(self, tensors: _Peekable, capacity: int) -> Bucket:
        """Copy tensors into a bucket until the next one has no room, and note where those lie that need no copy."""
        item = tensors.peek()
        copied = item is not None and self._is_copied(item[1])
        bucket = self._free_bucket(max(capacity, item[1].num_bytes + ALIGNMENT) if copied else 0)
        bucket.clear()
        while item is not None:
            copied = self._is_copied(item[1])
            if copied and not bucket.has_room(item[1]):
                break
            self._put(bucket, *item, copied)
            tensors.take()
            item = tensors.peek()
        bucket.lend()
        return bucket

    def _put(self, bucket: Bucket, name: str, split: SplitTensor, copied: bool) -> None:
        started = time.perf_counter()
        checksums = []
        if self.with_checksums:
            checksums = [checksum(tensor) for tensor in ([split.join()] if copied else split.parts)]
            self.parts.checksum_s += time.perf_counter() - started
            started = time.perf_counter()
        (bucket.add if copied else bucket.note)(name, split, checksums)
        self.parts.write_s += time.perf_counter() - started

    def _is_copied(self, split: SplitTensor) -> bool:
        return self._server is not None or not all(map(place_of, split.parts))

    def _free_bucket(self, capacity: int) -> Bucket:
        for bucket in self._buckets:
            if bucket.capacity >= capacity and bucket.returned:
                return bucket
        bucket = Bucket(capacity, self._info.num_readers)
        self._buckets.append(bucket)
        return bucket

    def _load(self, bucket: Bucket, expected: list[str]) -> None:
        started = time.perf_counter()
        try:
            memory = bucket.memory
            if self._server:
                memory = memory._replace(path=self._server.offer(bucket))
            info = BucketInfo(memory, bucket.entries, list(bucket.in_place.items()), expected)
            self.client.update_weights(vars(info))
            if self._server:  # what was fetched is a copy
                bucket.take_back()
        finally:
            self.parts.load_s += time.perf_counter() - started

    def _discard(self, buckets: list[Bucket]) -> None:
        for bucket in buckets:
            self._buckets.remove(bucket)
            if self._server:
                self._server.withdraw(bucket)
            bucket.close()


class _Peekable:
    """A stream of tensors whose next one can be seen before it is taken; its waiting counts as gathering."""

    def __init__(self, tensors: Iterator[tuple[str, SplitTensor]], parts: SyncParts):
        self._tensors = tensors
        self._parts = parts
        self.take()

    def peek(self) -> tuple[str, SplitTensor] | None:
        return self._item

    def take(self) -> None:
        self._item = None  # the tensor may go before the next one is gathered
        started = time.perf_counter()
        self._item = next(self._tensors, None)
        self._parts.gather_s += time.perf_counter() - started
