"""config.json: both spellings of RoPE, what is refused, and layouts that the shapes forbid."""

import json

import pytest

from trace_megatron.errors import UserError
from trace_megatron.policy.hf_config import Llama3Scaling, parse_hf_config, read_hf_config

LLAMA_3_2_1B = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "num_attention_heads": 32,
    "num_hidden_layers": 16,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "factor": 32.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "vocab_size": 128256,
}
QWEN3_14B = {
    "architectures": ["Qwen3ForCausalLM"],
    "attention_bias": False,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 5120,
    "intermediate_size": 17408,
    "max_position_embeddings": 40960,
    "num_attention_heads": 40,
    "num_hidden_layers": 40,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_sliding_window": False,
    "vocab_size": 151936,
}


def test_llama_3_2_with_its_own_scaling_factor():
    hf = parse_hf_config(LLAMA_3_2_1B, "config.json")
    assert hf.rope_scaling == Llama3Scaling(32.0, 1.0, 4.0, 8192)
    assert (hf.rope_theta, hf.tied, hf.qk_norm, hf.norm_eps) == (500000.0, True, False, 1e-5)


def test_qwen3_with_explicit_head_dim():
    hf = parse_hf_config(QWEN3_14B, "config.json")
    assert (hf.head_dim, hf.num_heads, hf.num_kv_heads, hf.ffn_size) == (128, 40, 8, 17408)
    assert (hf.rope_theta, hf.rope_scaling, hf.tied, hf.qk_norm) == (1e6, None, False, True)


def test_both_spellings_of_rope_mean_the_same():
    new = {key: value for key, value in LLAMA_3_2_1B.items() if not key.startswith("rope_")}
    new["rope_parameters"] = {**LLAMA_3_2_1B["rope_scaling"], "rope_theta": 500000.0}
    assert parse_hf_config(new, "config.json") == parse_hf_config(LLAMA_3_2_1B, "config.json")


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"architectures": ["MixtralForCausalLM"]}, "MixtralForCausalLM"),
        ({"architectures": None}, "none"),
        ({"attention_bias": True}, "attention_bias"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"use_sliding_window": True}, "use_sliding_window"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding_attention"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, "yarn"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "low_freq_factor"),
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ({"num_hidden_layers": "many"}, "num_hidden_layers"),
        ({"vocab_size": 0}, "vocab_size"),
        ({"num_key_value_heads": 5}, "num_key_value_heads"),
        ({"head_dim": 63}, "head_dim"),
    ],
)
def test_refused_by_name(change, named):
    with pytest.raises(UserError, match=named):
        parse_hf_config({**LLAMA_3_2_1B, **change}, "config.json")


MISTRAL_7B = {  # v0.3
    **{key: value for key, value in LLAMA_3_2_1B.items() if key not in ("rope_scaling", "tie_word_embeddings")},
    "architectures": ["MistralForCausalLM"],
    "sliding_window": None,
}
QWEN3_30B = {
    **QWEN3_14B,
    "architectures": ["Qwen3MoeForCausalLM"],
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "num_experts": 128,
    "num_experts_per_tok": 8,
}


def test_qwen2_has_biases_though_its_config_does_not_say_so():
    windowed = {**QWEN3_14B, "architectures": ["Qwen2ForCausalLM"], "sliding_window": 32768}  # and turned off
    hf = parse_hf_config(windowed, "config.json")
    assert (hf.family, hf.qkv_bias, hf.qk_norm, hf.num_experts) == ("qwen2", True, False, 0)


def test_mistral_without_a_window():
    hf = parse_hf_config(MISTRAL_7B, "config.json")
    assert (hf.family, hf.tied, hf.qkv_bias, hf.qk_norm, hf.rope_scaling) == ("mistral", False, False, False, None)
    absent = {key: value for key, value in MISTRAL_7B.items() if key != "sliding_window"}
    for windowed in (absent, {**MISTRAL_7B, "sliding_window": 4096}):
        with pytest.raises(UserError, match="sliding_window"):
            parse_hf_config(windowed, "config.json")


def test_experts_by_both_names_of_their_number():
    hf = parse_hf_config(QWEN3_30B, "config.json")
    assert (hf.num_experts, hf.experts_per_token, hf.expert_ffn_size, hf.norm_topk_prob) == (128, 8, 768, True)
    assert hf.qk_norm and hf.family == "qwen3_moe"
    renamed = {key: value for key, value in QWEN3_30B.items() if key != "num_experts"} | {"num_local_experts": 128}
    assert parse_hf_config(renamed, "config.json") == hf


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"decoder_sparse_step": 2}, "decoder_sparse_step 2"),
        ({"mlp_only_layers": [0]}, "mlp_only_layers"),
        ({"num_experts": None}, "num_experts"),
        ({"num_experts_per_tok": 129}, "num_experts_per_tok"),
        ({"moe_intermediate_size": 0}, "moe_intermediate_size"),
    ],
)
def test_experts_that_are_refused(change, named):
    with pytest.raises(UserError, match=named):
        parse_hf_config({**QWEN3_30B, **change}, "config.json")


def test_missing_folder_file_and_json(tmp_path):
    with pytest.raises(UserError, match="nowhere"):
        read_hf_config(tmp_path / "nowhere")
    with pytest.raises(UserError, match=r"policy\.model"):
        read_hf_config("")
    with pytest.raises(UserError, match=r"config\.json"):
        read_hf_config(tmp_path)
    for broken in ("{", "[]"):
        (tmp_path / "config.json").write_text(broken)
        with pytest.raises(UserError, match=r"config\.json"):
            read_hf_config(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_14B))
    assert read_hf_config(tmp_path).family == "qwen3"
