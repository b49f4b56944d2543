"""Context parallelism: which rows of a pack each rank holds, so that all have equally many and equal attention work.

Every rank attends from its own rows to the keys and values of the whole pack, which are gathered. T packed tokens, C
ranks, B rows of a block.
"""

from __future__ import annotations

import torch

BLOCK_ROWS = 128
"""Rows are dealt in runs of at most this many: a run visits its ancestors' keys once for all its rows."""
_BLOCKS_PER_RANK = 8  # enough to even out the work of a short pack


def block_rows(num_tokens: int, num_ranks: int, multiple: int) -> int:
    """B for a pack: a multiple of ``multiple``. The pack must be padded to a multiple of B * num_ranks."""
    wanted = min(BLOCK_ROWS, -(-num_tokens // (num_ranks * _BLOCKS_PER_RANK)))
    return -(-wanted // multiple) * multiple


def deal_rows(position_ids: torch.Tensor, num_ranks: int, block: int) -> torch.Tensor:
    """[C, T / C] int64: each rank's rows of the pack, ascending.

    ``position_ids`` [T], depth on the path: what the rows i..j see are the ``position_ids[i]`` ancestors of i and one
    another. So a block's visited keys are ``position_ids[first] + block``. Blocks go, most work first, to the rank
    with the least among those that may still take one.
    """
    num_blocks = position_ids.numel() // block
    work = (position_ids[::block] + block).tolist()
    loads, dealt = [0] * num_ranks, [[] for _ in range(num_ranks)]
    for index in sorted(range(num_blocks), key=lambda i: -work[i]):
        rank = min((r for r in range(num_ranks) if len(dealt[r]) < num_blocks // num_ranks), key=loads.__getitem__)
        dealt[rank].append(index)
        loads[rank] += work[index]
    first = torch.tensor([sorted(blocks) for blocks in dealt]) * block
    return (first[:, :, None] + torch.arange(block)).flatten(1)
