"""Budgets divided unit by unit, best marginal value first: plain Python, float64. arXiv 2606.11119, stages 1 and 2."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterator

import torch

_AUTHORS_TOLERANCE = 1e-12  # the reference solver replaces an entry only by one better by more


def allocate_roots(
    success_probs: torch.Tensor, budgets: torch.Tensor, offsets: torch.Tensor, max_rollouts: int | None, exact: bool
) -> torch.Tensor:
    """As ``ops.allocate_roots``."""
    if max_rollouts is not None and max_rollouts < 0:
        raise ValueError(f"expected max_rollouts from 0 on, found {max_rollouts}")
    counts: list[int] = []
    for probs, budget in _segments("success_probs", success_probs, budgets, offsets):
        _check_root_budget(len(probs), budget, max_rollouts, exact)
        limit = budget if max_rollouts is None else min(budget, max_rollouts)
        counts += _roots(probs, budget, limit, exact) if limit >= 2 else [0] * len(probs)
    return torch.tensor(counts, dtype=torch.int64)


def allocate_prefixes(repeat_probs: torch.Tensor, budgets: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """As ``ops.allocate_prefixes``."""
    counts: list[int] = []
    for probs, budget in _segments("repeat_probs", repeat_probs, budgets, offsets):
        if budget and not probs:
            raise ValueError(f"expected an anchor to spend {budget} continuations on, found none")
        counts += _take_best(len(probs), budget, lambda row, count, q=probs: q[row] ** count * (1.0 - q[row]))
    return torch.tensor(counts, dtype=torch.int64)


def allocate_table(values: torch.Tensor, budget: int, exact: bool) -> torch.Tensor:
    """As ``ops.allocate_table``."""
    if values.dim() != 2 or values.size(1) == 0 or not (values < math.inf).all():
        raise ValueError("expected a table of values [P, cap + 1] below infinity")
    if budget < 0:
        raise ValueError(f"expected budget from 0 on, found {budget}")
    best = [0.0] + [-math.inf] * budget
    choices: list[list[int]] = []
    for row in values.tolist():
        totals = [[best[spend - k] + row[k] for k in range(min(len(row), spend + 1))] for spend in range(budget + 1)]
        choices.append([next(k for k, x in enumerate(t) if x >= max(t) - _AUTHORS_TOLERANCE) for t in totals])
        best = [max(total) for total in totals]
    spend = budget if exact else best.index(max(best))
    if best[spend] == -math.inf:
        raise ValueError(f"expected a budget that the table can spend exactly, found {budget}")
    counts: list[int] = []
    for choice in reversed(choices):
        counts.append(choice[spend])
        spend -= choice[spend]
    return torch.tensor(counts[::-1], dtype=torch.int64)


def _segments(
    name: str, probs: torch.Tensor, budgets: torch.Tensor, offsets: torch.Tensor
) -> Iterator[tuple[list[float], int]]:
    values, limits, bounds = probs.double().tolist(), budgets.tolist(), offsets.tolist()
    for value in values:
        if not 0.0 <= value <= 1.0:
            raise ValueError(f"expected {name} in [0, 1], found {value}")
    if not bounds or bounds[0] != 0 or bounds[-1] != len(values) or sorted(bounds) != bounds:
        raise ValueError(f"expected offsets from 0 to {len(values)} that do not fall, found {bounds}")
    if len(limits) != len(bounds) - 1:
        raise ValueError(f"expected one budget for each of {len(bounds) - 1} segments, found {len(limits)}")
    for segment, budget in enumerate(limits):
        if budget < 0:
            raise ValueError(f"expected a budget from 0 on, found {budget}")
        yield values[bounds[segment] : bounds[segment + 1]], budget


def _take_best(
    num_rows: int,
    budget: int,
    marginal: Callable[[int, int], float],
    *,
    limit: int | None = None,
    opening: int = 1,
    paid_only: bool = False,
) -> list[int]:
    """Counts of the best units. ``opening``: a row's first units that stand together among ties."""
    counts = [0] * num_rows
    offers = [(-marginal(row, 0), 0, row) for row in range(num_rows)]
    heapq.heapify(offers)
    for _ in range(budget):
        if not offers or (paid_only and offers[0][0] >= 0.0):
            break
        value, _, row = heapq.heappop(offers)
        counts[row] += 1
        if limit is None or counts[row] < limit:
            falling = max(value, -marginal(row, counts[row]))
            heapq.heappush(offers, (falling, max(counts[row] - opening + 1, 0), row))
    return counts


def _roots(probs: list[float], budget: int, limit: int, exact: bool) -> list[int]:
    """Greedy on the concave hull of f; a prompt left at m = 1, where f is below its hull, is lifted or dropped."""
    u = [min(v, 1.0 - v) for v in probs]

    def marginal(row: int, count: int) -> float:
        p = u[row] * (1.0 - u[row])
        return p if count < 3 else p * (u[row] ** (count - 1) + math.exp((count - 1) * math.log1p(-u[row])))

    counts = _take_best(len(u), budget, marginal, limit=limit, opening=2, paid_only=not exact)
    if 1 not in counts:
        return counts
    lone = counts.index(1)
    gains = {row: marginal(row, count) for row, count in enumerate(counts) if 2 <= count < limit}
    losses = {row: marginal(row, count - 1) for row, count in enumerate(counts) if count >= 3}
    receiver, giver = max(gains, key=gains.get, default=None), min(losses, key=losses.get, default=None)
    gain = gains.get(receiver, -math.inf)
    if losses.get(giver, math.inf) - marginal(lone, 0) < marginal(lone, 0) - (gain if exact else max(gain, 0.0)):
        counts[lone] = 2
        counts[giver] -= 1
    else:
        counts[lone] = 0
        if receiver is not None and (exact or gain > 0.0):
            counts[receiver] += 1
    return counts


def _check_root_budget(num_prompts: int, budget: int, max_rollouts: int | None, exact: bool) -> None:
    if not exact or budget == 0:
        return
    if num_prompts == 0:
        raise ValueError(f"expected prompts to spend {budget} rollouts on, found none")
    if budget == 1:
        raise ValueError("expected a budget of 0 or at least 2 rollouts, found 1: a prompt gets none or at least two")
    if max_rollouts is None:
        return
    if max_rollouts < 2:
        raise ValueError(f"expected max_rollouts of at least 2, found {max_rollouts}: one rollout shows no contrast")
    if num_prompts * max_rollouts < budget:
        raise ValueError(
            f"expected a budget of at most {num_prompts} prompts x {max_rollouts} rollouts, found {budget}: "
            "raise max_rollouts or the number of prompts, or spend at most the budget (exact=False)"
        )
    if max_rollouts == 2 and budget % 2:
        raise ValueError(f"expected an even budget where max_rollouts is 2, found {budget}")
