"""Tree attention by FlexAttention: what trains on a CUDA device. The mask costs blocks x blocks, never tokens x tokens.

Legend: Q queries, T keys, H query heads, G key/value heads, D head dim, B tokens of a block.
"""

from __future__ import annotations

from functools import cache

import torch
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from trace_megatron.ops.block_mask import tree_block_mask

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_BLOCK = 128


def tree_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    subtree_end: torch.Tensor,
    scale: float,
    query_index: torch.Tensor | None = None,
) -> torch.Tensor:
    """As ``ops.tree_attention``. Nothing is read back from the device; shapes are free, one compilation serves them."""
    attend = _compiled() if q.device.type == "cuda" else flex_attention
    out = attend(
        *(x.transpose(0, 1)[None] for x in (q, k, v)),
        block_mask=_last_mask(subtree_end, query_index),
        scale=scale,
        enable_gqa=q.size(1) != k.size(1),
    )
    return out[0].transpose(0, 1)


@cache
def _compiled():
    return torch.compile(flex_attention, dynamic=True)


class _LastMask:
    """The latest mask: all layers of a pass ask for one and the same."""

    def __init__(self) -> None:
        self._key: tuple[object, ...] = ()
        self._inputs: tuple[torch.Tensor | None, ...] = ()  # held, so that no other tensor gets their identity
        self._mask: BlockMask | None = None

    def __call__(self, subtree_end: torch.Tensor, query_index: torch.Tensor | None) -> BlockMask:
        inputs = (subtree_end, query_index)
        key = tuple((id(x), x._version) for x in inputs if x is not None)
        if self._mask is None or key != self._key:
            mask = tree_block_mask(subtree_end) if query_index is None else rows_block_mask(subtree_end, query_index)
            self._key, self._inputs, self._mask = key, inputs, mask
        return self._mask


_last_mask = _LastMask()


def rows_block_mask(subtree_end: torch.Tensor, query_index: torch.Tensor, block_size: int = _BLOCK) -> BlockMask:
    """The mask of queries at increasing positions ``query_index`` [Q] int32 among T keys; on their device."""
    num_queries, num_keys = query_index.numel(), subtree_end.numel()
    lowest, highest = _bounds(query_index, block_size)
    least_end, most_end = _bounds(subtree_end, block_size)
    first_key = torch.arange(most_end.numel(), device=subtree_end.device) * block_size
    seen = (first_key <= highest[:, None]) & (most_end > lowest[:, None])
    first_row = torch.arange(highest.numel(), device=subtree_end.device)[:, None] * block_size
    whole = (first_key + block_size <= num_keys) & (first_row + block_size <= num_queries)
    full = seen & whole & (first_key + block_size - 1 <= lowest[:, None]) & (least_end > highest[:, None])

    def mask_mod(b, h, q_idx, kv_idx):
        position = query_index[q_idx]
        return (kv_idx <= position) & (position < subtree_end[kv_idx])

    return BlockMask.from_kv_blocks(
        *_ordered(seen & ~full),
        *_ordered(full),
        BLOCK_SIZE=(block_size, block_size),
        mask_mod=mask_mod,
        seq_lengths=(num_queries, num_keys),
    )


def _bounds(values: torch.Tensor, block_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The least and the most of each block; the last one is filled up with the last value."""
    num_blocks = -(-values.numel() // block_size)
    fill = values[-1:].expand(num_blocks * block_size - values.numel())
    return torch.aminmax(torch.cat([values, fill]).view(num_blocks, block_size), dim=1)


def _ordered(dense: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    index = torch.argsort(dense.int(), dim=-1, descending=True, stable=True)
    return dense.sum(-1).int()[None, None], index.int()[None, None]
