"""The tree in Megatron's forward pass: what travels through the layers, and the core attention that reads it.

Legend: T packed tokens, Q of them on this context-parallel rank, H query heads and G key-value heads of this
tensor-parallel rank, D head dim.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region

from trace_megatron.ops import tree_attention


@dataclass(frozen=True, slots=True)
class TreeSequence:
    """One pack's tree, handed to ``GPTModel.forward`` as ``packed_seq_params``, which every layer passes on.

    Under sequence parallelism too ``subtree_end`` is of the whole pack, since attention sees the gathered sequence.
    """

    subtree_end: torch.Tensor
    """[T] int32: token i attends to token j if and only if ``j <= i < subtree_end[j]``."""
    position_ids: torch.Tensor
    """[Q] int64, depth on the path of this context-parallel rank's rows; without context parallelism Q = T."""
    rows: torch.Tensor | None = None
    """[Q] int32, ascending: the rows of the pack that this rank holds; None: all."""
    gathered: torch.Tensor | None = None
    """[T] int64, where each row of the pack lies in what the context-parallel ranks' rows make one after the other."""
    qkv_format: str = "tree"
    """Read by Megatron: anything but "thd" leaves q, k and v as [T, 1, heads, D]."""
    cp_group: None = None
    """Read by Megatron for its own RoPE and attention."""


class TreeCoreAttention(torch.nn.Module):
    """Core attention of a Megatron self-attention layer over one tree; scores are scaled by 1 / sqrt(D)."""

    def __init__(
        self,
        config,
        layer_number,
        attn_mask_type,
        attention_type,
        cp_comm_type=None,
        softmax_scale=None,
        pg_collection=None,
    ):
        super().__init__()
        self.context_group = pg_collection.cp if config.context_parallel_size > 1 else None
        self.scale = config.kv_channels**-0.5 if softmax_scale is None else softmax_scale

    def forward(
        self, query, key, value, attention_mask, attn_mask_type=None, attention_bias=None, packed_seq_params=None
    ):
        """query [Q, 1, H, D], key and value [Q, 1, G, D] -> [Q, 1, H * D]."""
        tree = packed_seq_params
        if not isinstance(tree, TreeSequence):
            raise TypeError(f"expected a TreeSequence as packed_seq_params, found {type(tree).__name__}")
        query, key, value = query[:, 0], key[:, 0], value[:, 0]
        if self.context_group is not None:
            key, value = self._gather(torch.stack((key, value), dim=1), tree.gathered).unbind(1)
        out = tree_attention(query, key, value, tree.subtree_end, self.scale, tree.rows)
        return out.reshape(out.shape[0], 1, -1)

    def _gather(self, mine: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
        """[Q, ...] of every rank -> [T, ...] in the pack's order; the gradients of all ranks' queries are summed."""
        return gather_from_sequence_parallel_region(mine, group=self.context_group).index_select(0, order)
