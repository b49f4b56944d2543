"""A Megatron-Core GPTModel from an HF config: this rank's part of it, with tree attention and path-depth RoPE.

Megatron's parallel state must be initialised, and where no CUDA device exists ``cpu.install`` called.

Legend: T packed tokens, V vocabulary rows of this tensor-parallel rank, D head dim.
"""

from __future__ import annotations

import functools
import math

import torch
from megatron.core import parallel_state
from megatron.core.extensions.transformer_engine import TENorm
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import (
    HAVE_TE,
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.enums import LayerType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build

from trace_megatron.config import PolicyConfig
from trace_megatron.ops import rms_norm, swiglu
from trace_megatron.policy.hf_config import HFModelConfig, Llama3Scaling
from trace_megatron.policy.layout import check_parallel, split_layers
from trace_megatron.policy.offload import transformer_options
from trace_megatron.policy.tree_attention import TreeCoreAttention, TreeSequence

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}

PADDED_LOGIT = -1e9
"""Logit of a vocabulary row that exists only so that the rows divide by the ranks: probability 0, and finite, since
an entropy's 0 * -inf would be NaN."""


def build_model(hf: HFModelConfig, policy: PolicyConfig) -> list[GPTModel]:
    """This rank's model chunks, in pipeline order: one, or ``policy.virtual_pipeline`` of them.

    Weights are random until ``hf_weights.load_hf_weights``. Raises UserError where the shapes forbid the layout.
    """
    check_parallel(hf, policy)
    config = build_transformer_config(hf, policy)
    if policy.virtual_pipeline == 1:
        return [_build_chunk(hf, policy, config, None)]
    return [_build_chunk(hf, policy, config, chunk) for chunk in range(policy.virtual_pipeline)]


def _build_chunk(
    hf: HFModelConfig, policy: PolicyConfig, config: TransformerConfig, virtual_stage: int | None
) -> GPTModel:
    where = {"ignore_virtual": False, "vp_stage": virtual_stage}
    model = GPTModel(
        config,
        build_layer_spec(config, virtual_stage),
        vocab_size=padded_vocab_size(hf.vocab_size, policy.tensor_parallel),
        max_sequence_length=hf.max_positions,
        pre_process=parallel_state.is_pipeline_first_stage(**where),
        post_process=parallel_state.is_pipeline_last_stage(**where),
        share_embeddings_and_output_weights=hf.tied,
        position_embedding_type="rope",
        rotary_base=hf.rope_theta,
        vp_stage=virtual_stage,
    )
    model.rotary_pos_emb = TreeRotaryEmbedding(hf)
    if model.post_process and hf.vocab_size % policy.tensor_parallel:
        first_row = parallel_state.get_tensor_model_parallel_rank() * model.output_layer.output_size_per_partition
        model.output_layer.register_forward_hook(functools.partial(_mask_padded_rows, hf.vocab_size - first_row))
    return model.cuda() if torch.cuda.is_available() else model


def build_transformer_config(hf: HFModelConfig, policy: PolicyConfig) -> TransformerConfig:
    """Megatron's configuration of the model at the policy's dtype, parallel layout and recompute."""
    dtype = DTYPES[policy.dtype]
    on_gpu = torch.cuda.is_available()
    return TransformerConfig(
        num_layers=hf.num_layers,
        hidden_size=hf.hidden_size,
        num_attention_heads=hf.num_heads,
        num_query_groups=hf.num_kv_heads,
        kv_channels=hf.head_dim,
        ffn_hidden_size=hf.ffn_size,
        normalization="RMSNorm",
        layernorm_epsilon=hf.norm_eps,
        qk_layernorm=hf.qk_norm,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        # Megatron's name for a layer spec that brings the whole gated activation, as the local one below does
        use_te_activation_func=not hf.num_experts and not (on_gpu and HAVE_TE),
        add_bias_linear=False,
        add_qkv_bias=hf.qkv_bias,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype is torch.bfloat16,
        tensor_model_parallel_size=policy.tensor_parallel,
        pipeline_model_parallel_size=policy.pipeline_parallel,
        **_pipeline(hf, policy),
        context_parallel_size=policy.context_parallel,
        sequence_parallel=policy.sequence_parallel,
        use_cpu_initialization=not on_gpu,
        calculate_per_token_loss=True,  # the loss comes with global weights already: no division per micro-batch
        **_experts(hf, policy, on_gpu),
        **_recompute(policy.recompute),
        **transformer_options(policy),
    )


def build_layer_spec(config: TransformerConfig, virtual_stage: int | None = None) -> TransformerBlockSubmodules:
    """Layers whose core attention reads the tree: Transformer Engine's on a GPU that has it, else Megatron's own."""
    options = {"num_experts": config.num_moe_experts, "qk_layernorm": config.qk_layernorm}
    if torch.cuda.is_available() and HAVE_TE:
        spec, norm = get_gpt_layer_with_transformer_engine_spec(**options), TENorm
    else:
        spec, norm = get_gpt_layer_local_spec(**options, normalization="RMSNorm"), RMSNorm
        spec.submodules.input_layernorm = spec.submodules.pre_mlp_layernorm = norm
        if config.qk_layernorm:
            attention = spec.submodules.self_attention.submodules
            attention.q_layernorm = attention.k_layernorm = norm
        if config.use_te_activation_func:
            mlp = spec.submodules.mlp  # in Megatron-Core 0.19 a partial call, in 0.16 a specification
            submodules = mlp.keywords["submodules"] if isinstance(mlp, functools.partial) else mlp.submodules
            submodules.activation_func = SwiGLU
    spec.submodules.self_attention.submodules.core_attention = TreeCoreAttention
    return TransformerBlockSubmodules(
        layer_specs=[spec] * get_num_layers_to_build(config, virtual_stage), layer_norm=norm
    )


