"""Torch references of the ops: exact, differentiable, any device, any float dtype.

Legend: T packed tokens, H query heads, G key/value heads, R = H / G, D head dim, B rows of a block,
J keys that the block sees.
"""

from __future__ import annotations

import torch

_ROWS = 128  # per block; the only dense scores that ever exist are [H, _ROWS, J]


def check_subtree_end(subtree_end: torch.Tensor, num_tokens: int) -> None:
    """Raise ValueError unless ``subtree_end`` [T] int32 describes a forest in preorder. O(T log T), reads values back.

    Intervals [j, subtree_end[j]) must be nested or disjoint. Sorted by (end ascending, start descending),
    an interval's rank equals (intervals left of it) + (intervals inside it), for all j, exactly then: the
    interval with the largest end among crossing ones has others crossing from the left and none from the right.
    """
    check_subtree_end_shape(subtree_end, num_tokens)
    if num_tokens == 0:
        return
    end = subtree_end.long()
    start = torch.arange(num_tokens, device=end.device)
    bad = torch.nonzero((end <= start) | (end > num_tokens)).flatten()
    if bad.numel():
        j = int(bad[0])
        raise ValueError(f"expected {j} < subtree_end[{j}] <= {num_tokens}, found {int(end[j])}")
    ended = torch.cumsum(torch.bincount(end, minlength=num_tokens + 1), 0)
    rank = torch.empty_like(start)
    rank[torch.argsort(end * (num_tokens + 1) - start)] = start
    crossing = torch.nonzero(rank != ended[start] + end - start - 1).flatten()
    if crossing.numel():
        j = int(crossing[0])
        raise ValueError(
            f"expected nested subtrees, found subtree [{j}, {int(end[j])}) crossing another one: "
            "lay the forest out in preorder"
        )


def check_subtree_end_shape(subtree_end: torch.Tensor, num_tokens: int) -> None:
    """Raise ValueError unless ``subtree_end`` is int32 [num_tokens]; reads no values."""
    if subtree_end.dtype != torch.int32 or subtree_end.shape != (num_tokens,):
        raise ValueError(
            f"expected subtree_end as int32 [{num_tokens}], found {subtree_end.dtype} {list(subtree_end.shape)}"
        )


def tree_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, subtree_end: torch.Tensor, scale: float
) -> torch.Tensor:
    """Softmax attention in which token i sees token j if and only if ``j <= i < subtree_end[j]``.

    q [T, H, D], k [T, G, D], v [T, G, D] of one float dtype, H a multiple of G; subtree_end [T] int32; returns
    [T, H, D]. Half precision is computed in float32. Never holds a T x T array; backward recomputes the scores block by
    block. Raises ValueError on wrong shapes and, on a CPU, where reading values costs no synchronisation, on a broken
    forest.
    """
    _check(q, k, v, subtree_end)
    return _TreeAttention.apply(q, k, v, subtree_end, float(scale))


def _check(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, subtree_end: torch.Tensor) -> None:
    if q.dim() != 3 or k.dim() != 3 or k.shape != v.shape or q.size(0) != k.size(0) or q.size(2) != k.size(2):
        raise ValueError(
            f"expected q [T, H, D] and k, v [T, G, D], found q {list(q.shape)}, k {list(k.shape)}, v {list(v.shape)}"
        )
    if k.size(1) == 0 or q.size(1) % k.size(1):
        raise ValueError(f"expected query heads a multiple of key heads, found {q.size(1)} and {k.size(1)}")
    if not (q.dtype == k.dtype == v.dtype and q.dtype.is_floating_point):
        raise ValueError(f"expected q, k, v of one float dtype, found {q.dtype}, {k.dtype}, {v.dtype}")
    if subtree_end.device.type == "cpu":
        check_subtree_end(subtree_end, q.size(0))
    else:
        check_subtree_end_shape(subtree_end, q.size(0))


class _TreeAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, subtree_end, scale):
        out = torch.empty_like(q)
        qg, kg, vg = _by_group(q, k.size(1)), _by_group(k, k.size(1)), _by_group(v, k.size(1))
        for rows, keys, hidden in _blocks(subtree_end):
            probs = _probs(qg[:, :, rows], kg[:, :, keys], hidden, scale)
            out[rows] = _by_token(probs @ vg[:, :, keys].to(probs.dtype)).to(q.dtype)
        ctx.save_for_backward(q, k, v, subtree_end, out)
        ctx.scale = scale
        return out

    @staticmethod
    def backward(ctx, grad_out):
        q, k, v, subtree_end, out = ctx.saved_tensors
        groups, dtype = k.size(1), _compute_dtype(q)
        qg, kg, vg, dog = (_by_group(x, groups) for x in (q, k, v, grad_out))
        delta = _by_group((grad_out.to(dtype) * out.to(dtype)).sum(-1, keepdim=True), groups)
        grad_q = torch.empty_like(q)
        grad_k = torch.zeros(groups, k.size(0), k.size(2), dtype=dtype, device=k.device)
        grad_v = torch.zeros_like(grad_k)
        for rows, keys, hidden in _blocks(subtree_end):
            q_block, k_block = qg[:, :, rows].to(dtype), kg[:, :, keys].to(dtype)
            v_block, do_block = vg[:, :, keys].to(dtype), dog[:, :, rows].to(dtype)
            probs = _probs(q_block, k_block, hidden, ctx.scale)
            grad_scores = probs * (do_block @ v_block.transpose(-1, -2) - delta[:, :, rows]) * ctx.scale
            grad_q[rows] = _by_token(grad_scores @ k_block).to(q.dtype)
            grad_k.index_add_(1, keys, (grad_scores.transpose(-1, -2) @ q_block).sum(1))
            grad_v.index_add_(1, keys, (probs.transpose(-1, -2) @ do_block).sum(1))
        return grad_q, grad_k.transpose(0, 1).to(k.dtype), grad_v.transpose(0, 1).to(v.dtype), None, None


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


def _blocks(subtree_end: torch.Tensor):
    """Yield (rows slice, keys [J] int64 that at least one row sees, hidden [B, J] bool)."""
    num_tokens = subtree_end.numel()
    position = torch.arange(num_tokens, device=subtree_end.device)
    for first in range(0, num_tokens, _ROWS):
        last = min(first + _ROWS, num_tokens)
        keys = torch.nonzero(subtree_end[:last] > first).flatten()
        row = position[first:last, None]
        yield slice(first, last), keys, (keys > row) | (subtree_end[keys] <= row)
