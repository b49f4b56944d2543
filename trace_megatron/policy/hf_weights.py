"""HF safetensors -> this rank's Megatron parameters, and back: as a stream for the engine and as a folder."""

from __future__ import annotations

import collections
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.transformer.enums import LayerType

from trace_megatron.errors import UserError
from trace_megatron.policy.dist_files import MegatronFolder
from trace_megatron.policy.dist_index import is_megatron_folder
from trace_megatron.policy.hf_config import HFModelConfig
from trace_megatron.policy.hf_files import HFFolder, HFWriter, copy_companions
from trace_megatron.policy.names import (
    Weight,
    expert_owner,
    exported_weights,
    from_shards,
    model_weights,
    named_parameters,
    to_shard,
)
from trace_megatron.types import TensorInfo


@torch.no_grad()
def load_hf_weights(model_chunks: Sequence[torch.nn.Module], folder: str | Path, hf: HFModelConfig) -> None:
    """Fill this rank's parameters from an HF folder, or a distributed checkpoint of Megatron's, one at a time.

    Raises UserError that names the file or tensor that is missing, left over, or of another shape.
    """
    weights = model_weights(hf)
    parameters = named_parameters(model_chunks)
    source = MegatronFolder(folder, weights, hf) if is_megatron_folder(folder) else HFFolder(folder, weights)
    for weight in weights:
        parameter = take_parameter(parameters, weight)
        if parameter is not None:
            group = tensor_group(weight)
            shard = to_shard(weight, source.read(weight), hf, group.rank(), group.size())
            assert shard.shape == parameter.shape, f"{weight.megatron[0]}: {shard.shape}, {parameter.shape}"
            parameter.copy_(shard)
    assert not parameters, f"no HF tensor fills {', '.join(parameters)}"


def hf_tensor_infos(hf: HFModelConfig, dtype: torch.dtype) -> list[TensorInfo]:
    """Name, shape and dtype of every tensor of ``iter_hf_weights`` for a policy of this dtype, in its order."""
    return [TensorInfo(name, shape, dtype) for weight in exported_weights(hf) for name, shape in weight.hf.items()]


@torch.no_grad()
def iter_hf_weights(
    model_chunks: Sequence[torch.nn.Module], hf: HFModelConfig
) -> Iterator[tuple[str, torch.Tensor | None]]:
    """Collective over all ranks: each HF tensor by name, whole on global rank 0, None on every other rank.

    All ranks must run it to its end. One parameter is gathered at a time, from one rank of each replica that holds it.
    Tensors may share memory with the model: copy what outlives the next change of the weights.
    """
    parameters = named_parameters(model_chunks)
    like = next(iter(parameters.values()))
    stages = layer_stages(model_chunks)
    for weight in exported_weights(hf):
        tensors = _collect(weight, take_parameter(parameters, weight), hf, like, stage_of(weight, stages))
        yield from zip(weight.hf, tensors or [None] * len(weight.hf), strict=True)


def export_hf(
    model_chunks: Sequence[torch.nn.Module], hf: HFModelConfig, source_folder: str | Path, target_folder: str | Path
) -> None:
    """Collective over all ranks: write an HF folder, with config and tokenizer copied from the source.

    The folder appears at once, complete. Raises UserError on every rank if it exists already.
    """
    source, target = Path(source_folder), Path(target_folder)
    is_writer = dist.get_rank() == 0
    refused = torch.tensor(int(is_writer and target.exists()))
    dist.broadcast(refused, src=0)
    if refused:
        raise UserError(f"expected no folder at '{target}', found one: remove it or choose another name")
    stream = iter_hf_weights(model_chunks, hf)
    if not is_writer:
        collections.deque(stream, maxlen=0)
        return
    dtype = next(model_chunks[0].parameters()).dtype
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        copy_companions(source, partial, dtype)
        writer = HFWriter(partial, hf_tensor_infos(hf, dtype))
        for name, tensor in stream:
            writer.write(name, tensor)
        writer.close()
        partial.chmod(0o755)  # mkdtemp makes it private
        os.rename(partial, target)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
        collections.deque(stream, maxlen=0)  # after a failure the other ranks still wait to send


