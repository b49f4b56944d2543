"""Ops on packed forests: native on a CPU where they were built, else the references in ``reference``."""

from trace_megatron.ops.allocate import allocate_prefixes, allocate_roots, allocate_table
from trace_megatron.ops.attention import tree_attention
from trace_megatron.ops.block_mask import tree_block_mask
from trace_megatron.ops.pack import PackedTree, TreeCut, cut_tree, pack_tree
from trace_megatron.ops.reference.forest import check_subtree_end
from trace_megatron.ops.value_head import value_head

__all__ = [
    "PackedTree",
    "TreeCut",
    "allocate_prefixes",
    "allocate_roots",
    "allocate_table",
    "check_subtree_end",
    "cut_tree",
    "pack_tree",
    "tree_attention",
    "tree_block_mask",
    "value_head",
]
