"""HF tensors <-> Megatron parameters: one table, read in both directions.

Legend: H hidden, G key-value heads, R query heads per key-value head, D head dim, F feed-forward size (an expert's own
in a mixture), V vocabulary.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import accumulate, pairwise

import torch

from trace_megatron.policy.hf_config import HFModelConfig
from trace_megatron.split_tensor import SplitTensor

_EMBEDDING = "embedding.word_embeddings.weight"
_LAYERS, _EXPERTS = "decoder.layers.", "mlp.experts.local_experts."
_EXPERT_KEYS = "mlp.experts.experts."
"""What Megatron writes for _EXPERTS in a checkpoint."""


class Layout(StrEnum):
    """How a Megatron parameter is made of its HF tensors, and how the ranks of a tensor-parallel group share it."""

    WHOLE = "whole"
    """One tensor, a copy on every rank."""
    COLUMNS = "columns"
    """One tensor, split along axis 1."""
    VOCAB = "vocab"
    """One tensor [V, H], padded with zero rows to a multiple of the ranks and split along axis 0."""
    QKV = "qkv"
    """q [G*R*D, H], k and v [G*D, H] as [G*(R + 2)*D, H], group by group, split along axis 0; biases, without H, as
    well. Where the ranks outnumber the groups the split cuts through groups; Megatron gathers their activations."""
    GATE_UP = "gate_up"
    """gate and up [F, H]; every rank holds its rows of gate, then its rows of up."""

    @property
    def split_axis(self) -> int | None:
        """None: every rank holds the whole."""
        return {Layout.WHOLE: None, Layout.COLUMNS: 1}.get(self, 0)


@dataclass(frozen=True, slots=True)
class Weight:
    """One Megatron parameter and the HF tensors that it is made of."""

    megatron: tuple[str, ...]
    """Its name in Megatron's own layers and, where another, in Transformer Engine's, which fuse norm and linear."""
    hf: dict[str, tuple[int, ...]]
    """HF names with their shapes, in the order that ``layout`` fuses them."""
    layout: Layout
    layer: int | None = None
    """Index in the whole model; None outside the layers."""
    expert: int | None = None
    """Index in the whole layer; None outside experts. ``expert_owner`` holds it alone, and its shards are those of
    the expert-tensor-parallel group."""
    is_copy: bool = False
    """The last pipeline stage's copy of a tied embedding: loaded, never exported."""


@dataclass(frozen=True, slots=True)
class ParallelSizes:
    """Sizes of a parallel layout; an expert is whole on one rank."""

    tensor: int = 1
    pipeline: int = 1
    expert: int = 1

    @property
    def per_stage(self) -> int:
        """Ranks of a pipeline stage: each holds its share of the dense parameters, and experts if it is among the first
        ``expert`` ones."""
        return max(self.tensor, self.expert)


def model_weights(hf: HFModelConfig) -> list[Weight]:
    """All parameters of the model, in the order of the HF model's layers."""
    table = (hf.vocab_size, hf.hidden_size)
    embedding = Weight((_EMBEDDING,), {"model.embed_tokens.weight": table}, Layout.VOCAB)
    norm = Weight(("decoder.final_layernorm.weight",), {"model.norm.weight": (hf.hidden_size,)}, Layout.WHOLE)
    head = Weight(("output_layer.weight",), {"lm_head.weight": table}, Layout.VOCAB)
    if hf.tied:
        head = replace(head, hf=embedding.hf, is_copy=True)
    layers = [_number(weight, layer) for layer in range(hf.num_layers) for weight in _layer_weights(hf)]
    return [embedding, *layers, norm, head]


def exported_weights(hf: HFModelConfig) -> list[Weight]:
    """All but copies: every HF tensor once."""
    return [weight for weight in model_weights(hf) if not weight.is_copy]


