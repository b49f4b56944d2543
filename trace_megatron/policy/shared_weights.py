"""The weights of all ranks, read by rank 0 where they are: in memory that the processes of one machine share.

Only without GPUs, where every rank's parameters are in such memory (``memfd.share``). Ranks on several machines, and
replicas that shard their optimizer, of which Megatron moves the parameters elsewhere, gather instead
(``hf_weights.iter_hf_weights``).
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from trace_megatron.memfd import Memory, Place, map_parameter, place_of
from trace_megatron.policy.hf_config import HFModelConfig
from trace_megatron.policy.names import exported_weights, named_parameters, split_tensors
from trace_megatron.split_tensor import SplitTensor


class SharedWeights:
    """On rank 0: each HF tensor by name, in the order of ``hf_tensor_infos``, as views of one replica's parameters.

    Every iteration is of what they hold then, and until a rank changes them.
    """

    def __init__(self, hf: HFModelConfig, shards: dict[str, list[torch.Tensor]]):
        """``shards``: by Megatron's name, in the order of the tensor-parallel ranks."""
        self._hf, self._shards = hf, shards

    def __iter__(self) -> Iterator[tuple[str, SplitTensor]]:
        for weight in exported_weights(self._hf):
            (shards,) = (self._shards[name] for name in weight.megatron if name in self._shards)
            if weight.layout.split_axis is None:
                shards = shards[:1]
            yield from zip(weight.hf, split_tensors(weight, shards, self._hf), strict=True)


def connect(
    model_chunks: Sequence[torch.nn.Module], places: list[tuple] | None, hf: HFModelConfig, group: dist.ProcessGroup
) -> SharedWeights | None:
    """Collective over ``group``, all ranks; None on all but rank 0, and where it cannot read all weights in place.

    ``places``: this rank's, as ``find_places`` knows them.
    """
    descriptions = _gather({"host": _host(), "places": places}, group)
    here = descriptions[0]["host"]
    if dist.get_rank(group) != 0 or any(one["host"] != here or one["places"] is None for one in descriptions):
        return None
    try:
        return SharedWeights(hf, _shards(descriptions, model_chunks))
    except OSError:  # a system that hides the files of its processes from each other
        return None


def find_places(model_chunks: Sequence[torch.nn.Module]) -> list[tuple] | None:
    """Where this rank's parameters are, JSON values, of those that rank 0 reads; None: not all are shared."""
    found = []
    for name, parameter in named_parameters(model_chunks).items():
        experts = not getattr(parameter, "allreduce", True)  # Megatron's mark
        if experts:
            replica, rank = parallel_state.get_expert_data_parallel_rank(), 0
        else:
            replica = parallel_state.get_data_parallel_rank(with_context_parallel=True)
            rank = parallel_state.get_tensor_model_parallel_rank()
        if replica != 0:
            continue
        place = place_of(parameter)
        if place is None:
            return None
        dtype = str(parameter.dtype).removeprefix("torch.")
        found.append((name, rank, place.memory, place.offset, dtype, list(parameter.shape)))
    return found


def _host() -> list[str]:
    """What processes that can open each other's files in /proc have in common."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return [boot, os.readlink("/proc/self/ns/pid"), str(os.getuid())]


def _shards(
    descriptions: Sequence[dict[str, Any]], model_chunks: Sequence[torch.nn.Module]
) -> dict[str, list[torch.Tensor]]:
    """Rank 0's own, and those of the others mapped."""
    mine = named_parameters(model_chunks)
    found: dict[str, dict[int, torch.Tensor]] = {}
    for index, description in enumerate(descriptions):
        for name, rank, memory, offset, dtype, shape in description["places"]:
            if index == 0:
                tensor = mine[name].detach()
            else:
                tensor = map_parameter(Place(Memory(*memory), offset), getattr(torch, dtype), shape)
            found.setdefault(name, {})[rank] = tensor
    return {name: [shards[rank] for rank in sorted(shards)] for name, shards in found.items()}


def _gather(description: dict[str, Any], group: dist.ProcessGroup) -> list[dict[str, Any]]:
    """Every rank's, on all."""
    text = torch.frombuffer(bytearray(json.dumps(description).encode()), dtype=torch.uint8)
    lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(dist.get_world_size(group))]
    dist.all_gather(lengths, torch.tensor([text.numel()]), group=group)
    padded = torch.zeros(int(max(lengths)), dtype=torch.uint8)
    padded[: text.numel()] = text
    texts = [torch.empty_like(padded) for _ in lengths]
    dist.all_gather(texts, padded, group=group)
    return [json.loads(row[: int(length)].numpy().tobytes()) for row, length in zip(texts, lengths, strict=True)]
