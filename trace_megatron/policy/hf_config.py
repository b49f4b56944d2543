"""An HF folder's config.json, reduced to what the policy is built from; whatever it does not cover is refused."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from trace_megatron.errors import UserError

FAMILIES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "Qwen3MoeForCausalLM": "qwen3_moe",
}


@dataclass(frozen=True, slots=True)
class Llama3Scaling:
    """RoPE frequencies of Llama 3.1 and later: long waves are slowed by ``factor``, middle ones in between."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_positions: int


@dataclass(frozen=True, slots=True)
class HFModelConfig:
    """A decoder with RMSNorm, SwiGLU, grouped-query attention and RoPE; dense, or of experts in every layer."""

    family: Literal["llama", "mistral", "qwen2", "qwen3", "qwen3_moe"]
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn_size: int
    """Of dense layers; unused where there are experts."""
    vocab_size: int
    norm_eps: float
    rope_theta: float
    rope_scaling: Llama3Scaling | None
    tied: bool
    """The output head is the embedding matrix."""
    qk_norm: bool
    """RMSNorm over each head's query and key."""
    max_positions: int
    qkv_bias: bool = False
    """Query, key and value are affine; nothing else has a bias."""
    num_experts: int = 0
    """Per layer; 0: a dense model."""
    experts_per_token: int = 0
    expert_ffn_size: int = 0
    norm_topk_prob: bool = True
    """A token's expert weights are scaled to sum to 1."""


def read_hf_config(folder: str | Path) -> HFModelConfig:
    """Read ``folder``/config.json. Raises UserError for a missing folder or file and for what is not supported."""
    if not str(folder):
        raise UserError("expected a Hugging Face model folder as policy.model, found none: set policy.model=FOLDER")
    folder = Path(folder)
    if not folder.is_dir():
        raise UserError(f"expected a Hugging Face model folder at '{folder}', found none: correct policy.model")
    path = folder / "config.json"
    if not path.is_file():
        raise UserError(f"expected '{path}', found no such file: policy.model must be a Hugging Face model folder")
    try:
        values = json.loads(path.read_text())
    except ValueError as error:
        raise UserError(f"expected JSON in '{path}', found: {error}") from error
    if not isinstance(values, dict):
        raise UserError(f"expected a mapping in '{path}', found a {type(values).__name__}")
    return parse_hf_config(values, str(path))


def parse_hf_config(values: dict[str, Any], where: str) -> HFModelConfig:
    """The model that the entries of a config.json describe; ``where`` names the file in errors."""
    architecture = (values.get("architectures") or ["none"])[0]
    if architecture not in FAMILIES:
        raise UserError(
            f"expected one of {', '.join(FAMILIES)} in '{where}', found {architecture}: choose such a model"
        )
    family = FAMILIES[architecture]
    _refuse_unsupported(values, family, where)
    for key in ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "vocab_size"):
        _positive(values, key, where)
    heads, kv_heads, head_dim = _read_heads(values, where)
    theta, scaling = _read_rope(values, where)
    return HFModelConfig(
        family=family,
        num_layers=values["num_hidden_layers"],
        hidden_size=values["hidden_size"],
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        ffn_size=values["intermediate_size"],
        vocab_size=values["vocab_size"],
        norm_eps=values.get("rms_norm_eps", 1e-6),  # every family's default
        rope_theta=theta,
        rope_scaling=scaling,
        tied=values.get("tie_word_embeddings", False),
        qk_norm=family in ("qwen3", "qwen3_moe"),
        max_positions=values.get("max_position_embeddings", 2048),
        qkv_bias=family == "qwen2",
        **(_read_experts(values, where) if family == "qwen3_moe" else {}),
    )


def _refuse_unsupported(values: dict[str, Any], family: str, where: str) -> None:
    refused = {
        "attention_bias": "attention biases",
        "mlp_bias": "feed-forward biases",
        "use_sliding_window": "sliding-window attention",
        "quantization_config": "quantized weights",
        "mlp_only_layers": "dense layers among those with experts",
    }
    if family == "mistral":  # the others set it too, and turn it on with use_sliding_window
        refused["sliding_window"] = "sliding-window attention"
        values = {"sliding_window": 4096, **values}  # what transformers takes where it is absent
    for key, meaning in refused.items():
        if values.get(key):
            raise UserError(f"expected a model without {meaning}, found '{key}' in '{where}': choose another model")
    windowed = {kind for kind in values.get("layer_types") or () if kind != "full_attention"}
    if windowed:
        raise UserError(f"expected full attention in every layer, found {sorted(windowed)} in '{where}'")
    if values.get("decoder_sparse_step", 1) != 1:
        raise UserError(
            f"expected experts in every layer, found decoder_sparse_step {values['decoder_sparse_step']} in '{where}'"
        )
    if values.get("hidden_act", "silu") != "silu":
        raise UserError(f"expected the activation silu, found '{values['hidden_act']}' in '{where}'")


def _positive(values: dict[str, Any], key: str, where: str) -> int:
    if not isinstance(values.get(key), int) or values[key] < 1:
        raise UserError(f"expected a positive number as '{key}' in '{where}', found {values.get(key)!r}")
    return values[key]


def _read_experts(values: dict[str, Any], where: str) -> dict[str, Any]:
    count = _positive(values, "num_experts" if "num_experts" in values else "num_local_experts", where)
    chosen = _positive(values, "num_experts_per_tok", where)
    if chosen > count:
        raise UserError(f"expected 'num_experts_per_tok' of at most {count} experts in '{where}', found {chosen}")
    return {
        "num_experts": count,
        "experts_per_token": chosen,
        "expert_ffn_size": _positive(values, "moe_intermediate_size", where),
        "norm_topk_prob": bool(values.get("norm_topk_prob", False)),  # absent means False in transformers
    }


def _read_heads(values: dict[str, Any], where: str) -> tuple[int, int, int]:
    heads = values["num_attention_heads"]
    kv_heads = values.get("num_key_value_heads") or heads
    if heads % kv_heads:
        raise UserError(f"expected 'num_key_value_heads' to divide {heads} heads in '{where}', found {kv_heads}")
    head_dim = values.get("head_dim") or values["hidden_size"] // heads
    if head_dim % 2:
        raise UserError(f"expected an even 'head_dim' in '{where}' (RoPE turns pairs), found {head_dim}")
    return heads, kv_heads, head_dim


def _read_rope(values: dict[str, Any], where: str) -> tuple[float, Llama3Scaling | None]:
    """Theta and scaling from ``rope_parameters`` (transformers 5) or ``rope_theta`` + ``rope_scaling`` (before)."""
    rope = values.get("rope_parameters") or values.get("rope_scaling") or {}
    theta = float(rope.get("rope_theta") or values.get("rope_theta") or 10000.0)
    kind = rope.get("rope_type", rope.get("type", "default"))
    if rope.get("partial_rotary_factor", values.get("partial_rotary_factor") or 1.0) != 1.0:
        raise UserError(f"expected RoPE over whole heads, found a partial_rotary_factor in '{where}'")
    if kind == "default":
        return theta, None
    if kind != "llama3":
        raise UserError(f"expected RoPE of type default or llama3, found '{kind}' in '{where}': choose another model")
    keys = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
    missing = [key for key in keys if key not in rope]
    if missing:
        raise UserError(f"expected '{missing[0]}' among the llama3 RoPE parameters in '{where}', found none")
    factor, low, high, original = (rope[key] for key in keys)
    return theta, Llama3Scaling(float(factor), float(low), float(high), int(original))
