"""The engine's side of a weight sync, in each of its workers."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from itertools import chain

import numpy as np
import torch
from vllm.distributed import get_tensor_model_parallel_rank
from vllm.distributed.weight_transfer.base import WeightTransferEngine
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

from trace_megatron.memfd import Memory, map_bytes
from trace_megatron.memory import keep_freed_memory
from trace_megatron.weight_sync.bucket_server import SCHEME, fetch
from trace_megatron.weight_sync.direct_loading import DirectLoading
from trace_megatron.weight_sync.layerwise_loading import LayerwiseLoading
from trace_megatron.weight_sync.sender import BucketInfo, SharedMemoryInitInfo
from trace_megatron.weight_sync.shared_memory import Entry, MappedBucket, Part, checksum, group_parts, read_parts

_BATCH_BYTES = 2**26
"""Of tensors that vLLM's loader gets together."""


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
        self._memories: dict[str, np.ndarray] = {}

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
        in_place = [(Memory(*memory), [Entry(*entry) for entry in entries]) for memory, entries in update_info.in_place]
        entries = [Entry(*entry) for entry in update_info.entries]
        names = {entry.name for entry in chain(entries, *(found for _, found in in_place))}
        if twice := sorted(self._received & names):
            raise ValueError(f"tensors arrived twice: {', '.join(twice)}")
        self._received |= names
        memory = Memory(*update_info.memory)
        if memory.path.startswith(SCHEME):
            self._load(fetch(memory.path, entries))
        else:
            self._load_mapped(memory, entries, in_place, update_info.first_reader + self._rank)
        if update_info.expected:
            self._check_complete(set(update_info.expected))

    def _load_mapped(
        self, memory: Memory, entries: list[Entry], in_place: list[tuple[Memory, list[Entry]]], reader: int
    ) -> None:
        self._reader = reader
        if memory.key not in self._buckets:
            self._buckets[memory.key] = MappedBucket(memory)
        bucket = self._buckets[memory.key]
        self._used.add(memory.key)
        parts = [bucket.read(entries)]
        for other, found in in_place:
            if other.key not in self._memories:
                self._memories[other.key] = _map(other)
            self._used.add(other.key)
            parts.append(read_parts(self._memories[other.key], found))
        self._load(chain(*parts), {entry.name for _, found in in_place for entry in found})
        # This bucket's tensors may still be at work while the next one is on its way, or longer: vLLM's loader keeps
        # those of a layer of which a part is missing, or that is padded, until the update is finished.
        self._held = [held for held in (*self._held, bucket) if not held.try_return(self._reader)]

    def _load(self, parts: Iterator[Part], in_place: Collection[str] = ()) -> None:
        tensors = group_parts(_checked(parts))
        if isinstance(self._loading, DirectLoading):
            self._loading.load(tensors.items())
            return
        # The trainer changes what is read in place after the update, and vLLM's loader may keep what it gets.
        joined = ((name, split.join()) for name, split in tensors.items())
        for batch in _batches((name, _copy(tensor) if name in in_place else tensor) for name, tensor in joined):
            self._loading.load(batch)

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
        for known in (self._buckets, self._memories):
            for key in set(known) - self._used:  # the sender has others now
                del known[key]
        for bucket in self._held:
            bucket.try_return(self._reader)

    def shutdown(self) -> None:
        self._buckets, self._memories = {}, {}


def _map(memory: Memory) -> np.ndarray:
    try:
        return map_bytes(memory, populate=True)
    except OSError as error:
        raise ValueError(
            f"expected to read weights in the memory of a trainer's rank, '{memory.path}', found: {error.strerror}: "
            "has the rank ended, or is it another user's?"
        ) from error


def _checked(parts: Iterable[Part]) -> Iterator[Part]:
    for part in parts:
        if part.entry.checksum is not None and checksum(part.tensor) != part.entry.checksum:
            raise ValueError(f"tensor '{part.entry.name}' arrived with another checksum than the trainer's")
        yield part


def _batches(tensors: Iterable[tuple[str, torch.Tensor]]) -> Iterator[list[tuple[str, torch.Tensor]]]:
    """So many at a time that copies of the whole model are never held together."""
    batch, num_bytes = [], 0
    for name, tensor in tensors:
        batch.append((name, tensor))
        num_bytes += tensor.nbytes
        if num_bytes >= _BATCH_BYTES:
            yield batch
            batch, num_bytes = [], 0
    if batch:
        yield batch


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.clone(memory_format=torch.contiguous_format)


def refresh_heads(model: torch.nn.Module) -> None:
    """Pack output heads again: on a CPU, a head tied to the embedding keeps the packed copy of its old weights.

    No tensor is loaded into a tied head, so that vLLM's reload does not process it. Harmless for an untied one.
    """
    for module in model.modules():
        if isinstance(module, ParallelLMHead):
            module.quant_method.process_weights_after_loading(module)
