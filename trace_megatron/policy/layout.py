"""Which parallel layouts a model allows, and which layers stand in which chunk of the pipeline. No Megatron in here."""

from __future__ import annotations

from trace_megatron.config import PolicyConfig
from trace_megatron.errors import UserError
from trace_megatron.policy.hf_config import HFModelConfig

TRAINED_SHARE = 0.5
"""Of a pack's tokens, the share that goes through the vocabulary head: prompts and observations do not."""


def check_parallel(model: HFModelConfig, policy: PolicyConfig) -> None:
    """Raise UserError if the model's shapes do not allow the policy's parallel layout."""
    tensor = policy.tensor_parallel
    for name in (
        "tensor_parallel",
        "pipeline_parallel",
        "virtual_pipeline",
        "context_parallel",
        "data_parallel",
        "expert_parallel",
    ):
        if getattr(policy, name) < 1:
            raise UserError(f"expected policy.{name} of at least 1, found {getattr(policy, name)}")
    check_tensor_parallel(model, tensor, "policy.tensor_parallel")
    if policy.sequence_parallel and tensor == 1:
        raise UserError("expected policy.tensor_parallel above 1 with policy.sequence_parallel, found 1: turn it off")
    _check_experts(model, policy)
    _check_pipeline(model, policy)


def check_tensor_parallel(model: HFModelConfig, size: int, option: str) -> None:
    """Raise UserError, with the option's name, if ``size`` ranks cannot share the model's matrices."""
    if model.num_heads % size:
        raise UserError(f"expected {option} to divide the model's {model.num_heads} attention heads, found {size}")
    if model.num_kv_heads % size and size % model.num_kv_heads:
        raise UserError(
            f"expected {option} to divide the model's {model.num_kv_heads} key-value heads or to be a multiple of "
            f"them, found {size}"
        )
    num_rows = (model.num_heads + 2 * model.num_kv_heads) * model.head_dim
    if num_rows % size:
        raise UserError(f"expected {option} to divide the {num_rows} rows of query, key and value, found {size}")
    if not model.num_experts and model.ffn_size % size:
        raise UserError(f"expected {option} to divide the model's feed-forward size {model.ffn_size}, found {size}")


def split_layers(model: HFModelConfig, policy: PolicyConfig) -> list[int]:
    """Layers of every pipeline chunk in model order; chunk c is on stage c % pipeline_parallel.

    ``policy.pipeline_layers`` where given. Else the slowest chunk is as fast as whole layers allow, with the vocabulary
    head counted as ``head_layers`` layers of the last chunk; what does not divide goes to the first ones.
    """
    if policy.pipeline_layers:
        return list(policy.pipeline_layers)
    num_layers, num_chunks = model.num_layers, num_pipeline_chunks(policy)
    if num_chunks == 1:
        return [num_layers]
    head = head_layers(model, policy)
    others = num_chunks - 1

    def pace(last: int) -> tuple[float, int]:
        slowest = max(-(-(num_layers - last) // others), last + head)
        return slowest, abs(num_layers - last * num_chunks)  # of equally fast ones the most even

    last = min(range(1, num_layers - others + 1), key=pace)
    share, rest = divmod(num_layers - last, others)
    return [share + (chunk < rest) for chunk in range(others)] + [last]


def num_pipeline_chunks(policy: PolicyConfig) -> int:
    return policy.pipeline_parallel * policy.virtual_pipeline


def head_layers(model: HFModelConfig, policy: PolicyConfig) -> float:
    """What the vocabulary head costs, in layers: matrix products of a forward and backward pass per token of a pack."""
    layer = active_layer_weights(model)
    layer_passes = 4 if policy.recompute == "full" else 3  # forward, and twice that backward
    head_passes = 4  # its backward pass computes the logits again
    return TRAINED_SHARE * head_passes * model.vocab_size * model.hidden_size / (layer_passes * layer)


def active_layer_weights(model: HFModelConfig) -> int:
    """Weights of one layer that a token is multiplied with: attention, router, and the MLP or the token's experts."""
    query, key = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    ffn = model.experts_per_token * model.expert_ffn_size if model.num_experts else model.ffn_size
    return model.hidden_size * (2 * query + 2 * key + 3 * ffn + model.num_experts)


def _check_experts(model: HFModelConfig, policy: PolicyConfig) -> None:
    ranks, per_stage = policy.expert_parallel, policy.num_ranks // policy.pipeline_parallel
    if ranks > 1 and not model.num_experts:
        raise UserError(f"expected policy.expert_parallel=1 for a model without experts, found {ranks}")
    if model.num_experts % ranks:
        raise UserError(
            f"expected policy.expert_parallel to divide the model's {model.num_experts} experts, found {ranks}"
        )
    if per_stage % ranks:
        raise UserError(
            f"expected policy.expert_parallel to divide the {per_stage} tensor x context x data parallel ranks of a "
            f"stage, found {ranks}"
        )
    if model.num_experts and policy.tensor_parallel > 1:
        if not policy.sequence_parallel:
            raise UserError(
                "expected policy.sequence_parallel with experts and policy.tensor_parallel above 1, found false: "
                "every rank would route every token"
            )
        if ranks == 1:  # Megatron then reduces the experts' gradients as if tensor-parallel ranks agreed on them
            raise UserError(
                f"expected policy.expert_parallel above 1 with experts and policy.tensor_parallel "
                f"{policy.tensor_parallel}, found 1: set it to {policy.tensor_parallel}"
            )


def _check_pipeline(model: HFModelConfig, policy: PolicyConfig) -> None:
    stages, chunks, layers = policy.pipeline_parallel, num_pipeline_chunks(policy), policy.pipeline_layers
    if policy.virtual_pipeline > 1 and stages == 1:
        raise UserError(
            f"expected policy.pipeline_parallel above 1 with policy.virtual_pipeline {policy.virtual_pipeline}, "
            f"found 1: set policy.virtual_pipeline=1"
        )
    if model.num_layers < chunks:
        raise UserError(
            f"expected at most {model.num_layers} pipeline chunks, one for each layer of the model, found {chunks}: "
            f"lower policy.pipeline_parallel or policy.virtual_pipeline"
        )
    if layers and (len(layers) != chunks or sum(layers) != model.num_layers or min(layers) < 1):
        raise UserError(
            f"expected policy.pipeline_layers as {chunks} positive numbers that add up to the model's "
            f"{model.num_layers} layers, found {list(layers)}"
        )
