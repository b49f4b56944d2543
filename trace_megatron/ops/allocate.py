"""Allocation of whole batches in one call: many pools of prompts, many prompts' prefixes.

Legend: P probabilities, S segments; segment s holds entries ``offsets[s]`` up to ``offsets[s + 1]``. All tensors of a
call, and its result, are on one device. A GPU is not waited for, so wrong values cannot raise there: a segment with a
probability outside [0, 1] or an infeasible budget gets counts of -1, and all do where offsets are wrong;
``check_counts`` raises for them once the counts are on the CPU.
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
    offsets = _offsets(success_probs, offsets)
    if native.has("allocate_roots", success_probs.device):
        return torch.ops.trace_megatron.allocate_roots(success_probs, budgets, offsets, max_rollouts, exact)
    counts = reference.allocate_roots(success_probs, budgets, offsets, max_rollouts, exact)
    return counts.to(success_probs.device)


def allocate_prefixes(
    repeat_probs: torch.Tensor, budgets: torch.Tensor, offsets: torch.Tensor | None = None
) -> torch.Tensor:
    """Continuations K per prefix, int64 [P], that sum to each segment's budget and maximise sum 1 - q^K: exact.

    repeat_probs [P] float32 or float64 in [0, 1]; budgets [S], offsets [S + 1] int64 as in ``allocate_roots``. Raises
    ValueError for a budget without prefixes. arXiv 2606.11119, stage 2.
    """
    offsets = _offsets(repeat_probs, offsets)
    if native.has("allocate_prefixes", repeat_probs.device):
        return torch.ops.trace_megatron.allocate_prefixes(repeat_probs, budgets, offsets)
    return reference.allocate_prefixes(repeat_probs, budgets, offsets).to(repeat_probs.device)


def allocate_table(values: torch.Tensor, budget: int, *, exact: bool = True) -> torch.Tensor:
    """The best counts, int64 [P], for any table of values [P, cap + 1] float64; -inf forbids an entry.

    A dynamic program, O(P * budget * cap). Of entries within 1e-12 of the best the smallest count is taken, the last
    row first, as in the reference solver of arXiv 2606.11119. ``exact=False``: at most ``budget``. Raises ValueError
    where the budget cannot be spent. On a GPU a row must fit into shared memory: budget + cap below 20,479.
    """
    if native.has("allocate_table", values.device):
        return torch.ops.trace_megatron.allocate_table(values, budget, exact)
    return reference.allocate_table(values, budget, exact).to(values.device)


def check_counts(counts: torch.Tensor) -> None:
    """Raise ValueError where counts [P] on the CPU say that a GPU found wrong values."""
    wrong = torch.nonzero(counts < 0).flatten()
    if wrong.numel():
        raise ValueError(
            f"expected probabilities in [0, 1], rising offsets and budgets that can be spent, found none of entry "
            f"{int(wrong[0])} of {counts.numel()} allocated on the GPU: allocate on the CPU, which names the value"
        )


def _offsets(probs: torch.Tensor, offsets: torch.Tensor | None) -> torch.Tensor:
    return torch.tensor([0, probs.numel()], device=probs.device) if offsets is None else offsets


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
