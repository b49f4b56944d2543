"""FlexAttention's forward pass on a CPU, with our masks, against one dense softmax in float64."""

from __future__ import annotations

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask

from trace_megatron.ops import flex

from .forests import attention_inputs, dense_attention, random_forest


def make_case(index):
    generator = torch.Generator().manual_seed(index)
    num_tokens = (1, 5, 128, 129, 300)[index % 5]
    end = random_forest(num_tokens, generator, turn=(1, 3, 40)[index % 3])
    chosen = torch.rand(num_tokens, generator=generator) < 0.3
    chosen[-1] = True
    return generator, end, torch.nonzero(chosen).flatten().int()


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("some", [False, True])
def test_random_trees(some):
    for index in (1, 3):
        generator, end, rows = make_case(index)
        query_index = rows if some else None
        inputs = attention_inputs(
            end.numel(), 4, 2, 16, torch.float32, generator, rows.numel() if some else end.numel()
        )
        q, k, v = (x.detach() for x in inputs[:3])
        wanted = dense_attention(q.double(), k.double(), v.double(), end, 0.25, query_index)
        actual = flex.tree_attention(q, k, v, end, 0.25, query_index)
        torch.testing.assert_close(actual.double(), wanted, rtol=0, atol=5e-6)


def test_blocks_of_rows_are_those_that_every_pair_of_tokens_gives():
    for index in range(10):
        _, end, rows = make_case(index)
        actual = flex.rows_block_mask(end, rows, 16)
        wanted = create_block_mask(actual.mask_mod, 1, 1, rows.numel(), end.numel(), device="cpu", BLOCK_SIZE=16)
        assert torch.equal(actual.to_dense(), wanted.to_dense())
        assert torch.equal(actual.kv_num_blocks, wanted.kv_num_blocks)
        assert torch.equal(actual.full_kv_num_blocks, wanted.full_kv_num_blocks)


def test_a_mask_is_made_once_for_all_layers_and_anew_for_other_values(monkeypatch):
    made = []
    monkeypatch.setattr(flex, "tree_block_mask", lambda end: made.append(end.clone()) or end)
    last = flex._LastMask()
    end = torch.tensor([3, 2, 3], dtype=torch.int32)
    assert last(end, None) is last(end, None) and len(made) == 1
    end[1] = 3
    last(end, None)
    last(end.clone(), None)
    assert len(made) == 3
