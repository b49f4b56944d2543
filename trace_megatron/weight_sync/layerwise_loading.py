"""Weights through vLLM's own loader, one layer after the other: right for every model, and slow."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import nullcontext

import torch
from vllm.config import ModelConfig
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

from trace_megatron.weight_sync.direct_loading import Rehearsal
from trace_megatron.weight_sync.landings import LoadWatch


class LayerwiseLoading:
    """One update. With ``watched``, ``watch`` knows afterwards whether copies can repeat it, and which."""

    def __init__(self, model: torch.nn.Module, model_config: ModelConfig, watched: bool):
        self._model = model
        self._model_config = model_config
        self._filled: set[str] = set()
        self._parameters = {name for name, _ in model.named_parameters()}
        initialize_layerwise_reload(model)
        self.watch = LoadWatch(model) if watched else None
        self._rehearsal = Rehearsal(self.watch) if watched else None

    def load(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Raises ValueError with the name of the tensor that the model refused."""
        current = ("the first one", ())

        def named(tensors: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
            nonlocal current
            for name, tensor in tensors:
                current = (f"'{name}'", tuple(tensor.shape))
                yield name, tensor
                del tensor

        if self.watch:
            tensors = list(tensors)
        try:
            with self.watch or nullcontext():
                named_tensors = named(tensors)
                self._filled |= set(
                    self._model.load_weights(self.watch.arriving(named_tensors) if self.watch else named_tensors)
                )
        except Exception as error:
            name, shape = current
            found = f"{name} of shape {shape}" if shape else name
            raise ValueError(f"the engine's model refused a tensor, {found}: {error!r}") from error
        if self._rehearsal:
            self._rehearsal.repeat(tensors)

    def unfilled(self) -> list[str]:
        """Parameters that nothing was loaded into, and layers of which a part is missing."""
        unfilled = self._parameters - self._filled
        for name, module in self._model.named_modules():
            layer = get_layerwise_info(module)
            # Part of a fused parameter (QKV, gate and up). An embedding's padded rows are never filled.
            if not isinstance(module, VocabParallelEmbedding) and 0 < layer.load_numel < (layer.load_numel_total or 0):
                unfilled.add(name)
        return sorted(unfilled)

    def finish(self) -> None:
        """Process what is still held back."""
        finalize_layerwise_reload(self._model, self._model_config)
        if self._rehearsal:
            self._rehearsal.compare()

    def give_up(self) -> None:
        """Put back what layers had that are not whole: they would count the next update's tensors, start on a mixture.

        What they were given goes first, as vLLM would load it into them once more: also what they refused.
        """
        for layer in self._model.modules():
            info = get_layerwise_info(layer)
            info.loaded_weights.clear()
            info.load_numel = 0
        finalize_layerwise_reload(self._model, self._model_config)
