"""The engine's side of a weight sync, in each of its workers."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from vllm.distributed import get_tensor_model_parallel_rank
from vllm.distributed.weight_transfer.base import WeightTransferEngine
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

from trace_megatron.memory import keep_freed_memory
from trace_megatron.weight_sync.bucket_server import SCHEME, fetch
from trace_megatron.weight_sync.sender import BucketInfo, SharedMemoryInitInfo
from trace_megatron.weight_sync.shared_memory import MappedBucket, checksum


class SharedMemoryReceiver(WeightTransferEngine[SharedMemoryInitInfo, BucketInfo]):
    """In an engine worker: loads buckets through the model's own loader, and checks that nothing is missing.

    A failure raises ValueError with the tensor's name, after which vLLM waits for a new ``start_weight_update``.
    """

    init_info_cls = SharedMemoryInitInfo
    update_info_cls = BucketInfo

    _unfinished = False

    def init_transfer_engine(self, init_info: SharedMemoryInitInfo) -> None:
        keep_freed_memory()  # vLLM rebuilds each layer in new memory, copies it over the old and frees it
        self._rank = get_tensor_model_parallel_rank()
        self._buckets: dict[str, MappedBucket] = {}

    def start_weight_update(self) -> None:
        if self._unfinished:
            # Layers that a failed update left half-loaded would count its tensors and start on a mixture.
            finalize_layerwise_reload(self.model, self.model_config)
        self._unfinished = True
        self._used: set[str] = set()
        self._received: set[str] = set()
        self._filled: set[str] = set()
        self._parameters = {name for name, _ in self.model.named_parameters()}
        initialize_layerwise_reload(self.model)

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
            self._load_tensors(_checked(fetch(info.path, info.entries), info.checksums))
            return
        if info.key not in self._buckets:
            self._buckets[info.key] = MappedBucket(info.path, info.length)
        bucket, self._reader = self._buckets[info.key], info.first_reader + self._rank
        self._used.add(info.key)
        self._load_tensors(_checked(bucket.read(info.entries), info.checksums))
        # A layer of which a part is missing, or that is padded, keeps its tensors until the update is finished.
        bucket.try_return(self._reader)

    def _load_tensors(self, entries: Iterator[tuple[str, torch.Tensor]]) -> None:
        current = ("the first one", ())

        def tensors() -> Iterator[tuple[str, torch.Tensor]]:
            nonlocal current
            for name, tensor in entries:
                current = (f"'{name}'", tuple(tensor.shape))
                yield name, tensor
                del tensor

        try:
            self._filled |= set(self.model.load_weights(tensors()))
        except Exception as error:
            name, shape = current
            found = f"{name} of shape {shape}" if shape else name
            raise ValueError(f"the engine's model refused a tensor, {found}: {error!r}") from error

    def _check_complete(self, expected: set[str]) -> None:
        if missing := sorted(expected - self._received):
            raise ValueError(f"tensors never arrived: {', '.join(missing)}")
        if unexpected := sorted(self._received - expected):
            raise ValueError(f"unexpected tensors arrived: {', '.join(unexpected)}")
        unfilled = self._parameters - self._filled
        for name, module in self.model.named_modules():
            layer = get_layerwise_info(module)
            # Part of a fused parameter (QKV, gate and up). An embedding's padded rows are never filled.
            if not isinstance(module, VocabParallelEmbedding) and 0 < layer.load_numel < (layer.load_numel_total or 0):
                unfilled.add(name)
        if unfilled:
            raise ValueError(f"no tensor fills these parts of the engine's model: {', '.join(sorted(unfilled))}")

    def finish_weight_update(self) -> None:
        finalize_layerwise_reload(self.model, self.model_config)
        refresh_heads(self.model)
        self._unfinished = False
        for key in set(self._buckets) - self._used:  # the sender has others now
            del self._buckets[key]
        for bucket in self._buckets.values():
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
