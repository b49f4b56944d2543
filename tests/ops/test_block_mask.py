"""Block masks against FlexAttention's own, which looks at every pair of tokens."""

from __future__ import annotations

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask

from trace_megatron.ops import native, tree_block_mask

from .forests import random_forest, random_int

FIELDS = ["kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices"]
FIELDS += ["q_num_blocks", "q_indices", "full_q_num_blocks", "full_q_indices"]
BUILDS = [False, pytest.param(True, marks=pytest.mark.skipif(not native.AVAILABLE, reason="not built"))]


@pytest.mark.parametrize("built", BUILDS)
@pytest.mark.parametrize("block_size", [1, 3, 16, 128])
def test_equals_create_block_mask(built, block_size, monkeypatch):
    monkeypatch.setattr(native, "AVAILABLE", built)
    generator = torch.Generator().manual_seed(block_size)
    for index in range(25):
        num_tokens = random_int(1, min(8 * block_size, 600), generator) if index else 2 * block_size
        end = random_forest(num_tokens, generator, turn=(1, 7, block_size, 3 * block_size)[index % 4])
        actual = tree_block_mask(end, block_size)
        wanted = create_block_mask(actual.mask_mod, 1, 1, num_tokens, num_tokens, "cpu", BLOCK_SIZE=block_size)
        assert actual.seq_lengths == wanted.seq_lengths and actual.BLOCK_SIZE == wanted.BLOCK_SIZE
        for field in FIELDS:
            a, w = getattr(actual, field), getattr(wanted, field)
            assert a.dtype == w.dtype and torch.equal(a, w), (field, num_tokens, end.tolist())


@pytest.mark.parametrize("built", BUILDS)
def test_wrong_arguments_are_named(built, monkeypatch):
    monkeypatch.setattr(native, "AVAILABLE", built)
    with pytest.raises(ValueError, match="positive block size, found 0"):
        tree_block_mask(torch.tensor([1], dtype=torch.int32), 0)
    with pytest.raises(ValueError, match="int32"):
        tree_block_mask(torch.tensor([1]))
    with pytest.raises(ValueError, match="nested"):
        tree_block_mask(torch.tensor([2, 3, 3], dtype=torch.int32))


@pytest.mark.skipif(not native.AVAILABLE, reason="not built")
def test_registrations():
    end = random_forest(40, torch.Generator().manual_seed(0))
    torch.library.opcheck(torch.ops.trace_megatron.tree_block_mask.default, (end, 16))
