"""Ops on packed forests. Each has a torch reference in ``reference.py``."""

from trace_megatron.ops.reference import check_subtree_end, tree_attention

__all__ = ["check_subtree_end", "tree_attention"]
