"""Weights copied straight to where the engine's own loader was seen to put them.

A parameter that the engine uses as it was loaded is written in place. One of which it keeps a packed copy alone (for a
CPU's matrix products) is put together in memory of its own, and packed by vLLM's own method when it is complete.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field

import torch
from vllm.config import ModelConfig
from vllm.model_executor.layers.attention import Attention, is_deferred_attention_layer
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.utils import check_cpu_sgl_kernel
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    UnquantizedEmbeddingMethod,
    VocabParallelEmbedding,
)
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

from trace_megatron.split_tensor import SplitTensor
from trace_megatron.weight_sync.landings import Arrival, Landing, LoadWatch, Place, Region

_METHODS = (type(None), UnquantizedLinearMethod, UnquantizedEmbeddingMethod)
"""Of layers whose weights are used as they are loaded, or packed by nothing but their method."""

_NUM_PROBES = 3
"""Rows by which a packed copy is compared with another."""


class Rehearsal:
    """Beside vLLM's loader, puts the same tensors together by copies and compares, layer by layer, bit by bit."""

    def __init__(self, watch: LoadWatch):
        self._watch = watch
        self._layers: dict[torch.nn.Module, dict[str, torch.Tensor]] = {}
        self._background = _packing_thread()

    def repeat(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """After vLLM loaded ``tensors``; compares the layers that are complete with them."""
        if self._watch.obstacle:
            self._layers.clear()
            return
        for name, tensor in tensors:
            for landing in self._watch.arrivals[name].landings:
                place = landing.place
                copies = self._layers.setdefault(place.layer, {})
                if place.name not in copies:
                    copies[place.name] = _like(self._watch.layouts[place])
                landing.target.within(copies[place.name]).copy_(landing.source.within(tensor))
        self.compare()

    def compare(self) -> None:
        """Compare what vLLM has processed; it holds incomplete layers back until its update is finished."""
        for layer in [layer for layer in self._layers if not get_layerwise_info(layer).can_load()]:
            for name, copy in self._layers.pop(layer).items():
                self._compare(Place(layer, name), copy)

    def _compare(self, place: Place, copy: torch.Tensor) -> None:
        layer, regions = place.layer, self._watch.regions(place)
        live = getattr(layer, place.name).data
        if type(getattr(layer, "quant_method", None)) not in _METHODS:
            self._watch.stop(f"{place} is processed in a way of its own")
        elif live.shape == copy.shape and live.stride() == copy.stride():
            if not all(torch.equal(region.within(live).cpu(), region.within(copy)) for region in regions):
                self._watch.stop(f"the engine does not keep {place} as it was loaded")
        elif place.name != "weight" or not hasattr(layer, "cpu_linear"):
            self._watch.stop(f"the engine keeps {place} in a way of its own")
        elif sum(region.num_elements for region in regions) != copy.numel():
            self._watch.stop(f"parts of {place} are not loaded")
        else:
            probe = torch.randn(_NUM_PROBES, copy.shape[1], generator=torch.Generator().manual_seed(0)).to(copy.dtype)
            of_vllm = layer.cpu_linear
            expected = of_vllm(probe, layer.weight, None)
            self._background.submit(pack, layer, copy).result()  # where later updates do
            copy.zero_()  # what is loaded changes after the update: vLLM must keep none of it
            if not torch.equal(layer.cpu_linear(probe, layer.weight, None), expected):
                layer.cpu_linear = of_vllm
                self._watch.stop(f"{place}, put together by copies, is not what vLLM made of it")


@dataclass(slots=True)
class _Layer:
    """What of a layer is loaded, and how much of it has arrived."""

    module: torch.nn.Module
    layout: torch.Tensor | None = None
    """Of its weight, where the engine keeps a packed copy alone."""
    heads: list[ParallelLMHead] = field(default_factory=list)
    """That keep a packed copy of its weight beside it: an output head itself, and one that is tied to an embedding."""
    num_elements: int = 0
    num_arrived: int = 0
    arrived: list[tuple[Landing, SplitTensor]] = field(default_factory=list)
    """Where it lies, until it is copied or packed."""
    weight: torch.Tensor | None = None
    """The same, where pieces that arrived earlier were put."""

    def land(self, landing: Landing, split: SplitTensor) -> None:
        """Note what of a tensor belongs here."""
        self.num_arrived += landing.target.num_elements
        self.arrived.append((landing, split))

    @property
    def is_packed_by_onednn(self) -> bool:
        """Its weight, or a head's copy of it; vLLM's other packing, for AMX, knows one layout."""
        weight = self.module.weight if self.layout is None and self.heads else self.layout
        return weight is not None and not check_cpu_sgl_kernel(*weight.shape, weight.dtype)

    @property
    def complete(self) -> bool:
        return self.num_arrived == self.num_elements

    @torch.no_grad()
    def take_in(self) -> None:
        """Copy what was noted, and pack what that makes whole. The memory of what arrived may go then."""
        packed = []
        for landing, split in self.arrived:
            if landing.place.name == "weight" and self.layout is not None:
                packed += _pieces(split, landing)
                continue
            for piece, target in _pieces(split, landing):
                _copy(piece, target, getattr(self.module, landing.place.name).data)
        self.arrived = []
        if self.layout is not None and self.complete:
            pack(self.module, self._as_one(packed) if self.weight is None else self._put_together(packed))
            self.give_up()
        elif packed:
            self._put_together(packed)
        if self.complete:
            for head in self.heads:
                head.quant_method.process_weights_after_loading(head)

    def give_up(self) -> None:
        """Forget what was kept."""
        self.arrived, self.weight = [], None

    def _put_together(self, pieces: Sequence[tuple[torch.Tensor, Region]]) -> torch.Tensor:
        if self.weight is None:
            self.weight = _like(self.layout)
        for piece, target in pieces:
            _copy(piece, target, self.weight)
        return self.weight

    def _as_one(self, pieces: Sequence[tuple[torch.Tensor, Region]]) -> torch.Tensor:
        """The weight, uncopied where its pieces lie one behind the other as they do in it."""
        (first, _), *_ = sorted(pieces, key=lambda entry: entry[1].offset)
        if all(
            piece.dtype is self.layout.dtype
            and piece.is_contiguous()
            and region.strides == piece.stride()
            and piece.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
            and piece.storage_offset() - first.storage_offset() == region.offset
            for piece, region in pieces
        ):
            return first.as_strided(self.layout.size(), self.layout.stride(), first.storage_offset())
        return self._put_together(pieces)


class DirectLoading:
    """Repeats what ``watch`` saw vLLM's loader do, in the background: layers side by side, but for what oneDNN packs.

    It does so in turn, by as many threads as vLLM's own packing was: it may choose another layout for another number,
    and vLLM 0.32 multiplies all matrices of one shape as it once chose to for the first.
    """

    def __init__(self, model: torch.nn.Module, model_config: ModelConfig, watch: LoadWatch):
        self._model_config = model_config
        self._arrivals: dict[str, Arrival] = watch.arrivals
        self._layers: dict[torch.nn.Module, _Layer] = {}
        self._names = {module: name for name, module in model.named_modules()}
        for place, layout in watch.layouts.items():
            layer = self._layers.setdefault(place.layer, _Layer(place.layer))
            num_elements = sum(region.num_elements for region in watch.regions(place))
            layer.num_elements += num_elements
            if getattr(place.layer, place.name).shape != layout.shape:
                layer.layout = layout
        # Other attention than vLLM's plain one, of which nothing is loaded, derives tensors from projections.
        self._attention = [
            module
            for module in model.modules()
            if is_deferred_attention_layer(module) and type(module) is not Attention
        ]
        for layer in self._layers.values():
            if isinstance(layer.module, VocabParallelEmbedding) and not isinstance(layer.module, ParallelLMHead):
                # vLLM packs embeddings as if they were heads. The copy would be stale: nobody must find it.
                layer.module.__dict__.pop("cpu_linear", None)
        for head in (module for module in model.modules() if isinstance(module, ParallelLMHead)):
            for layer in self._layers.values():
                if getattr(layer.module, "weight", None) is head.weight:
                    layer.heads.append(head)
        self._background = _packing_thread()
        self._side_by_side = ThreadPoolExecutor(torch.get_num_threads(), initializer=_compute_with, initargs=(1,))
        self._at_work: Future[None] | None = None
        """Until what the last call of ``load`` brought is in its place."""

    def start(self) -> None:
        """Expect every tensor."""
        for layer in self._layers.values():
            layer.num_arrived = 0

    def load(self, tensors: Iterable[tuple[str, SplitTensor]]) -> None:
        """Have them copied where they belong, in the background, when what came before is there.

        Raises ValueError with the name of one that was not there the last time.
        """
        touched: dict[int, _Layer] = {}
        self._wait()
        for name, split in tensors:
            arrival = self._arrivals.get(name)
            if arrival is None or arrival.shape != split.shape or arrival.dtype != split.dtype:
                expected = f"{arrival.dtype} of shape {arrival.shape}" if arrival else "none of this name"
                raise ValueError(
                    f"the engine's model expected {expected}, found '{name}', {split.dtype} of shape {split.shape}"
                )
            for landing in arrival.landings:
                layer = self._layers[landing.place.layer]
                layer.land(landing, split)
                touched[id(layer)] = layer
        self._at_work = self._background.submit(self._take_in, list(touched.values()))

    def _take_in(self, layers: Sequence[_Layer]) -> None:
        """``load``, in the background."""
        at_work = [self._side_by_side.submit(layer.take_in) for layer in layers if not layer.is_packed_by_onednn]
        try:
            for layer in layers:
                if layer.is_packed_by_onednn:
                    layer.take_in()
        finally:
            wait(at_work)
        for future in at_work:
            future.result()

    def _wait(self) -> None:
        at_work, self._at_work = self._at_work, None
        if at_work:
            at_work.result()

    def unfilled(self) -> list[str]:
        """Layers of which something has not arrived, when all else is in its place.

        What fails fails here: vLLM can leave an update before its end, but never starts another after a failed end.
        """
        self._wait()
        return [self._names[layer.module] for layer in self._layers.values() if not layer.complete]

    def finish(self) -> None:
        """Wait until all is in its place; then as vLLM's reload does at the end."""
        self._wait()
        for module in self._attention:
            module.process_weights_after_loading(self._model_config.dtype)

    def give_up(self) -> None:
        """Free what was put together."""
        if self._at_work:
            wait([self._at_work])  # however it ends
            self._at_work = None
        for layer in self._layers.values():
            layer.give_up()


def pack(layer: torch.nn.Module, weight: torch.Tensor) -> None:
    """Have vLLM pack ``weight`` for ``layer``, which keeps its own (empty) parameter."""
    held = layer.weight
    try:
        layer.register_parameter("weight", torch.nn.Parameter(weight, requires_grad=False))
        layer.quant_method.process_weights_after_loading(layer)
    finally:
        layer.register_parameter("weight", held)


def _packing_thread() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(1, initializer=_compute_with, initargs=(torch.get_num_threads(),))


def _compute_with(num_threads: int) -> None:
    """Have torch use as many in what this thread computes, whatever is set in others."""
    torch.get_num_threads()  # the first time, a thread takes over the number that any thread was given last
    torch._C.set_num_threads(num_threads)  # vLLM replaces torch's own by a warning, for the sake of its own thread


def _pieces(split: SplitTensor, landing: Landing) -> Iterator[tuple[torch.Tensor, Region]]:
    """What of a tensor lands, and where."""
    source, target = landing.source, landing.target
    if source.sizes == target.sizes == split.shape and source.is_contiguous:  # all of it: it need not be put together
        for part, start in zip(split.parts, split.starts(), strict=True):
            length = split.part_shape(part)[split.axis]
            yield part, target if len(split.parts) == 1 else target.narrow(split.axis, start, length)
    else:
        yield source.within(split.join().contiguous()), target


def _copy(piece: torch.Tensor, region: Region, whole: torch.Tensor) -> None:
    """Into that part of ``whole``; see ``SplitTensor`` for the shape of ``piece``."""
    target = region.within(whole)
    (target if target.ndim == piece.ndim else target.view(piece.shape)).copy_(piece)


def _like(layout: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(layout.size(), layout.stride(), dtype=layout.dtype, device="cpu")
