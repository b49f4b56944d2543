"""Ops on packed forests: native on a CPU where they were built, else the torch references in ``reference``."""

from trace_megatron.ops.attention import tree_attention
from trace_megatron.ops.reference.forest import check_subtree_end

__all__ = ["check_subtree_end", "tree_attention"]
