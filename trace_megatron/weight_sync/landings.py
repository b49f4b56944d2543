"""Where the engine's own loader puts each tensor: watched during one update, so that later ones copy straight there.

What vLLM's loader does to a tensor is the same in every update, and for dense layers nothing but copies: some rows of
it become some rows of a fused parameter. ``LoadWatch`` sees them through torch's dispatch. Whatever else touches a
tensor on its way (a value that is read, a result that is computed) is an obstacle: then there is nothing to repeat.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from vllm.model_executor.model_loader.reload.utils import get_layer_tensors

_COPY = torch.ops.aten.copy_.default
_FILLS = (torch.ops.aten.fill_.Scalar, torch.ops.aten.zero_.default)
_READS_VALUE = torch.ops.aten._local_scalar_dense.default


@dataclass(frozen=True, slots=True)
class Region:
    """Part of a tensor, in elements of its storage; the offset counts from the tensor's own."""

    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int

    @classmethod
    def of(cls, view: torch.Tensor, whole: torch.Tensor) -> Region:
        return cls(tuple(view.size()), view.stride(), view.storage_offset() - whole.storage_offset())

    @property
    def num_elements(self) -> int:
        return math.prod(self.sizes)

    @property
    def is_contiguous(self) -> bool:
        """Whether it starts where its tensor does, and leaves nothing out."""
        return self == Region.of(whole := torch.empty(self.sizes, device="meta"), whole)

    def narrow(self, axis: int, start: int, length: int) -> Region:
        """That part of it, along one of its dimensions."""
        sizes = (*self.sizes[:axis], length, *self.sizes[axis + 1 :])
        return Region(sizes, self.strides, self.offset + start * self.strides[axis])

    def within(self, whole: torch.Tensor) -> torch.Tensor:
        """That part of ``whole``."""
        return whole.as_strided(self.sizes, self.strides, self.offset + whole.storage_offset())


@dataclass(frozen=True, slots=True)
class Place:
    """A layer's parameter or buffer, by name."""

    layer: torch.nn.Module
    name: str

    def __str__(self) -> str:
        return f"{type(self.layer).__name__}.{self.name}"


@dataclass(frozen=True, slots=True)
class Landing:
    """One copy: part of a tensor that arrives becomes part of a layer's."""

    place: Place
    source: Region
    target: Region


@dataclass(frozen=True, slots=True)
class Arrival:
    """A tensor of an update, and all that becomes of it."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    landings: list[Landing]


class LoadWatch(TorchDispatchMode):
    """Entered around the loading of one tensor after the other into ``model``, whose tensors are laid out for it."""

    def __init__(self, model: torch.nn.Module):
        super().__init__()
        self.arrivals: dict[str, Arrival] = {}
        self.layouts: dict[Place, torch.Tensor] = {}
        """Of every tensor that something landed in, as the loader finds it: shape, strides and dtype count."""
        self.obstacle = ""
        """Why the update cannot be repeated by copies; empty: it can."""
        self._targets: dict[int, tuple[Place, torch.Tensor]] = {}
        self._sources: dict[str, torch.Tensor] = {}
        self._landed: dict[tuple[Place, Region], str] = {}
        for layer in model.modules():
            for name, tensor in get_layer_tensors(layer).items():
                self._targets[_storage(tensor)] = (Place(layer, name), tensor)

    def arriving(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        """The tensors as they come: until the last has been loaded, their memory tells which they are."""
        for name, tensor in tensors:
            self.arrivals[name] = Arrival(tuple(tensor.shape), tensor.dtype, [])
            self._sources[name] = tensor
            yield name, tensor
        self._sources = {}

    def regions(self, place: Place) -> list[Region]:
        """The parts of ``place`` that something landed in."""
        return [region for landed, region in self._landed if landed == place]

    def stop(self, obstacle: str) -> None:
        """Nothing of this update is to be repeated."""
        self.obstacle = self.obstacle or obstacle

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is _COPY:
            self._note_copy(args[0], args[1])
        elif func is _READS_VALUE:
            if name := self._source(args[0]):
                self.stop(f"the loader reads a value of '{name}'")
        elif func._schema.is_mutable and func not in _FILLS:
            # What is filled with a constant (an embedding's padded rows) stays so: nothing lands there.
            for place, _ in filter(None, map(self._targets.get, map(_storage, args))):
                self.stop(f"the loader computes {place} in place ({func})")
        return result

    def _note_copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        place, layout = self._targets.get(_storage(target), (None, None))
        if place is None or _storage(source) == _storage(target):
            return  # the layer as it is built anew: the same copies once more
        region = Region.of(target, layout)
        name = self._source(source)
        if landed := self._landed.get((place, region)):
            if name not in ("", landed):
                self.stop(f"'{landed}' and '{name}' both become the same part of {place}")
            return  # a tensor that was never on the meta device is loaded twice
        if not name or source.dtype != self._sources[name].dtype:
            self.stop(f"what is loaded into {place} is not what arrived")
            return
        self._landed[place, region] = name
        self.layouts[place] = layout
        self.arrivals[name].landings.append(Landing(place, Region.of(source, self._sources[name]), region))

    def _source(self, tensor: torch.Tensor) -> str:
        """The name of the tensor of which this is a part, if it is."""
        address = tensor.data_ptr()
        for name, whole in self._sources.items():
            if whole.data_ptr() <= address < whole.data_ptr() + whole.nbytes:
                return name
        return ""


def _storage(argument: Any) -> int:
    """What all views of a tensor have in common, and no other tensor that is alive."""
    return argument.untyped_storage()._cdata if isinstance(argument, torch.Tensor) else 0
