"""The engine's side of a weight sync, in each of its workers."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from vllm.distributed import get_tensor_model_parallel_rank
from vllm.distributed.weight_transfer.base import WeightTransferEngine
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

from trace_megatron.memory import keep_freed_memory
from trace_megatron.weight_sync.bucket_server import SCHEME, fetch
from trace_megatron.weight_sync.direct_loading import DirectLoading
from trace_megatron.weight_sync.layerwise_loading import LayerwiseLoading
from trace_megatron.weight_sync.sender import BucketInfo, SharedMemoryInitInfo
from trace_megatron.weight_sync.shared_memory import MappedBucket, checksum


class SharedMemoryReceiver(WeightTransferEngine[SharedMemoryInitInfo, BucketInfo]):
    """In an engine worker: loads buckets, and checks that nothing is missing.

    The first update goes through the model's own loader, later ones straight to where that put the tensors.

    A failure raises ValueError with the tensor's name, after which vLLM waits for a new ``start_weight_update``.
    """

    init_info_cls = SharedMemoryInitInfo
    update_info_cls = BucketInfo
    supports_draft_weight_update = False  # what was learned is of one model

    _loading: LayerwiseLoading | DirectLoading | None = None
    """Of the update that is going on, or that failed."""
    _direct: DirectLoading | None = None
    """From the first update that vLLM's loader finished, where copies can repeat it; until one fails."""
    _watched = True
    """Whether to find that out."""

    def init_transfer_engine(self, init_info: SharedMemoryInitInfo) -> None:
        keep_freed_memory()  # layers are put together in new memory, copied over the old or packed, and freed
        self._rank = get_tensor_model_parallel_rank()
        self._buckets: dict[str, MappedBucket] = {}

    def start_weight_update(self) -> None:
        if self._loading is not None:
            self._direct = None
            self._loading.give_up()
        self._used: set[str] = set()
        self._received: set[str] = set()
        self._held: list[MappedBucket] = []
        if self._direct is not None:
            self._direct.start()
        self._loading = self._direct or LayerwiseLoading(self.model, self.model_config, self._watched)

    def receive_weights(self, update_info: BucketInfo) -> None:
        if update_info.aborted:
            raise ValueError("the sender gave up")
        names = [entry[0] for entry in update_info.entries]
        if twice := sorted(self._received.intersection(names)):
            raise ValueError(f"tensors arrived twice: {', '.join(twice)}")
        self._received.update(names)
        self._load(update_info)
        if update_info.expected:
            self._check_complete(set(update_info.expected))

    def _load(self, info: BucketInfo) -> None:
        if info.path.startswith(SCHEME):
            self._loading.load(_checked(fetch(info.path, info.entries), info.checksums))
            return
        if info.key not in self._buckets:
            self._buckets[info.key] = MappedBucket(info.path, info.length)
        bucket, self._reader = self._buckets[info.key], info.first_reader + self._rank
        self._used.add(info.key)
        self._loading.load(_checked(bucket.read(info.entries), info.checksums))
        # This bucket's tensors may still be at work while the next one is on its way, or longer: vLLM's loader keeps
        # those of a layer of which a part is missing, or that is padded, until the update is finished.
        self._held = [held for held in (*self._held, bucket) if not held.try_return(self._reader)]

    def _check_complete(self, expected: set[str]) -> None:
        if missing := sorted(expected - self._received):
            raise ValueError(f"tensors never arrived: {', '.join(missing)}")
        if unexpected := sorted(self._received - expected):
            raise ValueError(f"unexpected tensors arrived: {', '.join(unexpected)}")
        unfilled = self._loading.unfilled()
        if unfilled:
            raise ValueError(f"no tensor fills these parts of the engine's model: {', '.join(unfilled)}")

    def finish_weight_update(self) -> None:
        self._loading.finish()
        if isinstance(self._loading, LayerwiseLoading):
            refresh_heads(self.model)
            if watch := self._loading.watch:
                self._watched = not watch.obstacle
                self._direct = DirectLoading(self.model, self.model_config, watch) if self._watched else None
        self._loading = None
        for key in set(self._buckets) - self._used:  # the sender has others now
            del self._buckets[key]
        for bucket in self._held:
            bucket.try_return(self._reader)

    def shutdown(self) -> None:
        self._buckets = {}


def _checked(tensors: Iterator[tuple[str, torch.Tensor]], checksums: list[int]) -> Iterator[tuple[str, torch.Tensor]]:
    for index, (name, tensor) in enumerate(tensors):
        if checksums and checksum(tensor) != checksums[index]:
            raise ValueError(f"tensor '{name}' arrived with another checksum than the trainer's")
        yield name, tensor
        del tensor


def refresh_heads(model: torch.nn.Module) -> None:
    """Pack output heads again: on a CPU, a head tied to the embedding keeps the packed copy of its old weights.

    No tensor is loaded into a tied head, so that vLLM's reload does not process it. Harmless for an untied one.
    """
    for module in model.modules():
        if isinstance(module, ParallelLMHead):
            module.quant_method.process_weights_after_loading(module)
