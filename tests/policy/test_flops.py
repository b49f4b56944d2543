"""Model FLOPs beside what torch counts in transformers, blocks of attention beside dense masks."""

import random

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM

from tests.algorithm.trees import random_tree
from tests.tiny_models import write_tiny_model
from trace_megatron.algorithm.pack import pack_trees
from trace_megatron.algorithm.tree import build_structure
from trace_megatron.policy.flops import attention_blocks, model_flops, peak_memory_bytes, peak_tflops
from trace_megatron.policy.hf_config import read_hf_config
from trace_megatron.types import ROOT, Prompt, Rollout, RolloutStatus, RolloutTree, Task, Turn


def one_trajectory(num_tokens: int):
    """Every token but the first is trained."""
    turn = Turn((1,) * (num_tokens - 1), (0.0,) * (num_tokens - 1), (), 0)
    tree = RolloutTree(Prompt("p", Task("p", (), {}), (1,)), (Rollout(ROOT, (turn,), 1.0, RolloutStatus.FINISHED),))
    return pack_trees([tree], [np.ones((1, 2))])


@pytest.mark.parametrize("family", ["llama", "qwen3", "qwen3_moe"])
def test_flops_equal_what_torch_counts(family, tmp_path):
    folder = write_tiny_model(tmp_path / family, family)
    hf, length = read_hf_config(folder), 37
    plain = {"attn_implementation": "eager", "experts_implementation": "eager"}
    model = AutoModelForCausalLM.from_pretrained(folder, **plain)
    with FlopCounterMode(display=False) as counter:
        model(torch.ones(1, length, dtype=torch.int64)).logits.sum().backward()
    # transformers computes all pairs of tokens, and projects the last row too
    per_pair = 3 * 4 * hf.num_heads * hf.head_dim * hf.num_layers
    masked = per_pair * (length**2 - length * (length + 1) // 2)
    last_row = 3 * 2 * hf.vocab_size * hf.hidden_size
    # nobody needs the gradient by the embedding's output, but all else is differentiated twice
    assert model_flops(hf, [one_trajectory(length)]) == counter.get_total_flops() - masked - last_row


@pytest.mark.parametrize("seed", range(3))
def test_blocks_equal_those_of_dense_masks(seed):
    rng = random.Random(seed)
    trees = [random_tree(rng, str(index)) for index in range(60)]
    structures = [build_structure(tree) for tree in trees]
    batch = pack_trees(trees, [np.ones((len(s.leaves), s.num_nodes)) for s in structures])
    i, j = torch.arange(batch.num_tokens)[:, None], torch.arange(batch.num_tokens)[None]
    sees = (j <= i) & (i < batch.subtree_end[None])
    padding = -batch.num_tokens % 128
    tiles = [
        torch.nn.functional.pad(mask, (0, padding, 0, padding)).unflatten(0, (-1, 128)).unflatten(2, (-1, 128))
        for mask in (sees, j <= i)
    ]
    expected = tuple(int(tile.any(3).any(1).sum()) for tile in tiles)
    assert batch.num_tokens > 256
    assert attention_blocks([batch, batch]) == (2 * expected[0], 2 * expected[1])
    assert expected[0] < expected[1]


def test_what_a_cpu_reports():
    assert peak_tflops(torch.device("cpu")) is None
    before = peak_memory_bytes(torch.device("cpu"))
    held = torch.ones(64 << 20, dtype=torch.uint8)
    assert peak_memory_bytes(torch.device("cpu")) >= max(before, held.numel())
