"""FlexAttention's block lists of a forest in torch; blocks x blocks work, never tokens x tokens."""

from __future__ import annotations

import torch

from trace_megatron.ops.reference.forest import check_subtree_end


def tree_block_mask(subtree_end: torch.Tensor, block_size: int) -> list[torch.Tensor]:
    """Counts [1, 1, N] and indices [1, 1, N, N], int32, of partial keys, full keys, partial queries, full queries."""
    check_subtree_end(subtree_end, subtree_end.numel())
    if block_size < 1:
        raise ValueError(f"expected a positive block size, found {block_size}")
    num_tokens = subtree_end.numel()
    num_blocks = -(-num_tokens // block_size)
    padding = num_blocks * block_size - num_tokens
    by_block = torch.cat([subtree_end, subtree_end.new_full((padding,), num_tokens)]).view(num_blocks, block_size)
    lowest, highest = by_block.amin(1), by_block.amax(1)
    block = torch.arange(num_blocks, device=subtree_end.device)
    query, key = block[:, None], block[None, :]
    own_is_full = block_size == 1
    seen = (key < query) & (highest > query * block_size) | (key == query)
    full = (key < query) & (lowest >= (query + 1) * block_size) | (key == query) & own_is_full
    partial = seen & ~full
    return [x for dense in (partial, full, partial.T, full.T) for x in _ordered(dense)]


def _ordered(dense: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    index = torch.argsort(dense.int(), dim=-1, descending=True, stable=True)
    return dense.sum(-1).int()[None, None], index.int()[None, None]
