"""Attention over known prefixes and new tokens: pages in place by the CUDA kernel, or as one pack everywhere else.

Legend: T new tokens, H query heads, G key/value heads, D head dim, S slots of the pool.
"""

from __future__ import annotations

import torch

from trace_megatron.ops import native
from trace_megatron.ops.attention import tree_attention
from trace_megatron.ops.prefix_plan import PAGE_TOKENS, PrefixPlan

HEAD_DIMS = (64, 128)
"""Of the kernel, which takes bfloat16 alone."""


def prefix_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    key_pages: torch.Tensor | None,
    value_pages: torch.Tensor | None,
    plan: PrefixPlan,
    scale: float,
) -> torch.Tensor:
    """Softmax attention of new tokens over their prompt's prefix and over the new tokens on their own path.

    q [T, H, D], k, v [T, G, D] of the new tokens; key_pages, value_pages [S, G, D], the pool, or None without prefixes;
    all of one dtype. Returns [T, H, D], without gradients. No value is read on the host. Raises ValueError on other
    shapes, devices or dtypes, and where the plan's pages lie outside the pool.
    """
    _check(q, k, v, key_pages, value_pages, plan, scale)
    if kernel_takes(q):
        tiles = plan.tiles
        pools = (k[:0], v[:0]) if key_pages is None or value_pages is None else (key_pages, value_pages)
        lists = (tiles.subtree_end, tiles.page_table, tiles.items, tiles.key_tiles)
        return torch.ops.trace_megatron.prefix_attention(q, k, v, *pools, *lists, tiles.rows, scale)
    if not plan.has_prefixes:
        return tree_attention(q, k, v, plan.subtree_end, scale)
    packed = plan.packed
    keys, values = (
        _pack(new, pool, packed.query_index, packed.prefix_index, packed.slots)
        for new, pool in ((k, key_pages), (v, value_pages))
    )
    return tree_attention(q, keys, values, packed.subtree_end, scale, packed.query_index)


def kernel_takes(q: torch.Tensor) -> bool:
    """Whether the CUDA kernel runs for queries like these."""
    if q.device.type != "cuda" or q.dtype != torch.bfloat16 or q.size(-1) not in HEAD_DIMS:
        return False
    return native.has("prefix_attention", q.device)


def _pack(new, pool, query_index, prefix_index, slots) -> torch.Tensor:
    everything = new.new_empty(query_index.numel() + prefix_index.numel(), *new.shape[1:])
    everything[query_index] = new
    everything[prefix_index] = pool[slots]
    return everything


def _check(q, k, v, key_pages, value_pages, plan: PrefixPlan, scale: float) -> None:
    expected = (plan.num_tokens, plan.num_heads), (plan.num_tokens, plan.num_groups)
    if q.dim() != 3 or k.dim() != 3 or q.shape[:2] != expected[0] or k.shape[:2] != expected[1] or k.shape != v.shape:
        raise ValueError(
            f"expected q {[*expected[0], 'D']} and k, v {[*expected[1], 'D']} as planned, found q {list(q.shape)}, "
            f"k {list(k.shape)}, v {list(v.shape)}"
        )
    tensors = {"k": k, "v": v}
    if plan.has_prefixes:
        if key_pages is None or value_pages is None or key_pages.shape != value_pages.shape:
            raise ValueError("expected key_pages and value_pages of one shape for the plan's prefixes, found none")
        num_pages = key_pages.size(0) // PAGE_TOKENS
        if key_pages.shape[1:] != k.shape[1:] or plan.max_page >= num_pages:
            raise ValueError(
                f"expected pages [S, {k.size(1)}, {k.size(2)}] that hold page {plan.max_page}, found "
                f"{list(key_pages.shape)}, {num_pages} pages"
            )
        tensors |= {"key_pages": key_pages, "value_pages": value_pages}
    for name, x in tensors.items():
        if x.dtype != q.dtype or x.device != q.device:
            raise ValueError(f"expected {name} as {q.dtype} on {q.device} like q, found {x.dtype} on {x.device}")
    if q.device.type != plan.device.type:
        raise ValueError(f"expected a plan for {q.device}, found one for {plan.device}")
    if not 0.0 < scale < float("inf"):
        raise ValueError(f"expected a positive finite scale, found {scale}")
