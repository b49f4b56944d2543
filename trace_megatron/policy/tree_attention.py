"""The tree in Megatron's forward pass: what travels through the layers, and the core attention that reads it.

Legend: T packed tokens, H query heads and G key-value heads of this tensor-parallel rank, D head dim.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from trace_megatron.ops import tree_attention


@dataclass(frozen=True, slots=True)
class TreeSequence:
    """One pack's tree, handed to ``GPTModel.forward`` as ``packed_seq_params``, which every layer passes on.

    Always the whole pack: under sequence parallelism too, where attention sees the gathered sequence.
    """

    subtree_end: torch.Tensor
    """[T] int32: token i attends to token j if and only if ``j <= i < subtree_end[j]``."""
    position_ids: torch.Tensor
    """[T] int64, depth on the path."""
    qkv_format: str = "tree"
    """Read by Megatron: anything but "thd" leaves q, k and v as [T, 1, heads, D]."""
    cp_group: None = None
    """Read by Megatron: context parallelism is not used."""


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
        if config.context_parallel_size != 1:
            raise NotImplementedError(
                f"tree attention expects context parallel size 1, not {config.context_parallel_size}"
            )
        self.scale = config.kv_channels**-0.5 if softmax_scale is None else softmax_scale

    def forward(
        self, query, key, value, attention_mask, attn_mask_type=None, attention_bias=None, packed_seq_params=None
    ):
        """query [T, 1, H, D], key and value [T, 1, G, D] -> [T, 1, H * D]."""
        tree = packed_seq_params
        if not isinstance(tree, TreeSequence):
            raise TypeError(f"expected a TreeSequence as packed_seq_params, found {type(tree).__name__}")
        out = tree_attention(query[:, 0], key[:, 0], value[:, 0], tree.subtree_end, self.scale)
        return out.reshape(out.shape[0], 1, -1)
