"""How the rows of a pack are dealt to context-parallel ranks."""

import random

import numpy as np
import pytest
import torch

from tests.algorithm.trees import random_tree
from trace_megatron.algorithm.pack import pack_trees, pad_batch
from trace_megatron.algorithm.tree import build_structure
from trace_megatron.policy.context import block_rows, deal_rows


def forest(seed: int, num_trees: int):
    rng = random.Random(seed)
    trees = [random_tree(rng, str(index)) for index in range(num_trees)]
    structures = [build_structure(tree) for tree in trees]
    return pack_trees(trees, [np.ones((len(s.leaves), s.num_nodes)) for s in structures])


def chain(num_tokens: int):
    """A single trajectory: where dealing rows one after the other is worst."""
    return torch.arange(num_tokens), torch.full((num_tokens,), num_tokens)


def visited(rows: torch.Tensor, subtree_end: torch.Tensor, block: int) -> int:
    """By brute force: keys that some row of a block sees, times the block's rows."""
    j = torch.arange(subtree_end.numel())
    sees = (j[None] <= rows[:, None]) & (rows[:, None] < subtree_end[None])
    return block * sum(int(part.any(0).sum()) for part in sees.split(block))


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
@pytest.mark.parametrize("multiple", [1, 2])
@pytest.mark.parametrize("seed", range(4))
def test_every_row_once_equally_many_and_equal_work(num_ranks, multiple, seed):
    batch = forest(seed, 40)
    block = block_rows(batch.num_tokens, num_ranks, multiple)
    batch = pad_batch(batch, block * num_ranks)
    dealt = deal_rows(batch.position_ids, num_ranks, block)
    assert dealt.shape == (num_ranks, batch.num_tokens // num_ranks) and dealt.shape[1] % multiple == 0
    assert torch.equal(dealt.flatten().sort().values, torch.arange(batch.num_tokens))
    assert all(torch.equal(rows, rows.sort().values) for rows in dealt)
    work = [visited(rows, batch.subtree_end, block) for rows in dealt]
    assert max(work) <= 1.1 * np.mean(work), work


@pytest.mark.parametrize("num_ranks", [2, 4, 8])
def test_a_long_trajectory_is_balanced_where_halves_are_not(num_ranks):
    positions, ends = chain(4096)
    block = block_rows(4096, num_ranks, 1)
    work = [visited(rows, ends, block) for rows in deal_rows(positions, num_ranks, block)]
    in_turn = [visited(rows, ends, block) for rows in torch.arange(4096).chunk(num_ranks)]
    assert max(work) <= 1.05 * np.mean(work)
    assert max(in_turn) >= 1.4 * np.mean(in_turn)


@pytest.mark.parametrize("num_tokens", [1, 2, 7, 1000, 100_000])
@pytest.mark.parametrize("multiple", [1, 3])
def test_blocks_are_whole_multiples_and_never_long(num_tokens, multiple):
    block = block_rows(num_tokens, 4, multiple)
    assert block % multiple == 0 and multiple <= block < 128 + multiple
