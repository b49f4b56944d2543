"""A small float64 transformer over a packed forest: RoPE by position id, grouped heads, tree attention."""

from __future__ import annotations

import torch

from trace_megatron.ops import tree_attention

from .trees import VOCABULARY

HEADS, GROUPS, DIM, LAYERS = 4, 2, 4, 2
WIDTH = HEADS * DIM


class TinyModel(torch.nn.Module):
    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)

        def weight(*shape: int) -> torch.nn.Parameter:
            return torch.nn.Parameter(torch.randn(*shape, generator=generator, dtype=torch.float64) * 0.35)

        self.embedding = weight(VOCABULARY, WIDTH)
        self.layers = torch.nn.ParameterList()
        for _ in range(LAYERS):
            self.layers.extend([weight(WIDTH, (HEADS + 2 * GROUPS) * DIM), weight(WIDTH, WIDTH), weight(WIDTH, WIDTH)])
        self.head = weight(WIDTH, VOCABULARY)

    def forward(self, tokens: torch.Tensor, position_ids: torch.Tensor, subtree_end: torch.Tensor) -> torch.Tensor:
        """Hidden states [T, WIDTH]."""
        x = self.embedding[tokens]
        for qkv, out, mlp in zip(self.layers[::3], self.layers[1::3], self.layers[2::3], strict=True):
            q, k, v = (_norm(x) @ qkv).unflatten(-1, (-1, DIM)).split([HEADS, GROUPS, GROUPS], dim=1)
            attended = tree_attention(_rope(q, position_ids), _rope(k, position_ids), v, subtree_end, DIM**-0.5)
            x = x + attended.flatten(1) @ out
            x = x + torch.nn.functional.silu(_norm(x) @ mlp)
        return _norm(x)

    def edge_logprobs(self, hidden: torch.Tensor, rows: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """[E] log-probability of ``labels`` at hidden ``rows``."""
        return torch.log_softmax(hidden[rows] @ self.head, -1).gather(1, labels[:, None])[:, 0]


def _norm(x: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)


def _rope(x: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
    angle = position_ids[:, None, None].double() / 10.0 ** torch.arange(DIM // 2, dtype=torch.float64)
    first, second = x.chunk(2, -1)
    return torch.cat([first * angle.cos() - second * angle.sin(), second * angle.cos() + first * angle.sin()], -1)