def take_parameter(parameters: dict[str, torch.nn.Parameter], weight: Weight) -> torch.nn.Parameter | None:
    """Remove and return the weight's parameter; None where another pipeline stage holds it."""
    found = [parameters.pop(name) for name in weight.megatron if name in parameters]
    return found[0] if found else None


def _collect(
    weight: Weight, parameter: torch.Tensor | None, hf: HFModelConfig, like: torch.Tensor, stage: int
) -> list[torch.Tensor] | None:
    """The weight's HF tensors on global rank 0, else None: gathered over the tensor-parallel ranks, then sent to the
    first expert-parallel rank (an expert's), then from pipeline stage ``stage`` to the first.

    ``like`` has the dtype and device of all parameters.
    """
    experts = weight.expert is not None
    if experts:
        replica = parallel_state.get_expert_data_parallel_rank()
    else:
        replica = parallel_state.get_data_parallel_rank(with_context_parallel=True)
    if replica != 0:
        return None
    tensors = _gather(weight, parameter, hf) if parameter is not None else None
    if tensor_group(weight).rank() != 0:
        return None
    if experts and parallel_state.get_pipeline_model_parallel_rank() == stage:
        group = parallel_state.get_expert_model_parallel_group()
        tensors = _to_first(tensors, expert_owner(hf, weight.expert, group.size()), group, weight, like)
    if experts and parallel_state.get_expert_model_parallel_rank() != 0:
        return None
    return _to_first(tensors, stage, parallel_state.get_pipeline_model_parallel_group(), weight, like)


def tensor_group(weight: Weight) -> dist.ProcessGroup:
    """The ranks that share the weight."""
    if weight.expert is not None:
        return parallel_state.get_expert_tensor_parallel_group()
    return parallel_state.get_tensor_model_parallel_group()


def _gather(weight: Weight, parameter: torch.Tensor, hf: HFModelConfig) -> list[torch.Tensor] | None:
    """The weight's HF tensors on the first rank of its tensor-parallel group; None on the others."""
    group = tensor_group(weight)
    shards = [parameter.detach()]
    if group.size() > 1 and weight.layout.split_axis is not None:
        shards = [torch.empty_like(parameter) for _ in range(group.size())] if group.rank() == 0 else None
        dist.gather(parameter.detach(), shards, group=group, group_dst=0)
    return from_shards(weight, shards, hf) if group.rank() == 0 else None


def _to_first(
    tensors: list[torch.Tensor] | None, owner: int, group: dist.ProcessGroup, weight: Weight, like: torch.Tensor
) -> list[torch.Tensor] | None:
    """The owner's tensors on the group's first rank; None on the others."""
    if group.rank() == 0 and owner != 0:
        tensors = [like.new_empty(shape) for shape in weight.hf.values()]
        for tensor in tensors:
            dist.recv(tensor, group=group, group_src=owner)
    elif group.rank() == owner != 0:
        for tensor in tensors:
            dist.send(tensor.contiguous(), group=group, group_dst=0)
    return tensors if group.rank() == 0 else None


def layer_stages(model_chunks: Sequence[torch.nn.Module]) -> list[int]:
    """The pipeline stage of every layer of the model."""
    config = model_chunks[0].config
    if config.pipeline_model_parallel_layout is None:
        return [0] * config.num_layers
    chunks = config.pipeline_model_parallel_layout.layout  # [stage][chunk of the stage]: what stands in it
    return [
        stage
        for virtual in range(len(chunks[0]))
        for stage, of_stage in enumerate(chunks)
        for kind in of_stage[virtual]
        if kind is LayerType.decoder
    ]


def stage_of(weight: Weight, layer_stages: Sequence[int]) -> int:
    """The pipeline stage that holds the weight."""
    if weight.layer is not None:
        return layer_stages[weight.layer]
    return 0 if weight.megatron[0].startswith("embedding.") else layer_stages[-1]