def _layer_weights(hf: HFModelConfig) -> list[Weight]:
    hidden, head_dim = hf.hidden_size, hf.head_dim
    queries, keys = hf.num_heads * head_dim, hf.num_kv_heads * head_dim
    qkv = {
        "self_attn.q_proj.weight": (queries, hidden),
        "self_attn.k_proj.weight": (keys, hidden),
        "self_attn.v_proj.weight": (keys, hidden),
    }
    qkv_bias = {
        "self_attn.q_proj.bias": (queries,),
        "self_attn.k_proj.bias": (keys,),
        "self_attn.v_proj.bias": (keys,),
    }
    qk_norm = [
        Weight(("self_attention.q_layernorm.weight",), {"self_attn.q_norm.weight": (head_dim,)}, Layout.WHOLE),
        Weight(("self_attention.k_layernorm.weight",), {"self_attn.k_norm.weight": (head_dim,)}, Layout.WHOLE),
    ]
    return [
        Weight(("self_attention.linear_qkv.weight",), qkv, Layout.QKV),
        *([Weight(("self_attention.linear_qkv.bias",), qkv_bias, Layout.QKV)] if hf.qkv_bias else []),
        Weight(("self_attention.linear_proj.weight",), {"self_attn.o_proj.weight": (hidden, queries)}, Layout.COLUMNS),
        *(qk_norm if hf.qk_norm else []),
        *(_expert_weights(hf) if hf.num_experts else _mlp_weights("mlp", "mlp", hidden, hf.ffn_size)),
        Weight(
            ("input_layernorm.weight", "self_attention.linear_qkv.layer_norm_weight"),
            {"input_layernorm.weight": (hidden,)},
            Layout.WHOLE,
        ),
        Weight(
            ("pre_mlp_layernorm.weight", "mlp.linear_fc1.layer_norm_weight"),
            {"post_attention_layernorm.weight": (hidden,)},
            Layout.WHOLE,
        ),
    ]


def _expert_weights(hf: HFModelConfig) -> list[Weight]:
    router = Weight(("mlp.router.weight",), {"mlp.gate.weight": (hf.num_experts, hf.hidden_size)}, Layout.WHOLE)
    experts = [
        replace(weight, expert=expert)
        for expert in range(hf.num_experts)
        for weight in _mlp_weights(
            f"mlp.experts.local_experts.{expert}", f"mlp.experts.{expert}", hf.hidden_size, hf.expert_ffn_size
        )
    ]
    return [router, *experts]


def _mlp_weights(megatron: str, hf: str, hidden: int, ffn: int) -> list[Weight]:
    gate_up = {f"{hf}.gate_proj.weight": (ffn, hidden), f"{hf}.up_proj.weight": (ffn, hidden)}
    return [
        Weight((f"{megatron}.linear_fc1.weight",), gate_up, Layout.GATE_UP),
        Weight((f"{megatron}.linear_fc2.weight",), {f"{hf}.down_proj.weight": (hidden, ffn)}, Layout.COLUMNS),
    ]


def _number(weight: Weight, layer: int) -> Weight:
    return replace(
        weight,
        megatron=tuple(f"decoder.layers.{layer}.{name}" for name in weight.megatron),
        hf={f"model.layers.{layer}.{name}": shape for name, shape in weight.hf.items()},
        layer=layer,
    )


def to_shard(weight: Weight, tensors: list[torch.Tensor], hf: HFModelConfig, rank: int, size: int) -> torch.Tensor:
    """What rank ``rank`` of ``size`` tensor-parallel ranks holds, from the HF tensors ``weight.hf``."""
    match weight.layout:
        case Layout.WHOLE:
            return tensors[0]
        case Layout.COLUMNS:
            return tensors[0].chunk(size, dim=1)[rank]
        case Layout.VOCAB:
            padding = -tensors[0].shape[0] % size
            return torch.nn.functional.pad(tensors[0], (0, 0, 0, padding)).chunk(size)[rank]
        case Layout.QKV:
            grouped = [tensor.view(hf.num_kv_heads, -1, *tensor.shape[1:]) for tensor in tensors]
            return torch.cat(grouped, dim=1).flatten(0, 1).chunk(size)[rank]
        case Layout.GATE_UP:
            return torch.cat([tensor.chunk(size)[rank] for tensor in tensors])


def from_shards(weight: Weight, shards: Sequence[torch.Tensor], hf: HFModelConfig) -> list[torch.Tensor]:
    """The HF tensors ``weight.hf``, from what the tensor-parallel ranks hold, in the ranks' order; views of a single
    rank's shard where they can be."""
    return [split.join() for split in split_tensors(weight, shards, hf)]