def padded_vocab_size(vocab_size: int, tensor_parallel: int) -> int:
    """The smallest multiple of ``tensor_parallel`` that holds the vocabulary."""
    return -(-vocab_size // tensor_parallel) * tensor_parallel


class RMSNorm(torch.nn.RMSNorm):
    """RMSNorm in Megatron's terms; unlike its own for the local spec, it works under sequence parallelism."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5):
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        # each rank sees its part of the sequence: Megatron sums the gradients of flagged weights over the ranks
        self.weight.sequence_parallel = config.sequence_parallel

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return rms_norm(x, self.weight, self.eps)


class SwiGLU(MegatronModule):
    """The gated activation of a feed-forward layer, [..., 2 F] -> [..., F], in Megatron's terms."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return swiglu(x)


class TreeRotaryEmbedding(torch.nn.Module):
    """RoPE angles by path depth. Megatron's own is cached on the length and never sees positions."""

    def __init__(self, hf: HFModelConfig):
        super().__init__()
        # an attribute, not a buffer: a cast of the model to bfloat16 must leave it alone
        self.inv_freq = inverse_frequencies(hf.head_dim, hf.rope_theta, hf.rope_scaling)

    def get_rotary_seq_len(self, inference_context, transformer, transformer_input, config, packed_seq_params):
        """Megatron hands the result to ``forward``: the tree itself instead of a length."""
        return packed_seq_params

    def forward(self, tree: TreeSequence, packed_seq: bool = False, cp_group=None) -> torch.Tensor:
        """[T, 1, 1, D] float32 angles."""
        self.inv_freq = self.inv_freq.to(tree.position_ids.device)
        angles = torch.outer(tree.position_ids.float(), self.inv_freq)
        return torch.cat((angles, angles), dim=-1)[:, None, None]


def inverse_frequencies(head_dim: int, theta: float, scaling: Llama3Scaling | None) -> torch.Tensor:
    """[D / 2] float32 radians per position, with the smooth slow-down of Llama 3.1 (arXiv 2407.21783) where asked."""
    freqs = 1.0 / (theta ** (torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim))
    if scaling is None:
        return freqs
    turns = scaling.original_max_positions * freqs / (2 * math.pi)  # within the original context
    smooth = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    smooth = smooth.clamp(0, 1)
    return smooth * freqs + (1 - smooth) * freqs / scaling.factor


def _pipeline(hf: HFModelConfig, policy: PolicyConfig) -> dict:
    if policy.pipeline_parallel == 1:
        return {}
    chunks = [[LayerType.decoder] * count for count in split_layers(hf, policy)]
    chunks[0].insert(0, LayerType.embedding)
    chunks[-1].append(LayerType.loss)
    options = {"pipeline_model_parallel_layout": chunks}
    if policy.virtual_pipeline > 1:
        # With the defaults, the other way round, two stages that send to each other in one batch of operations take
        # activations for gradients without a word: both have the same shape and the same partner.
        options |= {
            "virtual_pipeline_model_parallel_size": policy.virtual_pipeline,
            "overlap_p2p_comm": True,
            "batch_p2p_comm": False,
        }
    return options


def _experts(hf: HFModelConfig, policy: PolicyConfig, on_gpu: bool) -> dict:
    """Also how stages learn the lengths of packs, since it depends on how tokens reach their experts."""
    if not hf.num_experts:
        # packs differ in length, and Megatron asks for this dispatcher then, of dense models too
        return {"variable_seq_lengths": policy.pipeline_parallel > 1, "moe_token_dispatcher_type": "alltoall"}
    return {
        "num_moe_experts": hf.num_experts,
        "moe_router_topk": hf.experts_per_token,
        "moe_ffn_hidden_size": hf.expert_ffn_size,
        # softmax over all experts and then of the chosen ones their share is softmax over the chosen ones
        "moe_router_pre_softmax": not hf.norm_topk_prob,
        "moe_router_dtype": "fp64",  # a choice between experts must not hang on how a rank rounds
        # Shared tokens would count once instead of once a leaf, and padding too.
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
        "expert_model_parallel_size": policy.expert_parallel,
        "expert_tensor_parallel_size": 1,
        # all-to-all needs CUDA streams; gathering all tokens, packs of one length (see ``forward.run_schedule``)
        "moe_token_dispatcher_type": "alltoall" if on_gpu else "allgather",
        "variable_seq_lengths": on_gpu and policy.pipeline_parallel > 1,
    }


def _recompute(granularity: str) -> dict:
    return {
        "none": {},
        "selective": {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]},
        "full": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
    }[granularity]


def _mask_padded_rows(num_real_rows: int, layer, inputs, outputs):
    logits, bias = outputs
    if num_real_rows >= logits.shape[-1]:
        return outputs
    padded = torch.arange(logits.shape[-1], device=logits.device) >= num_real_rows
    return logits.masked_fill(padded, PADDED_LOGIT), bias
