"""One pass of the policy's tensors through vLLM's weight-transfer API, from a thread beside the engine's event loop."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from typing import Any

import torch
from vllm.distributed.weight_transfer import TrainerWeightTransferEngine, WeightTransferTrainerFactory
from vllm.distributed.weight_transfer.base import (
    TrainerInitInfo,
    WeightTransferInitRequest,
    WeightTransferUpdatePayload,
    WeightTransferUpdateRequest,
)

from trace_megatron.config import SyncConfig
from trace_megatron.errors import UserError
from trace_megatron.rollout.engine import Engine
from trace_megatron.rollout.vllm_engine import SHARED_MEMORY_BACKEND
from trace_megatron.split_tensor import SplitTensor
from trace_megatron.types import TensorInfo
from trace_megatron.weight_sync.control import control_each
from trace_megatron.weight_sync.sender import SharedMemorySender, SharedMemoryTrainerInfo
from trace_megatron.weight_sync.shared_memory import register
from trace_megatron.weight_sync.source import PolicySource
from trace_megatron.weight_sync.stats import SyncParts


class EngineClient:
    """vLLM's VLLMWeightSyncClient over engines whose event loop runs in another thread; each call goes to all."""

    def __init__(self, engines: Sequence[Engine], loop: asyncio.AbstractEventLoop):
        self._engines = engines
        self._loop = loop
        self.paused: Future[None] | None = None
        """Of the next update: when every engine's requests stand still."""

    def _call(self, method: str, *args: Any) -> None:
        self._call_each(method, [args] * len(self._engines))

    def _call_each(self, method: str, arguments: Sequence[tuple[Any, ...]]) -> None:
        calls = list(zip(self._engines, arguments, strict=True))
        asyncio.run_coroutine_threadsafe(control_each(calls, method), self._loop).result()

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self._call("init_weight_transfer_engine", WeightTransferInitRequest(init_info))

    def start_weight_update(self) -> None:
        self.paused.result()
        self._call("start_weight_update")

    def update_weights(self, update_info: WeightTransferUpdatePayload) -> None:
        requests, first = [], 0
        for engine in self._engines:  # our backend alone serves several: its workers are numbered through
            info = {**update_info, "first_reader": first} if "first_reader" in update_info else update_info
            requests.append((WeightTransferUpdateRequest(info),))
            first += engine.num_workers
        self._call_each("update_weights", requests)

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self._call("finish_weight_update", weight_version)


class Transfer:
    """The connection to the engines, made at the first ``send`` and kept."""

    def __init__(self, engines: Sequence[Engine], loop: asyncio.AbstractEventLoop, config: SyncConfig):
        register()
        self._engines = list(engines)
        self._lives = _lives(engines)
        self._client = EngineClient(engines, loop)
        self._bucket_bytes = config.bucket_mib * 2**20
        self._address = config.address
        self._source = PolicySource(split=engines[0].weight_backend == SHARED_MEMORY_BACKEND)
        self._sender: TrainerWeightTransferEngine | None = None
        self._device = torch.cuda.current_device() if torch.cuda.is_available() else None

    def connects(self, engines: Sequence[Engine]) -> bool:
        """Whether this is the connection to just these engines, in these of their lives."""
        return self._lives == _lives(engines)

    def close(self) -> None:
        """Give the shared memory back."""
        if isinstance(self._sender, SharedMemorySender):
            self._sender.close()

    @torch.no_grad()
    def send(
        self,
        infos: Sequence[TensorInfo],
        tensors: Iterable[tuple[str, torch.Tensor | SplitTensor]],
        paused: Future[None],
        with_checksums: bool = False,
    ) -> tuple[int, SyncParts]:
        """Start once the engines have ``paused``, update and finish; returns bytes sent and the seconds by part.

        Blocks: never on the event loop.
        """
        if self._device is not None:
            torch.cuda.set_device(self._device)  # of this thread
        self._client.paused = paused
        self._source.renew(infos, tensors)
        if self._sender is None:
            self._sender = WeightTransferTrainerFactory.trainer_init(
                self._init_info(), client=self._client, source=self._source
            )
        if isinstance(self._sender, SharedMemorySender):
            self._sender.with_checksums = with_checksums
        self._sender.send_weights()
        parts = self._sender.parts if isinstance(self._sender, SharedMemorySender) else SyncParts()
        return self._source.num_bytes, parts

    def _init_info(self) -> TrainerInitInfo:
        backend = self._engines[0].weight_backend
        num_workers = sum(engine.num_workers for engine in self._engines)
        if backend == SHARED_MEMORY_BACKEND:
            return SharedMemoryTrainerInfo(
                rank=0, bucket_bytes=self._bucket_bytes, num_readers=num_workers, address=self._address
            )
        if backend == "ipc":
            from vllm.distributed.weight_transfer.ipc_engine import IPCTrainerInitInfo

            return IPCTrainerInitInfo(rank=0, packed=True, packed_buffer_size_bytes=self._bucket_bytes)
        if backend == "nccl":
            from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo

            return NCCLTrainerInitInfo(
                master_address=self._address or "127.0.0.1",
                master_port=_free_port(self._address),
                world_size=1 + num_workers,
                packed_buffer_size_bytes=self._bucket_bytes,
                rank=0,
            )
        raise UserError(f"expected weight backend '{SHARED_MEMORY_BACKEND}', 'ipc' or 'nccl', found '{backend}'")


def _lives(engines: Sequence[Engine]) -> list[tuple[int, int]]:
    return [(id(engine), engine.num_starts) for engine in engines]


def _free_port(address: str) -> int:
    with socket.socket() as probe:
        probe.bind((address or "127.0.0.1", 0))
        return probe.getsockname()[1]
