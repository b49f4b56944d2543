"""The engine's side of a weight sync, in each of its workers."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from vllm.distributed.weight_transfer.base import WeightTransferEngine
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

from trace_megatron.weight_sync.sender import BucketInfo, SharedMemoryInitInfo
from trace_megatron.weight_sync.shared_memory import read_bucket


class SharedMemoryReceiver(WeightTransferEngine[SharedMemoryInitInfo, BucketInfo]):
    """In an engine worker: loads buckets through the model's own loader, and checks that nothing is missing.

    A failure raises ValueError with the tensor's name, after which vLLM waits for a new ``start_weight_update``.
    """

    init_info_cls = SharedMemoryInitInfo
    update_info_cls = BucketInfo

    _unfinished = False

    def init_transfer_engine(self, init_info: SharedMemoryInitInfo) -> None:
        pass

    def start_weight_update(self) -> None:
        if self._unfinished:
            # Layers that a failed update left half-loaded would count its tensors and start on a mixture.
            finalize_layerwise_reload(self.model, self.model_config)
        self._unfinished = True
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

    def _load(self, bucket: BucketInfo) -> None:
        current = None

        def tensors() -> Iterator[tuple[str, torch.Tensor]]:
            nonlocal current
            for entry in read_bucket(bucket.path, bucket.size, bucket.entries):
                current = entry
                yield entry

        try:
            self._filled |= set(self.model.load_weights(tensors()))
        except Exception as error:
            found = f"'{current[0]}' of shape {tuple(current[1].shape)}" if current else "the first one"
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

    def shutdown(self) -> None:
        pass


def refresh_heads(model: torch.nn.Module) -> None:
    """Pack output heads again: on a CPU, a head tied to the embedding keeps the packed copy of its old weights.

    No tensor is loaded into a tied head, so that vLLM's reload does not process it. Harmless for an untied one.
    """
    for module in model.modules():
        if isinstance(module, ParallelLMHead):
            module.quant_method.process_weights_after_loading(module)
