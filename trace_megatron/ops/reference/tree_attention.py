"""Tree attention in torch: exact, differentiable, any device, any float dtype.

Legend: Q queries, T keys, H query heads, G key/value heads, R = H / G, D head dim, B rows of a block, J keys that the
block sees.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from trace_megatron.ops.reference.forest import check_subtree_end, check_subtree_end_shape

ROWS = 128
"""Queries of a block: the only dense scores that ever exist are [H, ROWS, J]."""


def tree_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    subtree_end: torch.Tensor,
    scale: float,
    query_index: torch.Tensor | None = None,
) -> torch.Tensor:
    """As ``ops.tree_attention``. Half precision is computed in float32; backward recomputes scores block by block."""
    check(q, k, v, subtree_end, query_index)
    position = torch.arange(q.size(0), device=q.device) if query_index is None else query_index.long()
    return _TreeAttention.apply(q, k, v, subtree_end, position, float(scale))


def check(q, k, v, subtree_end, query_index) -> None:
    """Raises ValueError on wrong shapes and, on a CPU, on a broken forest."""
    same_length = query_index is not None or q.size(0) == k.size(0)
    if q.dim() != 3 or k.dim() != 3 or k.shape != v.shape or not same_length or q.size(2) != k.size(2):
        raise ValueError(
            f"expected q [T, H, D] and k, v [T, G, D], found q {list(q.shape)}, k {list(k.shape)}, v {list(v.shape)}"
        )
    if k.size(1) == 0 or q.size(1) % k.size(1):
        raise ValueError(f"expected query heads a multiple of key heads, found {q.size(1)} and {k.size(1)}")
    if not (q.dtype == k.dtype == v.dtype and q.dtype.is_floating_point):
        raise ValueError(f"expected q, k, v of one float dtype, found {q.dtype}, {k.dtype}, {v.dtype}")
    on_cpu = subtree_end.device.type == "cpu"
    (check_subtree_end if on_cpu else check_subtree_end_shape)(subtree_end, k.size(0))
    if query_index is not None:
        _check_query_index(query_index, q.size(0), k.size(0), read=on_cpu)


def _check_query_index(query_index: torch.Tensor, num_queries: int, num_keys: int, *, read: bool) -> None:
    if query_index.dtype != torch.int32 or query_index.shape != (num_queries,):
        raise ValueError(
            f"expected query_index as int32 [{num_queries}], found {query_index.dtype} {list(query_index.shape)}"
        )
    if not read:
        return
    before = torch.cat([query_index.new_full((1,), -1), query_index[:-1]])
    bad = torch.nonzero((query_index <= before) | (query_index >= num_keys)).flatten()
    if bad.numel():
        place = int(bad[0])
        raise ValueError(
            f"expected query_index increasing within [0, {num_keys}), found {int(query_index[place])} at place {place}"
        )


class _TreeAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, subtree_end, position, scale):
        out = torch.empty_like(q)
        qg, kg, vg = _by_group(q, k.size(1)), _by_group(k, k.size(1)), _by_group(v, k.size(1))
        for rows, keys, hidden in _blocks(subtree_end, position):
            probs = _probs(qg[:, :, rows], kg[:, :, keys], hidden, scale)
            out[rows] = _by_token(probs @ vg[:, :, keys].to(probs.dtype)).to(q.dtype)
        ctx.save_for_backward(q, k, v, subtree_end, position, out)
        ctx.scale = scale
        return out

    @staticmethod
    def backward(ctx, grad_out):
        q, k, v, subtree_end, position, out = ctx.saved_tensors
        groups, dtype = k.size(1), _compute_dtype(q)
        qg, kg, vg, dog = (_by_group(x, groups) for x in (q, k, v, grad_out))
        delta = _by_group((grad_out.to(dtype) * out.to(dtype)).sum(-1, keepdim=True), groups)
        grad_q = torch.empty_like(q)
        grad_k = torch.zeros(groups, k.size(0), k.size(2), dtype=dtype, device=k.device)
        grad_v = torch.zeros_like(grad_k)
        for rows, keys, hidden in _blocks(subtree_end, position):
            q_block, k_block = qg[:, :, rows].to(dtype), kg[:, :, keys].to(dtype)
            v_block, do_block = vg[:, :, keys].to(dtype), dog[:, :, rows].to(dtype)
            probs = _probs(q_block, k_block, hidden, ctx.scale)
            grad_scores = probs * (do_block @ v_block.transpose(-1, -2) - delta[:, :, rows]) * ctx.scale
            grad_q[rows] = _by_token(grad_scores @ k_block).to(q.dtype)
            grad_k.index_add_(1, keys, (grad_scores.transpose(-1, -2) @ q_block).sum(1))
            grad_v.index_add_(1, keys, (probs.transpose(-1, -2) @ do_block).sum(1))
        return grad_q, grad_k.transpose(0, 1).to(k.dtype), grad_v.transpose(0, 1).to(v.dtype), None, None, None


def _compute_dtype(x: torch.Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _by_group(x: torch.Tensor, groups: int) -> torch.Tensor:
    """[T, H, D] -> [G, R, T, D], a view."""
    return x.unflatten(1, (groups, -1)).permute(1, 2, 0, 3)


def _by_token(x: torch.Tensor) -> torch.Tensor:
    """[G, R, B, D] -> [B, H, D]."""
    return x.permute(2, 0, 1, 3).flatten(1, 2)


def _probs(q: torch.Tensor, k: torch.Tensor, hidden: torch.Tensor, scale: float) -> torch.Tensor:
    """[G, R, B, D] x [G, 1, J, D] -> attention weights [G, R, B, J] in the compute dtype."""
    dtype = _compute_dtype(q)
    scores = (q.to(dtype) * scale) @ k.to(dtype).transpose(-1, -2)
    return torch.softmax(scores.masked_fill_(hidden, float("-inf")), -1)


def _blocks(subtree_end: torch.Tensor, position: torch.Tensor) -> Iterator[tuple[slice, torch.Tensor, torch.Tensor]]:
    """Yield (rows slice, keys [J] int64 that at least one row sees, hidden [B, J] bool)."""
    for first in range(0, position.numel(), ROWS):
        rows = slice(first, min(first + ROWS, position.numel()))
        row = position[rows, None]
        keys = torch.nonzero(subtree_end[: int(row[-1]) + 1] > row[0]).flatten()
        yield rows, keys, (keys > row) | (subtree_end[keys] <= row)
