"""The trainer's side of a weight sync through shared memory."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from typing import ClassVar, Self

import torch
from vllm.distributed.weight_transfer.base import (
    TrainerInitInfo,
    TrainerWeightTransferEngine,
    VLLMWeightSyncClient,
    WeightSource,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

from trace_megatron.rollout.engine import EngineError
from trace_megatron.rollout.vllm_engine import SHARED_MEMORY_BACKEND
from trace_megatron.weight_sync.shared_memory import Bucket, Entry
from trace_megatron.weight_sync.stats import SyncParts


@dataclass
class SharedMemoryInitInfo(WeightTransferInitInfo):
    """Nothing to agree on."""


@dataclass
class BucketInfo(WeightTransferUpdateInfo):
    """One bucket, as JSON-able values."""

    path: str = ""
    size: int = 0
    entries: list[Entry] = field(default_factory=list)
    expected: list[str] = field(default_factory=list)
    """On the last bucket: the names of all tensors of this update."""
    aborted: bool = False
    """The sender gave up: end this update as failed."""


@dataclass
class SharedMemoryTrainerInfo(TrainerInitInfo):
    backend: ClassVar[str] = SHARED_MEMORY_BACKEND

    bucket_bytes: int


class SharedMemorySender(TrainerWeightTransferEngine[SharedMemoryTrainerInfo]):
    """In the trainer: streams a WeightSource, filling one bucket while the engine loads the one before."""

    init_info_cls = SharedMemoryTrainerInfo

    def __init__(self, *, client: VLLMWeightSyncClient, source: WeightSource, bucket_bytes: int):
        super().__init__(client=client, source=source)
        self._bucket_bytes = bucket_bytes
        self.parts = SyncParts()

    @classmethod
    def trainer_init(
        cls, init_info: SharedMemoryTrainerInfo, *, client: VLLMWeightSyncClient, source: WeightSource | None = None
    ) -> Self:
        assert source is not None
        client.init_weight_transfer_engine({})
        return cls(client=client, source=source, bucket_bytes=init_info.bucket_bytes)

    def send_weights(self) -> None:
        """One start, the buckets, one finish. An error leaves the engine's weights half-updated."""
        self.parts = SyncParts()
        self.client.start_weight_update()
        try:
            self._send_buckets()
        except EngineError:
            raise  # the receiver failed, and with that left the update
        except BaseException:
            with suppress(EngineError):  # to fail is vLLM's only way to leave an update
                self.client.update_weights(asdict(BucketInfo(aborted=True)))
            raise
        started = time.perf_counter()
        self.client.finish_weight_update()
        self.parts.finish_s = time.perf_counter() - started

    def _send_buckets(self) -> None:
        expected = [info.name for info in self.source.metadata()]
        tensors = iter(self.source)
        loading: Future[None] | None = None
        last = False
        with ThreadPoolExecutor(max_workers=1) as loader:
            while not last:
                bucket = Bucket()
                try:
                    last = self._fill(bucket, tensors)
                    if loading is not None:
                        loading.result()
                except BaseException:
                    bucket.close()
                    raise
                loading = loader.submit(self._load, bucket, expected if last else [])
            loading.result()

    def _fill(self, bucket: Bucket, tensors: Iterator[tuple[str, torch.Tensor]]) -> bool:
        """Add tensors until the bucket is full; True when none is left."""
        started = time.perf_counter()
        for name, tensor in tensors:
            gathered = time.perf_counter()
            bucket.add(name, tensor)
            written = time.perf_counter()
            self.parts.gather_s += gathered - started
            self.parts.write_s += written - gathered
            started = written
            if bucket.size >= self._bucket_bytes:
                return False
        return True

    def _load(self, bucket: Bucket, expected: list[str]) -> None:
        started = time.perf_counter()
        try:
            self.client.update_weights(asdict(BucketInfo(bucket.path, bucket.size, bucket.entries, expected)))
        finally:
            bucket.close()
            self.parts.load_s += time.perf_counter() - started