def split_tensors(weight: Weight, shards: Sequence[torch.Tensor], hf: HFModelConfig) -> list[SplitTensor]:
    """The same as parts that are views of the shards.

    Queries, keys and values are [groups, rows of a group, ...] there. Where the split cuts through groups, they are
    views of the joined shards.
    """
    axis = weight.layout.split_axis or 0
    match weight.layout:
        case Layout.WHOLE:
            split = [shards[:1]]
        case Layout.COLUMNS:
            split = [shards]
        case Layout.VOCAB:
            firsts = accumulate((shard.shape[0] for shard in shards), initial=0)
            cut = [shard[: max(hf.vocab_size - first, 0)] for shard, first in zip(shards, firsts, strict=False)]
            split = [[part for part in cut if part.numel()]]
        case Layout.QKV:
            if hf.num_kv_heads % len(shards):
                shards = [torch.cat(tuple(shards))]
            grouped = [shard.view(hf.num_kv_heads // len(shards), -1, *shard.shape[1:]) for shard in shards]
            rows = [hf.num_heads // hf.num_kv_heads * hf.head_dim, hf.head_dim, hf.head_dim]
            split = zip(*(shard.split(rows, dim=1) for shard in grouped), strict=True)
        case Layout.GATE_UP:
            split = zip(*(shard.chunk(2) for shard in shards), strict=True)
    return [SplitTensor(shape, tuple(parts), axis) for shape, parts in zip(weight.hf.values(), split, strict=True)]


@dataclass(frozen=True, slots=True)
class RowRun:
    """Rows of one HF tensor that follow each other in the whole Megatron parameter too."""

    tensor: int
    """Index among the weight's."""
    first: int
    start: int
    """What is row ``first`` of the HF tensor is row ``start`` of the parameter."""
    count: int


def row_runs(weight: Weight, hf: HFModelConfig) -> list[RowRun]:
    """Which rows of the HF tensors the whole parameter consists of, in its order: ``to_shard`` of row numbers."""
    heights = [shape[0] for shape in weight.hf.values()]
    starts = list(accumulate(heights, initial=0))[:-1]
    numbers = torch.arange(sum(heights)).unsqueeze(1).split(heights)
    order = to_shard(weight, list(numbers), hf, 0, 1).flatten()
    breaks = (order.diff() != 1) | torch.isin(order[1:], torch.tensor(starts))
    edges = [0, *(breaks.nonzero().flatten() + 1).tolist(), len(order)]
    runs = []
    for start, stop in pairwise(edges):
        number = int(order[start])
        tensor = bisect_right(starts, number) - 1
        runs.append(RowRun(tensor, number - starts[tensor], start, stop - start))
    return runs


def checkpoint_keys(weight: Weight) -> list[tuple[str, str]]:
    """What distributed checkpoints call the weight: for each of its names, the key of a tensor over all layers (and
    experts), and the key of its own where the checkpoint was saved without such."""
    keys = []
    for name in (_EMBEDDING,) if weight.is_copy else weight.megatron:
        stacked, single = name, name
        if weight.expert is not None:
            single = single.replace(_EXPERTS, _EXPERT_KEYS)
            stacked = stacked.replace(f"{_EXPERTS}{weight.expert}.", _EXPERT_KEYS)
        if weight.layer is not None:
            stacked = stacked.replace(f"{_LAYERS}{weight.layer}.", _LAYERS)
        keys.append((stacked, single))
    return keys


def expert_owner(hf: HFModelConfig, expert: int, size: int) -> int:
    """The rank, of ``size`` expert-parallel ones, that holds the expert."""
    return expert // (hf.num_experts // size)


def named_parameters(model_chunks: Sequence[torch.nn.Module]) -> dict[str, torch.nn.Parameter]:
    """This rank's parameters by Megatron name, layers and experts numbered through the model; looks into wrappers."""
    named = {}
    for chunk in model_chunks:
        while hasattr(chunk, "module"):
            chunk = chunk.module
        for name, parameter in chunk.named_parameters():
            if name.startswith(_LAYERS):
                local, rest = name.removeprefix(_LAYERS).split(".", 1)
                layer = chunk.decoder.layers[int(local)]
                if rest.startswith(_EXPERTS):
                    local, rest = rest.removeprefix(_EXPERTS).split(".", 1)
                    rest = f"{_EXPERTS}{layer.mlp.local_expert_indices[int(local)]}.{rest}"
                name = f"{_LAYERS}{layer.layer_number - 1}.{rest}"
            named[name] = parameter
    return named
