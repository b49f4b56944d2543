"""Small random HF models with a working byte-level tokenizer and a ChatML chat template, made offline in a second."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

Family = Literal["llama", "mistral", "qwen2", "qwen3", "qwen3_moe"]
CLASSES = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "mistral": (MistralConfig, MistralForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
    "qwen3_moe": (Qwen3MoeConfig, Qwen3MoeForCausalLM),
}
FAMILY_OPTIONS = {
    "mistral": {"sliding_window": None},  # its class's default is a window, which nobody here supports
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "norm_topk_prob": True},
}

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TOKENIZER_SIZE = 256 + len(SPECIAL_TOKENS)
LLAMA3_SCALING = {
    "rope_type": "llama3",
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
"""Llama-3.2's numbers over a context so short that all three of its frequency bands occur in a small head."""

CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def write_tiny_model(
    folder: str | Path,
    family: Family = "llama",
    *,
    tied: bool = True,
    num_layers: int = 2,
    hidden: int = 64,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int | None = None,
    ffn: int = 96,
    vocab: int = TOKENIZER_SIZE,
    rope_theta: float = 10000.0,
    rope_scaling: dict | None = None,
    max_positions: int = 2048,
    dtype: torch.dtype = torch.float32,
    initializer_range: float = 0.1,
    seed: int = 0,
) -> Path:
    """Save a random model with tokenizer into ``folder``; the same arguments give the same weights.

    Norm weights and biases are random too, so that swapped ones are noticed. ``vocab`` must hold the tokenizer's 259
    ids.
    """
    if vocab < TOKENIZER_SIZE:
        raise ValueError(f"expected a vocabulary of at least {TOKENIZER_SIZE}, found {vocab}")
    folder = Path(folder)
    rope = {"rope_type": "default", **(rope_scaling or {}), "rope_theta": rope_theta}
    config_class, model_class = CLASSES[family]
    config = config_class(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=ffn,
        num_hidden_layers=num_layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim or hidden // heads,
        max_position_embeddings=max_positions,
        rope_parameters=rope,
        rms_norm_eps=1e-6,
        tie_word_embeddings=tied,
        initializer_range=initializer_range,
        bos_token_id=None,
        eos_token_id=258,
        pad_token_id=None,  # a padding row stays zero and gets no gradient in transformers
        **FAMILY_OPTIONS.get(family, {}),
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = model_class(config)
        for name, parameter in model.named_parameters():
            if "norm" in name:
                torch.nn.init.uniform_(parameter, 0.5, 1.5)
            elif name.endswith("bias"):
                torch.nn.init.normal_(parameter, std=initializer_range)
    model.to(dtype).save_pretrained(folder)
    tokenizer = build_tokenizer()
    tokenizer.save_pretrained(folder)
    GenerationConfig(eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id).save_pretrained(folder)
    return folder


def build_tokenizer() -> PreTrainedTokenizerFast:
    """One id a byte (0-255) and three special tokens after them."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={symbol: index for index, symbol in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>", model_max_length=2048
    )
    wrapped.chat_template = CHATML
    return wrapped
