"""HF safetensors -> this rank's Megatron parameters, and back: as a stream for the engine and as a folder."""

from __future__ import annotations

import collections
import itertools
import json
import math
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.transformer.enums import LayerType
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from trace_megatron.errors import UserError
from trace_megatron.policy.hf_config import HFModelConfig
from trace_megatron.policy.names import Weight, expert_owner, from_shards, model_weights, named_parameters, to_shard
from trace_megatron.types import TensorInfo

SHARD_BYTES = 5 * 10**9
"""Largest file of an export, as HF's own were for years."""

_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_COPIED = (
    "generation_config.json",
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab*",
    "merges.txt",
    "chat_template*",
)
_FLOATS = ("F32", "BF16", "F16")


@torch.no_grad()
def load_hf_weights(model_chunks: Sequence[torch.nn.Module], folder: str | Path, hf: HFModelConfig) -> None:
    """Fill this rank's parameters from the safetensors of ``folder``, one parameter at a time.

    Raises UserError that names the file or tensor that is missing, left over, or of another shape.
    """
    weights = model_weights(hf)
    parameters = named_parameters(model_chunks)
    with ExitStack() as stack:
        readers = _open_folder(Path(folder), stack)
        _check_tensors(readers, weights, folder)
        for weight in weights:
            parameter = _take(parameters, weight)
            if parameter is not None:
                tensors = [readers[name].get_tensor(name) for name in weight.hf]
                group = _tensor_group(weight)
                shard = to_shard(weight, tensors, hf, group.rank(), group.size())
                assert shard.shape == parameter.shape, f"{weight.megatron[0]}: {shard.shape}, {parameter.shape}"
                parameter.copy_(shard)
    assert not parameters, f"no HF tensor fills {', '.join(parameters)}"


def hf_tensor_infos(hf: HFModelConfig, dtype: torch.dtype) -> list[TensorInfo]:
    """Name, shape and dtype of every tensor of ``iter_hf_weights`` for a policy of this dtype, in its order."""
    return [TensorInfo(name, shape, dtype) for weight in _exported(hf) for name, shape in weight.hf.items()]


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
    stages = _layer_stages(model_chunks)
    for weight in _exported(hf):
        tensors = _collect(weight, _take(parameters, weight), hf, like, _stage(weight, stages))
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
        _copy_companions(source, partial, dtype)
        _save_sharded(stream, hf_tensor_infos(hf, dtype), partial)
        partial.chmod(0o755)  # mkdtemp makes it private
        os.rename(partial, target)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
        collections.deque(stream, maxlen=0)  # after a failure the other ranks still wait to send


def _exported(hf: HFModelConfig) -> list[Weight]:
    return [weight for weight in model_weights(hf) if not weight.is_copy]


def _take(parameters: dict[str, torch.nn.Parameter], weight: Weight) -> torch.nn.Parameter | None:
    """Remove and return the weight's parameter; None where another pipeline stage holds it."""
    found = [parameters.pop(name) for name in weight.megatron if name in parameters]
    return found[0] if found else None


def _open_folder(folder: Path, stack: ExitStack) -> dict[str, safe_open]:
    """The open file of every tensor in the folder, by tensor name."""
    weight_map = {}
    if (folder / _INDEX).is_file():
        weight_map = _read_weight_map(folder / _INDEX)
        files = sorted(set(weight_map.values()))
    elif (folder / _SINGLE).is_file():
        files = [_SINGLE]
    else:
        raise UserError(
            f"expected {_SINGLE} or {_INDEX} in '{folder}', found neither: save the model with safe serialization"
        )
    readers = {}
    for file in files:
        try:
            reader = stack.enter_context(safe_open(folder / file, framework="pt"))
        except (OSError, SafetensorError) as error:
            raise UserError(f"expected safetensors in '{folder / file}', found: {error}: download it again") from error
        readers.update(dict.fromkeys(reader.keys(), reader))
    for name in weight_map:
        if name not in readers:
            raise UserError(f"expected tensor '{name}' in '{folder / weight_map[name]}', found none: download it again")
    return readers


def _read_weight_map(path: Path) -> dict[str, str]:
    """File name by tensor name."""
    try:
        weight_map = json.loads(path.read_text())["weight_map"]
        return {str(name): str(file) for name, file in weight_map.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"expected a mapping 'weight_map' in '{path}', found none: download it again") from error


