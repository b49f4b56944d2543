"""The table of names: against transformers' own state dict, and shards against slices written out by hand."""

from dataclasses import replace

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from trace_megatron.policy.hf_config import HFModelConfig
from trace_megatron.policy.names import Layout, from_shards, model_weights, to_shard

TINY = HFModelConfig(
    family="qwen3",
    num_layers=2,
    hidden_size=16,
    num_heads=8,
    num_kv_heads=4,
    head_dim=6,
    ffn_size=16,
    vocab_size=21,
    norm_eps=1e-6,
    rope_theta=1e4,
    rope_scaling=None,
    tied=False,
    qk_norm=True,
    max_positions=64,
)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_same_tensors_in_the_same_order_as_transformers(family, tied):
    config_class, model_class = {
        "llama": (LlamaConfig, LlamaForCausalLM),
        "qwen3": (Qwen3Config, Qwen3ForCausalLM),
    }[family]
    config = config_class(
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=6,
        intermediate_size=16,
        vocab_size=21,
        tie_word_embeddings=tied,
    )
    with torch.device("meta"):
        expected = {name: tuple(tensor.shape) for name, tensor in model_class(config).state_dict().items()}
    if tied:
        del expected["lm_head.weight"]
    hf = replace(TINY, family=family, qk_norm=family == "qwen3", tied=tied)
    found = {name: shape for weight in model_weights(hf) if not weight.is_copy for name, shape in weight.hf.items()}
    assert list(found.items()) == list(expected.items())


@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_shards_of_any_number_of_ranks_give_the_tensors_back(size):
    for weight in model_weights(TINY):
        tensors = [torch.randn(shape) for shape in weight.hf.values()]
        shards = [to_shard(weight, tensors, TINY, rank, size) for rank in range(size)]
        assert len({shard.shape for shard in shards}) == 1
        for tensor, back in zip(tensors, from_shards(weight, shards, TINY), strict=True):
            assert torch.equal(tensor, back)


def test_qkv_is_interleaved_by_key_value_group():
    weight = next(weight for weight in model_weights(TINY) if weight.layout is Layout.QKV)
    q, k, v = (torch.randn(shape) for shape in weight.hf.values())
    # rank 1 of 2 holds the groups 2 and 3: of each its two query heads, then its key, then its value
    rows = [q[24:36], k[12:18], v[12:18], q[36:48], k[18:24], v[18:24]]
    assert torch.equal(to_shard(weight, [q, k, v], TINY, 1, 2), torch.cat(rows))


def test_gate_and_up_are_split_one_by_one():
    weight = next(weight for weight in model_weights(TINY) if weight.layout is Layout.GATE_UP)
    gate, up = (torch.randn(shape) for shape in weight.hf.values())
    assert torch.equal(to_shard(weight, [gate, up], TINY, 1, 4), torch.cat([gate[4:8], up[4:8]]))


def test_padded_vocabulary_rows_are_zero():
    embedding = model_weights(TINY)[0]
    table = torch.randn(21, 16)
    last = to_shard(embedding, [table], TINY, 3, 4)
    assert torch.equal(last[:3], table[18:]) and torch.equal(last[3:], torch.zeros(3, 16))


def test_a_tied_head_is_a_copy_of_the_embedding():
    embedding, *_, head = model_weights(replace(TINY, tied=True))
    assert head.is_copy and head.hf == embedding.hf
