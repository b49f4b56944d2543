"""Ops on packed forests and on rows: native where built for the device, else the references in ``reference``."""

from trace_megatron.ops.allocate import allocate_prefixes, allocate_roots, allocate_table, check_counts
from trace_megatron.ops.attention import tree_attention
from trace_megatron.ops.block_mask import tree_block_mask
from trace_megatron.ops.pack import PackedTree, TreeCut, cut_tree, pack_tree
from trace_megatron.ops.prefix_attention import prefix_attention
from trace_megatron.ops.prefix_plan import PAGE_TOKENS, PrefixLayout, PrefixPlan
from trace_megatron.ops.reference.forest import check_subtree_end
from trace_megatron.ops.rows import rms_norm, softmax_gradient, softmax_statistics, swiglu
from trace_megatron.ops.value_head import value_head

__all__ = [
    "PAGE_TOKENS",
    "PackedTree",
    "PrefixLayout",
    "PrefixPlan",
    "TreeCut",
    "allocate_prefixes",
    "allocate_roots",
    "allocate_table",
    "check_counts",
    "check_subtree_end",
    "cut_tree",
    "pack_tree",
    "prefix_attention",
    "rms_norm",
    "softmax_gradient",
    "softmax_statistics",
    "swiglu",
    "tree_attention",
    "tree_block_mask",
    "value_head",
]