def _check_tensors(readers: Mapping[str, safe_open], weights: Sequence[Weight], folder: str | Path) -> None:
    """Every tensor used once, each of its shape. Only file headers are read."""
    expected = {name: shape for weight in weights for name, shape in weight.hf.items()}
    for name, shape in expected.items():
        if name not in readers:
            raise UserError(f"expected tensor '{name}' in '{folder}', found none: config.json is of another model")
        found = readers[name].get_slice(name)
        if tuple(found.get_shape()) != shape:
            raise UserError(
                f"expected shape {shape} of tensor '{name}' in '{folder}', found {tuple(found.get_shape())}: "
                "config.json is of another model"
            )
        if found.get_dtype() not in _FLOATS:
            raise UserError(
                f"expected tensor '{name}' in '{folder}' as {', '.join(_FLOATS)}, found {found.get_dtype()}"
            )
    for name in readers:
        # old Llama checkpoints store RoPE's frequencies, and some tied ones a copy of the embedding
        redundant = name.endswith("rotary_emb.inv_freq") or (name == "lm_head.weight" and weights[-1].is_copy)
        if name not in expected and not redundant:
            raise UserError(f"expected no tensor '{name}' in '{folder}': config.json is of another model")


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
    if _tensor_group(weight).rank() != 0:
        return None
    if experts and parallel_state.get_pipeline_model_parallel_rank() == stage:
        group = parallel_state.get_expert_model_parallel_group()
        tensors = _to_first(tensors, expert_owner(hf, weight.expert, group.size()), group, weight, like)
    if experts and parallel_state.get_expert_model_parallel_rank() != 0:
        return None
    return _to_first(tensors, stage, parallel_state.get_pipeline_model_parallel_group(), weight, like)


def _tensor_group(weight: Weight) -> dist.ProcessGroup:
    """The ranks that share the weight."""
    if weight.expert is not None:
        return parallel_state.get_expert_tensor_parallel_group()
    return parallel_state.get_tensor_model_parallel_group()


def _gather(weight: Weight, parameter: torch.Tensor, hf: HFModelConfig) -> list[torch.Tensor] | None:
    """The weight's HF tensors on the first rank of its tensor-parallel group; None on the others."""
    group = _tensor_group(weight)
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


def _layer_stages(model_chunks: Sequence[torch.nn.Module]) -> list[int]:
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


def _stage(weight: Weight, layer_stages: Sequence[int]) -> int:
    """The pipeline stage that holds the weight."""
    if weight.layer is not None:
        return layer_stages[weight.layer]
    return 0 if weight.megatron[0].startswith("embedding.") else layer_stages[-1]


def _copy_companions(source: Path, target: Path, dtype: torch.dtype) -> None:
    """Tokenizer, chat template and generation config as they are, config.json with the dtype of the new weights."""
    for pattern in _COPIED:
        for path in source.glob(pattern):
            shutil.copy(path, target / path.name)
    values = json.loads((source / "config.json").read_text())
    values.pop("torch_dtype", None)
    values["dtype"] = str(dtype).removeprefix("torch.")
    (target / "config.json").write_text(json.dumps(values, indent=2) + "\n")


def _save_sharded(stream: Iterable[tuple[str, torch.Tensor]], infos: Sequence[TensorInfo], folder: Path) -> None:
    """Write the stream as safetensors files of at most SHARD_BYTES, with an index where it takes several."""
    shards: list[list[str]] = [[]]
    room = SHARD_BYTES
    for info in infos:
        size = info.dtype.itemsize * math.prod(info.shape)
        if shards[-1] and size > room:
            shards.append([])
            room = SHARD_BYTES
        shards[-1].append(info.name)
        room -= size
    files = [f"model-{index:05}-of-{len(shards):05}.safetensors" for index in range(1, len(shards) + 1)]
    if len(shards) == 1:
        files = [_SINGLE]
    stream = iter(stream)
    for file, names in zip(files, shards, strict=True):
        tensors = {name: tensor.cpu().clone() for name, tensor in itertools.islice(stream, len(names))}
        assert list(tensors) == names
        save_file(tensors, folder / file, metadata={"format": "pt"})
    collections.deque(stream, maxlen=0)
    if len(shards) > 1:
        weight_map = {name: file for file, names in zip(files, shards, strict=True) for name in names}
        total = sum(info.dtype.itemsize * math.prod(info.shape) for info in infos)
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (folder / _INDEX).write_text(json.dumps(index, indent=2) + "\n")
