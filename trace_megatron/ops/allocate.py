"""Allocation of whole batches in one call: many pools of prompts, many prompts' prefixes.

Legend: P probabilities, S segments; segment s holds entries ``offsets[s]`` up to ``offsets[s + 1]``. CPU tensors.
"""

from __future__ import annotations

import torch

from trace_megatron.ops import native
from trace_megatron.ops.reference import allocate as reference


def allocate_roots(
    success_probs: torch.Tensor,
    budgets: torch.Tensor,
    offsets: torch.Tensor | None = None,
    *,
    max_rollouts: int | None = None,
    exact: bool = True,
) -> torch.Tensor:
    """Bare rollouts m per prompt, int64 [P], that maximise sum 1 - v^m - (1 - v)^m in each segment: exact.

    success_probs [P] float32 or float64 in [0, 1]; utilities are float64. budgets [S] int64: a segment's m sum to its
    budget, or, where ``exact`` is False, to at most that, and units of zero value are not spent. m is 0 or from 2 to
    ``max_rollouts`` (None: no cap). offsets [S + 1] int64 (None: one segment). Raises ValueError where a budget is
    infeasible. arXiv 2606.11119, stage 1.
    """
    allocate = torch.ops.trace_megatron.allocate_roots if native.AVAILABLE else reference.allocate_roots
    return allocate(success_probs, budgets, _offsets(success_probs, offsets), max_rollouts, exact)


def allocate_prefixes(
    repeat_probs: torch.Tensor, budgets: torch.Tensor, offsets: torch.Tensor | None = None
) -> torch.Tensor:
    """Continuations K per prefix, int64 [P], that sum to each segment's budget and maximise sum 1 - q^K: exact.

    repeat_probs [P] float32 or float64 in [0, 1]; budgets [S], offsets [S + 1] int64 as in ``allocate_roots``. Raises
    ValueError for a budget without prefixes. arXiv 2606.11119, stage 2.
    """
    allocate = torch.ops.trace_megatron.allocate_prefixes if native.AVAILABLE else reference.allocate_prefixes
    return allocate(repeat_probs, budgets, _offsets(repeat_probs, offsets))


def allocate_table(values: torch.Tensor, budget: int, *, exact: bool = True) -> torch.Tensor:
    """The best counts, int64 [P], for any table of values [P, cap + 1] float64; -inf forbids an entry.

    A dynamic program, O(P * budget * cap). Of entries within 1e-12 of the best the smallest count is taken, the last
    row first, as in the reference solver of arXiv 2606.11119. ``exact=False``: at most ``budget``. Raises ValueError
    where the budget cannot be spent.
    """
    allocate = torch.ops.trace_megatron.allocate_table if native.AVAILABLE else reference.allocate_table
    return allocate(values, budget, exact)


def _offsets(probs: torch.Tensor, offsets: torch.Tensor | None) -> torch.Tensor:
    return torch.tensor([0, probs.numel()]) if offsets is None else offsets


if native.AVAILABLE:
    torch.library.register_fake(
        "trace_megatron::allocate_roots", lambda probs, *_: probs.new_empty(probs.shape, dtype=torch.int64)
    )
    torch.library.register_fake(
        "trace_megatron::allocate_prefixes", lambda probs, *_: probs.new_empty(probs.shape, dtype=torch.int64)
    )
    torch.library.register_fake(
        "trace_megatron::allocate_table", lambda values, *_: values.new_empty(values.size(0), dtype=torch.int64)
    )
