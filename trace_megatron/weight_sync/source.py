"""The policy's plain (metadata, iterator) as vLLM's WeightSource."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
from vllm.distributed.weight_transfer.base import ParamMeta, WeightSource

from trace_megatron.errors import WeightSyncError
from trace_megatron.types import TensorInfo


class PolicySource(WeightSource):
    """One pass over ``tensors`` per ``renew``. Raises WeightSyncError where a tensor contradicts the metadata."""

    def __init__(self) -> None:
        self._infos: dict[str, TensorInfo] = {}
        self._tensors: Iterator[tuple[str, torch.Tensor]] = iter(())
        self.num_bytes = 0

    def renew(self, infos: Sequence[TensorInfo], tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """What the next pass declares and yields."""
        self._infos = {info.name: info for info in infos}
        self._tensors = iter(tensors)
        self.num_bytes = 0

    def metadata(self) -> list[ParamMeta]:
        return [ParamMeta(info.name, info.dtype, info.shape) for info in self._infos.values()]

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in self._tensors:
            info = self._infos.get(name)
            if info is None:
                raise WeightSyncError(f"the policy yielded tensor '{name}', which its metadata does not list")
            if tuple(tensor.shape) != tuple(info.shape) or tensor.dtype != info.dtype:
                raise WeightSyncError(
                    f"expected tensor '{name}' as {info.dtype} of shape {tuple(info.shape)}, "
                    f"found {tensor.dtype} of shape {tuple(tensor.shape)}"
                )
            self.num_bytes += tensor.numel() * tensor.itemsize
            yield name, tensor
