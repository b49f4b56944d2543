"""Memory of the fullest trainer rank, by part. Bytes; parameters and optimizer are counted, activations modelled.

Offloaded modules are taken to be on the device still: what remains of them there while layers run is not modelled.

Legend: H hidden size, Q = heads x head dim, K = KV heads x head dim, F feed-forward size.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from trace_megatron.config import Config
from trace_megatron.policy.hf_config import HFModelConfig
from trace_megatron.policy.layout import num_pipeline_chunks, split_layers
from trace_megatron.policy.logprobs import LOGITS_PER_CHUNK
from trace_megatron.policy.names import Layout, Weight, model_weights

MAIN_BYTES = 4  # gradients, main weights and both moments are float32


@dataclass(frozen=True, slots=True)
class TrainerMemory:
    """Bytes on one rank."""

    stage: int
    """Pipeline stage of the rank."""
    num_parameters: int
    weights: int
    gradients: int
    optimizer: int
    activations: int
    head: int
    """Logits of a chunk, on the last stage."""

    @property
    def total(self) -> int:
        return self.weights + self.gradients + self.optimizer + self.activations + self.head


def trainer_memory(hf: HFModelConfig, config: Config, num_micro_batches: int) -> list[TrainerMemory]:
    """Of each pipeline stage; ranks of one stage are alike. ``num_micro_batches``: of a data-parallel replica."""
    policy = config.policy
    width = _width(config)
    counts = parameters_by_stage(hf, config)
    shards = policy.data_parallel * policy.context_parallel if config.optimizer.distributed else 1
    # of a bfloat16 weight the optimizer keeps a float32 copy beside two moments
    state_bytes = MAIN_BYTES * (2 if width == 4 else 3) * (1 - config.optimizer.offload_share)
    layers = split_layers(hf, policy)
    stages = []
    for stage in range(policy.pipeline_parallel):
        own = sum(layers[stage :: policy.pipeline_parallel]) - policy.offload_layers  # what these keep is on the host
        in_flight = min(policy.pipeline_parallel - stage, num_micro_batches)
        if policy.virtual_pipeline > 1:  # 1F1B interleaved: chunks of up to this many micro-batches wait
            warm_up = (
                2 * (policy.pipeline_parallel - stage - 1) + (policy.virtual_pipeline - 1) * policy.pipeline_parallel
            )
            in_flight = min((warm_up + 1) / policy.virtual_pipeline, num_micro_batches)
        is_last = stage == policy.pipeline_parallel - 1
        stages.append(
            TrainerMemory(
                stage=stage,
                num_parameters=counts[stage],
                weights=counts[stage] * width,
                gradients=counts[stage] * MAIN_BYTES,
                optimizer=int(counts[stage] * state_bytes / shards),
                activations=int(in_flight * own * layer_activations(hf, config) + working_set(hf, config)),
                head=3 * MAIN_BYTES * LOGITS_PER_CHUNK if is_last else 0,  # logits, their exponentials, their gradient
            )
        )
    return stages


def parameters_by_stage(hf: HFModelConfig, config: Config) -> list[int]:
    """Parameters that a rank of each stage holds, from the table that weights are loaded by."""
    policy = config.policy
    ends = [sum(split_layers(hf, policy)[: chunk + 1]) for chunk in range(num_pipeline_chunks(policy))]
    last = policy.pipeline_parallel - 1
    counts = [0] * policy.pipeline_parallel
    for weight in model_weights(hf):
        if weight.is_copy and last == 0:  # the embedding itself is there
            continue
        if weight.layer is not None:
            chunk = next(index for index, end in enumerate(ends) if weight.layer < end)
            stage = chunk % policy.pipeline_parallel
        else:
            stage = 0 if weight.megatron[0].startswith("embedding") else last
        counts[stage] += _shard_size(weight, config)
    return counts


def _shard_size(weight: Weight, config: Config) -> int:
    """Elements on the fullest rank of a stage: experts are whole, and every expert-parallel rank has its share."""
    policy = config.policy
    tensor = policy.tensor_parallel
    size = sum(math.prod(shape) for shape in weight.hf.values())
    if weight.expert is not None:
        return size if weight.expert % policy.expert_parallel == 0 else 0
    if weight.layout is Layout.WHOLE:
        return size
    if weight.layout is Layout.VOCAB:
        rows, columns = next(iter(weight.hf.values()))
        return -(-rows // tensor) * columns
    return size // tensor


def layer_activations(hf: HFModelConfig, config: Config, *, native: bool = False) -> float:
    """Bytes that one layer keeps for the backward pass of one micro-batch.

    Kept of every token: input and output of both norms (H each, split with sequence parallelism); q, k and v as
    projected, q and k after RoPE, and once more where they are normed; attention's output; of the MLP gate and up, the
    gate's halves of the activation and their product, 5 F in Megatron's unfused SwiGLU. Tree attention keeps no scores.
    ``native``: with the CPU's own SwiGLU, which keeps its input and its output, 3 F. Full recompute keeps the layer's
    input alone.
    """
    policy = config.policy
    width = _width(config)
    sequence = policy.tensor_parallel if policy.sequence_parallel else 1
    tokens = policy.tokens_per_micro_batch / policy.context_parallel
    if policy.recompute == "full":
        return tokens * width * hf.hidden_size / sequence
    return tokens * (4 * width * hf.hidden_size / sequence + _split_bytes(hf, config, native))


def _split_bytes(hf: HFModelConfig, config: Config, native: bool = False) -> float:
    """Of a token in a layer, what tensor parallelism splits."""
    width = _width(config)
    query, key = hf.num_heads * hf.head_dim, hf.num_kv_heads * hf.head_dim
    ffn = hf.experts_per_token * hf.expert_ffn_size if hf.num_experts else hf.ffn_size
    size = width * ((query + 2 * key) + (query + key) + query + (3 if native else 5) * ffn)
    if hf.qk_norm:
        size += width * (query + key)
    return size / config.policy.tensor_parallel


def working_set(hf: HFModelConfig, config: Config) -> float:
    """What a layer needs while it runs: under full recompute all that it would keep, and gradients of the same size."""
    policy = config.policy
    tokens = policy.tokens_per_micro_batch / policy.context_parallel
    hidden = 4 * _width(config) * hf.hidden_size / (policy.tensor_parallel if policy.sequence_parallel else 1)
    passes = 2 if policy.recompute == "full" else 1
    return passes * tokens * (hidden + _split_bytes(hf, config))


def _width(config: Config) -> int:
    return 4 if config.policy.dtype == "float32" else 2


def kv_bytes_per_token(hf: HFModelConfig, width: int = 2) -> int:
    """Keys and values of one token in all layers."""
    return 2 * hf.num_layers * hf.num_kv_heads * hf.head_dim * width


def num_parameters(hf: HFModelConfig) -> int:
    """Of the whole model, tied tensors once."""
    return sum(math.prod(shape) for weight in model_weights(hf) if not weight.is_copy for shape in weight.hf.values())
