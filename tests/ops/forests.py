"""Random forests, and attention over them written as one dense softmax in float64."""

from __future__ import annotations

import torch


def random_forest(num_tokens: int, generator: torch.Generator, turn: int = 3) -> torch.Tensor:
    """subtree_end in which every ``turn``-th token hangs below a random token of the path, or is a root."""
    end = [num_tokens] * num_tokens
    path: list[int] = []
    for token in range(num_tokens):
        keep = random_int(0, len(path) + 1, generator) if token % turn == 0 else len(path)
        for closed in path[keep:]:
            end[closed] = token
        path = [*path[:keep], token]
    return torch.tensor(end, dtype=torch.int32)


def random_int(low: int, high: int, generator: torch.Generator) -> int:
    return int(torch.randint(low, high, (), generator=generator))


def dense_attention(q, k, v, subtree_end, scale, query_index=None) -> torch.Tensor:
    """[Q, H, D], differentiable, in the dtype of its inputs."""
    key = torch.arange(k.size(0))
    position = key if query_index is None else query_index.long()
    seen = (key <= position[:, None]) & (position[:, None] < subtree_end)
    repeats = q.size(1) // k.size(1)
    scores = torch.einsum("qhd,khd->hqk", q, k.repeat_interleave(repeats, 1)) * scale
    probs = scores.masked_fill(~seen, float("-inf")).softmax(-1)
    return torch.einsum("hqk,khd->qhd", probs, v.repeat_interleave(repeats, 1))


def attention_inputs(num_tokens, heads, groups, dim, dtype, generator, num_queries=None):
    """q, k, v that require gradients, and a gradient of the output."""
    queries = (num_tokens if num_queries is None else num_queries, heads, dim)
    keys = (num_tokens, groups, dim)
    q, k, v, grad = (
        torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
        for shape in (queries, keys, keys, queries)
    )
    return q.requires_grad_(), k.requires_grad_(), v.requires_grad_(), grad
