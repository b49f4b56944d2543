"""The mask of a forest for FlexAttention."""

from __future__ import annotations

import torch
from torch.nn.attention.flex_attention import BlockMask

from trace_megatron.ops import native
from trace_megatron.ops.reference import block_mask as reference


def tree_block_mask(subtree_end: torch.Tensor, block_size: int = 128) -> BlockMask:
    """What ``create_block_mask`` gives for a forest, straight from ``subtree_end`` [T] int32: no T x T work.

    Batch and heads are 1. Raises ValueError on a broken forest where it can be read without waiting for a GPU: on a
    CPU, or where the op was not built for the GPU and the lists are made on the CPU.
    """
    if native.has("tree_block_mask", subtree_end.device):
        lists = torch.ops.trace_megatron.tree_block_mask(subtree_end, block_size)
    else:
        build = torch.ops.trace_megatron.tree_block_mask if native.AVAILABLE else reference.tree_block_mask
        lists = [x.to(subtree_end.device) for x in build(subtree_end.cpu(), block_size)]

    def mask_mod(b, h, q_idx, kv_idx):
        return (kv_idx <= q_idx) & (q_idx < subtree_end[kv_idx])

    length = subtree_end.numel()
    return BlockMask((length, length), *lists, BLOCK_SIZE=(block_size, block_size), mask_mod=mask_mod)


def _fake(subtree_end, block_size):
    num_blocks = (subtree_end.size(0) + block_size - 1) // block_size
    count = subtree_end.new_empty((1, 1, num_blocks))
    index = subtree_end.new_empty((1, 1, num_blocks, num_blocks))
    return [torch.empty_like(x) for _ in range(4) for x in (count, index)]


if native.AVAILABLE:
    torch.library.register_fake("trace_megatron::tree_block_mask", _fake)
