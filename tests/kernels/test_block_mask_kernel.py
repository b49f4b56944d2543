"""The block mask's kernel against FlexAttention's own mask, which looks at every pair of tokens, and the reference."""

from __future__ import annotations

import functools

import pytest
import torch
from ops.forests import random_forest, random_int
from torch.nn.attention.flex_attention import create_block_mask

from trace_megatron.ops.reference import block_mask as reference

from .simt import Kernel

NAMES = ["partial_key", "full_key", "partial_query", "full_query"]


@functools.cache
def kernel() -> Kernel:
    return Kernel("tree_block_mask.cu")


def block_lists(subtree_end, block_size, **how):
    num_blocks = -(-subtree_end.numel() // block_size)
    fields = {"subtree_end": subtree_end, "ends": ((2, num_blocks), torch.int32)}
    fields |= {f"{name}_count": ((1, 1, num_blocks), torch.int32) for name in NAMES}
    fields |= {f"{name}_index": ((1, 1, num_blocks, num_blocks), torch.int32) for name in NAMES}
    fields |= {"num_tokens": subtree_end.numel(), "block_size": block_size}
    out = kernel().run("launch_tree_block_mask", "TreeBlockMaskParams", fields, **how)
    return [out[f"{name}_{part}"] for name in NAMES for part in ("count", "index")]


@pytest.mark.parametrize("block_size", [1, 3, 16, 128])
def test_equals_the_reference(block_size):
    generator = torch.Generator().manual_seed(block_size)
    for case in range(60):
        num_tokens = random_int(1, min(70 * block_size, 700), generator) if case > 1 else case * block_size
        end = random_forest(num_tokens, generator, turn=(1, 7, block_size, 3 * block_size)[case % 4])
        wanted = reference.tree_block_mask(end, block_size)
        for actual, w in zip(block_lists(end, block_size, seed=case), wanted, strict=True):
            assert torch.equal(actual, w), (num_tokens, end.tolist())


def test_equals_create_block_mask():
    generator = torch.Generator().manual_seed(7)
    for num_tokens, block_size in [(600, 16), (257, 128), (40, 1)]:
        end = random_forest(num_tokens, generator, turn=11)

        def mask_mod(b, h, q, k, end=end):
            return (k <= q) & (q < end[k])

        wanted = create_block_mask(mask_mod, 1, 1, num_tokens, num_tokens, "cpu", BLOCK_SIZE=block_size)
        lists = [wanted.kv_num_blocks, wanted.kv_indices, wanted.full_kv_num_blocks, wanted.full_kv_indices]
        lists += [wanted.q_num_blocks, wanted.q_indices, wanted.full_q_num_blocks, wanted.full_q_indices]
        assert all(torch.equal(a, w) for a, w in zip(block_lists(end, block_size), lists, strict=True))


def test_values_that_are_no_forest_stay_within_bounds():
    generator = torch.Generator().manual_seed(8)
    for case in range(20):
        end = torch.randint(-(2**31), 2**31 - 1, (300,), generator=generator).int()
        for lists in block_lists(end, 16, seed=case)[1::2]:
            assert torch.equal(lists.sort(-1).values, torch.arange(19, dtype=torch.int32).expand(1, 1, 19, 19))


def test_bytes_are_those_on_paper():
    end = random_forest(4096, torch.Generator().manual_seed(9), turn=50)
    block_lists(end, 16)
    counts = kernel().counts
    lists = 16 * 256 * 256
    assert lists <= counts.bytes_written < 1.02 * lists + 32 * 256
