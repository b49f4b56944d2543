"""The weights as vLLM's transfer backends ask for them on GPUs: whole on every rank, or what each rank holds.

``hf_weights.iter_hf_weights`` is the third way, whole on rank 0 alone. All three read the same table of names.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from trace_megatron.policy.hf_config import HFModelConfig
from trace_megatron.policy.hf_weights import (
    layer_stages,
    stage_of,
    take_parameter,
    tensor_group,
)
from trace_megatron.policy.names import Weight, expert_owner, exported_weights, from_shards, named_parameters


@torch.no_grad()
def iter_full_weights(model_chunks: Sequence[torch.nn.Module], hf: HFModelConfig) -> Iterator[tuple[str, torch.Tensor]]:
    """Collective over all ranks: each HF tensor by name, whole on every rank.

    All ranks must run it to its end. Each replica gathers its own. Tensors may share memory with the model.
    """
    parameters = named_parameters(model_chunks)
    like = next(iter(parameters.values()))
    stages = layer_stages(model_chunks)
    pipeline = parallel_state.get_pipeline_model_parallel_group()
    for weight in exported_weights(hf):
        parameter, stage = take_parameter(parameters, weight), stage_of(weight, stages)
        tensors = _gather(weight, parameter, hf) if parameter is not None else None
        if weight.expert is not None and pipeline.rank() == stage:
            group = parallel_state.get_expert_model_parallel_group()
            tensors = _broadcast(tensors, expert_owner(hf, weight.expert, group.size()), group, weight, like)
        yield from zip(weight.hf, _broadcast(tensors, stage, pipeline, weight, like), strict=True)


def held_names(model_chunks: Sequence[torch.nn.Module], hf: HFModelConfig) -> set[str]:
    """The HF tensors that this rank's pipeline stage and expert-parallel rank hold; every replica holds its own."""
    parameters = named_parameters(model_chunks)
    return {
        name for weight in exported_weights(hf) if take_parameter(parameters, weight) is not None for name in weight.hf
    }


@torch.no_grad()
def iter_held_weights(
    model_chunks: Sequence[torch.nn.Module], hf: HFModelConfig
) -> Iterator[tuple[str, torch.Tensor | None]]:
    """Collective over a tensor-parallel group: each HF tensor by name, whole where ``held_names`` has it, else None."""
    parameters = named_parameters(model_chunks)
    for weight in exported_weights(hf):
        parameter = take_parameter(parameters, weight)
        tensors = _gather(weight, parameter, hf) if parameter is not None else [None] * len(weight.hf)
        yield from zip(weight.hf, tensors, strict=True)


def _gather(weight: Weight, parameter: torch.Tensor, hf: HFModelConfig) -> list[torch.Tensor]:
    """The weight's HF tensors on every rank of its tensor-parallel group."""
    group = tensor_group(weight)
    shards = [parameter.detach()]
    if group.size() > 1 and weight.layout.split_axis is not None:
        shards = [torch.empty_like(parameter) for _ in range(group.size())]
        dist.all_gather(shards, parameter.detach(), group=group)
    return from_shards(weight, shards, hf)


def _broadcast(
    tensors: list[torch.Tensor] | None, owner: int, group: dist.ProcessGroup, weight: Weight, like: torch.Tensor
) -> list[torch.Tensor]:
    if group.size() == 1:
        return tensors
    if tensors is None:
        tensors = [like.new_empty(shape) for shape in weight.hf.values()]
    else:
        tensors = [tensor.contiguous() for tensor in tensors]
    for tensor in tensors:
        dist.broadcast(tensor, group=group, group_src=owner)
    return tensors
