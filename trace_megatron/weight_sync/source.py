"""The policy's plain (metadata, iterator) as vLLM's WeightSource."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

import torch
from vllm.distributed.weight_transfer.base import ParamMeta, WeightSource

from trace_megatron.errors import WeightSyncError
from trace_megatron.split_tensor import SplitTensor
from trace_megatron.types import TensorInfo


class PolicySource(WeightSource):
    """One pass over ``tensors`` per ``renew``. Raises WeightSyncError where a tensor contradicts the metadata.

    Yields whole tensors, as vLLM's own backends ask for, or SplitTensors where ``split``.
    """

    def __init__(self, split: bool = False) -> None:
        self._split = split
        self._infos: dict[str, TensorInfo] = {}
        self._tensors: Iterator[tuple[str, torch.Tensor | SplitTensor]] = iter(())
        self.num_bytes = 0

    def renew(self, infos: Sequence[TensorInfo], tensors: Iterable[tuple[str, torch.Tensor | SplitTensor]]) -> None:
        """What the next pass declares and yields."""
        self._infos = {info.name: info for info in infos}
        self._tensors = iter(tensors)
        self.num_bytes = 0

    def metadata(self) -> list[ParamMeta]:
        return _metadata(self._infos.values())

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor | SplitTensor]]:
        for name, tensor in self._tensors:
            split = tensor if isinstance(tensor, SplitTensor) else SplitTensor.of(tensor)
            info = self._infos.get(name)
            if info is None:
                raise WeightSyncError(f"the policy yielded tensor '{name}', which its metadata does not list")
            if split.shape != tuple(info.shape) or split.dtype != info.dtype:
                raise WeightSyncError(
                    f"expected tensor '{name}' as {info.dtype} of shape {tuple(info.shape)}, "
                    f"found {split.dtype} of shape {split.shape}"
                )
            if (found := sum(part.numel() for part in split.parts)) != math.prod(split.shape):
                raise WeightSyncError(
                    f"expected parts of {split.shape} in all of tensor '{name}', found {found} elements"
                )
            self.num_bytes += split.num_bytes
            yield name, split if self._split else split.join()


class RankSource(WeightSource):
    """Of one trainer rank, for the backends that run on all of them; every ``iter`` is a fresh pass.

    ``held`` None: each rank yields every tensor whole (``policy.live_weights.iter_full_weights``), as ``ipc`` and
    ``nccl`` ask. Else the names that this rank holds (``iter_held_weights``, ``held_names``), as ``nccl_m2n`` and the
    RDT backend ask: names come in metadata order, None for what others hold, and of groups of which this rank holds
    nothing none at all.
    """

    def __init__(
        self,
        infos: Sequence[TensorInfo],
        iterate: Callable[[], Iterator[tuple[str, torch.Tensor | None]]],
        held: Collection[str] | None = None,
    ):
        self._infos = infos
        self._iterate = iterate
        self._held = held

    def metadata(self) -> list[ParamMeta]:
        return _metadata(self._infos)

    def held_names(self) -> Collection[str] | None:
        return self._held

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor | None]]:
        names = {name for group in self.groups() for name in group}
        for name, tensor in self._iterate():
            if name in names:
                yield name, tensor


def _metadata(infos: Iterable[TensorInfo]) -> list[ParamMeta]:
    return [ParamMeta(info.name, info.dtype, info.shape) for info in infos]
