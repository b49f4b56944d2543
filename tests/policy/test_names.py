"""The table of names: against transformers' own tensors, and shards against slices written out by hand."""

from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file

from tests.tiny_models import CLASSES, write_tiny_model
from trace_megatron.policy.hf_config import HFModelConfig, read_hf_config
from trace_megatron.policy.names import Layout, expert_owner, from_shards, model_weights, to_shard

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
AFFINE = replace(TINY, family="qwen2", qk_norm=False, qkv_bias=True)
EXPERTS = replace(TINY, family="qwen3_moe", num_experts=6, experts_per_token=2, expert_ffn_size=8)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", CLASSES)
def test_same_tensors_as_transformers_saves(family, tied, tmp_path):
    folder = write_tiny_model(tmp_path, family, tied=tied, head_dim=None if family == "qwen2" else 6)
    saved = {name: tuple(tensor.shape) for name, tensor in load_file(folder / "model.safetensors").items()}
    weights = [weight for weight in model_weights(read_hf_config(folder)) if not weight.is_copy]
    found = {name: shape for weight in weights for name, shape in weight.hf.items()}
    assert found == saved
    assert sum(len(weight.hf) for weight in weights) == len(saved)
    names = [name for weight in weights for name in weight.megatron]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("size", [1, 2, 4, 8])
@pytest.mark.parametrize("hf", [TINY, AFFINE, EXPERTS], ids=lambda hf: hf.family)
def test_shards_of_any_number_of_ranks_give_the_tensors_back(hf, size):
    for weight in model_weights(hf):
        tensors = [torch.randn(shape) for shape in weight.hf.values()]
        shards = [to_shard(weight, tensors, hf, rank, size) for rank in range(size)]
        assert len({shard.shape for shard in shards}) == 1
        for tensor, back in zip(tensors, from_shards(weight, shards, hf), strict=True):
            assert torch.equal(tensor, back)


def test_qkv_is_interleaved_by_key_value_group():
    weight, bias = (weight for weight in model_weights(AFFINE)[:3] if weight.layout is Layout.QKV)
    assert bias.megatron == ("decoder.layers.0.self_attention.linear_qkv.bias",)
    for fused in (weight, bias):
        q, k, v = (torch.randn(shape) for shape in fused.hf.values())
        # rank 1 of 2 holds the groups 2 and 3: of each its two query heads, then its key, then its value
        rows = [q[24:36], k[12:18], v[12:18], q[36:48], k[18:24], v[18:24]]
        assert torch.equal(to_shard(fused, [q, k, v], AFFINE, 1, 2), torch.cat(rows))


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


def test_experts_are_dealt_in_blocks():
    assert [expert_owner(EXPERTS, expert, 1) for expert in range(6)] == [0] * 6
    assert [expert_owner(EXPERTS, expert, 3) for expert in range(6)] == [0, 0, 1, 1, 2, 2]
    second = [weight for weight in model_weights(EXPERTS) if weight.layer == 1]
    assert [weight.expert for weight in second if weight.expert is not None] == [e for e in range(6) for _ in "ab"]
    names = {
        weight.megatron[0].removeprefix("decoder.layers.1.mlp."): [
            name.removeprefix("model.layers.1.mlp.") for name in weight.hf
        ]
        for weight in second
    }
    assert names["router.weight"] == ["gate.weight"]
    assert names["experts.local_experts.5.linear_fc1.weight"] == [
        "experts.5.gate_proj.weight",
        "experts.5.up_proj.weight",
    ]
    assert names["experts.local_experts.5.linear_fc2.weight"] == ["experts.5.down_proj.weight"]
