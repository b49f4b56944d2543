"""Budgets divided where outcomes are undecided: exact, in NumPy. P prompts, A anchors, M rollouts.

Both stages take units of value in order of falling marginal value. Marginals are laid out level by level (every first
unit, then every second, ...), so that among equal ones breadth comes first.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import ArrayLike

from trace_megatron import ops
from trace_megatron.algorithm.contrast import checked_probs
from trace_megatron.algorithm.scores import Scores, to_host

_FIRST_WIDTH = 8  # units per row looked at first; rows that take them all are looked at further
_AUTHORS_TOLERANCE = 1e-12  # of the reference solver: an entry must be better by more to replace a smaller count

Marginals = Callable[[np.ndarray, int, int], np.ndarray]
"""(rows [R], first, last) -> values [R, last - first + 1] of units first..last of these rows, non-increasing."""


def allocate_roots(
    success_probs: ArrayLike | Scores,
    budget: int,
    *,
    max_rollouts: int | None = None,
    exact: bool = True,
    costs: ArrayLike | None = None,
) -> np.ndarray:
    """Bare rollouts m per prompt, int64 [P], that maximise sum f(m_i; v_i): arXiv 2606.11119, stage 1.

    ``success_probs`` [P] in [0, 1]; m_i is 0 or from 2 to ``max_rollouts`` (None: no cap). ``exact``: the sum is
    ``budget``; otherwise at most, and units of zero value are not spent. ``costs`` [P] > 0, expected tokens of one
    rollout of each prompt: value per token decides, and about as many tokens are spent as by ``budget`` rollouts of
    mean cost (greedy: optimal up to one unit). A tensor is allocated on its device, and the counts alone are copied;
    with ``costs`` it comes to the CPU. Raises ValueError where the budget is infeasible.
    """
    if isinstance(success_probs, torch.Tensor):
        if costs is None:
            check_root_budget(success_probs.numel(), budget, max_rollouts, exact=exact)
            units = success_probs.new_full((1,), budget, dtype=torch.int64)
            return _copied(ops.allocate_roots(success_probs, units, max_rollouts=max_rollouts, exact=exact))
        success_probs = to_host(success_probs)
    v = checked_probs("success_probs", success_probs)
    if v.ndim != 1:
        raise ValueError(f"expected success_probs [P], found shape {list(v.shape)}")
    check_root_budget(v.size, budget, max_rollouts, exact=exact)
    limit = budget if max_rollouts is None else min(budget, max_rollouts)
    if limit < 2:
        return np.zeros(v.size, dtype=np.int64)
    hull = _HullMarginals(v)
    if costs is not None:
        costs = _checked_costs(costs, v.size)
        limit = np.iinfo(np.int32).max if max_rollouts is None else max_rollouts
        counts = _take_best(hull, v.size, budget, limit, opening=2, costs=costs, paid_only=not exact)
        return np.where(counts == 1, 0, counts)
    counts = _take_best(hull, v.size, budget, limit, opening=2, paid_only=not exact)
    return _close_hole(counts, hull, limit, exact)


def allocate_prefixes(repeat_probs: ArrayLike | Scores, budget: int, *, costs: ArrayLike | None = None) -> np.ndarray:
    """Continuations K per anchor, int64 [A], that sum to ``budget`` and maximise sum 1 - q^K.

    arXiv 2606.11119, stage 2. ``repeat_probs`` [A] in [0, 1]. ``costs`` [A] > 0, expected tokens of one continuation:
    as in ``allocate_roots``. Raises ValueError for a budget without anchors.
    """
    if isinstance(repeat_probs, torch.Tensor):
        if costs is None:
            _check_count("budget", budget)
            return _copied(ops.allocate_prefixes(repeat_probs, repeat_probs.new_full((1,), budget, dtype=torch.int64)))
        repeat_probs = to_host(repeat_probs)
    q = checked_probs("repeat_probs", repeat_probs)
    if q.ndim != 1:
        raise ValueError(f"expected repeat_probs [A], found shape {list(q.shape)}")
    _check_count("budget", budget)
    if budget and q.size == 0:
        raise ValueError(f"expected an anchor to spend {budget} continuations on, found none")

    def marginals(rows: np.ndarray, first: int, last: int) -> np.ndarray:
        return q[rows, None] ** np.arange(first - 1, last) * (1.0 - q[rows, None])

    if costs is None:
        return _take_best(marginals, q.size, budget, budget)
    return _take_best(marginals, q.size, budget, np.iinfo(np.int32).max, costs=_checked_costs(costs, q.size))


def allocate_table(values: ArrayLike, budget: int, *, exact: bool = True) -> np.ndarray:
    """The best whole allocation, int64 [P], for any table of values [P, cap + 1]; -inf forbids an entry.

    A dynamic program, O(P * budget * cap). Ties as in the reference solver of arXiv 2606.11119: of entries within
    1e-12 of the best the smallest count is taken, the last prompt first.
    ``exact=False``: at most ``budget``. Raises ValueError where the budget is infeasible.
    """
    table = np.asarray(values, dtype=np.float64)
    _check_count("budget", budget)
    if table.ndim != 2 or table.shape[1] == 0 or np.isnan(table).any() or np.isposinf(table).any():
        raise ValueError("expected a table of values [P, cap + 1] below infinity")
    cap = table.shape[1] - 1
    spend = np.arange(budget + 1)
    best = np.where(spend == 0, 0.0, -np.inf)
    choices = np.zeros((len(table), budget + 1), dtype=np.int64)
    for row, choice in zip(table, choices, strict=True):
        padded = np.concatenate([np.full(cap, -np.inf), best])
        totals = np.lib.stride_tricks.sliding_window_view(padded, cap + 1)[:, ::-1] + row  # [spend, count]
        choice[:] = np.argmax(totals >= totals.max(axis=1, keepdims=True) - _AUTHORS_TOLERANCE, axis=1)
        best = totals[spend, choice]
    spent = budget if exact else int(np.argmax(best))
    if best[spent] == -np.inf:
        raise ValueError(f"expected a budget that the table can spend exactly, found {budget}")
    counts = np.zeros(len(table), dtype=np.int64)
    for index in range(len(table) - 1, -1, -1):
        counts[index] = choices[index, spent]
        spent -= counts[index]
    return counts


def check_root_budget(num_prompts: int, budget: int, max_rollouts: int | None, *, exact: bool = True) -> None:
    """Raise ValueError unless ``budget`` bare rollouts can be given out as 0 or 2..max_rollouts a prompt."""
    _check_count("budget", budget)
    if max_rollouts is not None:
        _check_count("max_rollouts", max_rollouts)
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


def _copied(counts: torch.Tensor) -> np.ndarray:
    counts = counts.cpu()
    ops.check_counts(counts)
    return counts.numpy()


class _HullMarginals:
    """Marginals of the concave hull of f: with p = v (1 - v), they are p, p, p, then p (v^(m-2) + (1-v)^(m-2)).

    f itself lies on its hull except at m = 1, where f is 0 and the hull p.
    """

    def __init__(self, v: np.ndarray) -> None:
        self.u = np.minimum(v, 1.0 - v)
        self.p = self.u * (1.0 - self.u)

    def __call__(self, rows: np.ndarray, first: int, last: int) -> np.ndarray:
        power = np.maximum(np.arange(first, last + 1) - 2, 1)
        u = self.u[rows, None]
        shrink = np.where(power == 1, 1.0, u**power + np.exp(power * np.log1p(-u)))
        return self.p[rows, None] * shrink

    def one(self, counts: np.ndarray) -> np.ndarray:
        """Marginal of unit ``counts[i]`` of each row i."""
        power = np.maximum(counts - 2, 1)
        return self.p * np.where(power == 1, 1.0, self.u**power + np.exp(power * np.log1p(-self.u)))


def _close_hole(counts: np.ndarray, hull: _HullMarginals, limit: int, exact: bool) -> np.ndarray:
    """Lift the one prompt left at m = 1 to 2, or drop it to 0, whichever costs less."""
    lone = np.flatnonzero(counts == 1)
    if lone.size == 0:
        return counts
    (j,) = lone
    gain = np.where((counts >= 2) & (counts < limit), hull.one(counts + 1), -np.inf)
    loss = np.where(counts >= 3, hull.one(counts), np.inf)
    receiver, giver = int(np.argmax(gain)), int(np.argmin(loss))
    best_gain = gain[receiver] if exact else max(gain[receiver], 0.0)
    if loss[giver] - hull.p[j] < hull.p[j] - best_gain:
        counts[j], counts[giver] = 2, counts[giver] - 1
    else:
        counts[j] = 0
        if exact or gain[receiver] > 0.0:
            counts[receiver] += 1
    return counts


def _take_best(
    marginals: Marginals,
    num_rows: int,
    budget: int,
    limit: int,
    *,
    opening: int = 1,
    costs: np.ndarray | None = None,
    paid_only: bool = False,
) -> np.ndarray:
    """Counts per row [R] of the best units, at most ``limit`` a row.

    Marginals may be long; a row that takes all units seen so far is looked at twice as far, and the choice is made
    anew. ``opening``: a row's first units that stand together among ties. ``paid_only``: only units above zero value.
    """
    counts = np.zeros(num_rows, dtype=np.int64)
    if budget == 0 or num_rows == 0:
        return counts
    widths = np.zeros(num_rows, dtype=np.int64)
    values, owners = np.empty(0), np.empty(0, dtype=np.int64)
    rows = np.arange(num_rows)
    while rows.size:
        for seen in np.unique(widths[rows]).tolist():
            batch = rows[widths[rows] == seen]
            last = min(max(2 * seen, _FIRST_WIDTH), limit)
            block = np.minimum.accumulate(marginals(batch, seen + 1, last), axis=1)
            if costs is not None:
                block = block / costs[batch, None]
            together = 0 if seen else opening
            values = np.concatenate([values, block[:, :together].ravel(), block[:, together:].T.ravel()])
            owners = np.concatenate([owners, np.repeat(batch, together), np.tile(batch, last - seen - together)])
            widths[batch] = last
        if costs is None:
            taken = _largest(values, budget)
        else:
            taken = _largest_within(values, costs[owners], budget * float(costs.mean()))
        if paid_only:
            taken &= values > 0.0
        counts = np.bincount(owners[taken], minlength=num_rows)
        rows = np.flatnonzero((counts == widths) & (widths < limit))
    return counts


def _largest(values: np.ndarray, count: int) -> np.ndarray:
    """Mask of the ``count`` largest values, the first ones among equals."""
    taken = np.zeros(values.size, dtype=bool)
    taken[np.argsort(-values, kind="stable")[:count]] = True
    return taken


def _largest_within(values: np.ndarray, costs: np.ndarray, total: float) -> np.ndarray:
    """Mask of the largest values until their costs reach ``total``, to the nearest unit."""
    order = np.argsort(-values, kind="stable")
    spent = np.concatenate([[0.0], np.cumsum(costs[order])])
    taken = np.zeros(values.size, dtype=bool)
    taken[order[: np.argmin(np.abs(spent - total))]] = True
    return taken


def _checked_costs(costs: ArrayLike, size: int) -> np.ndarray:
    array = np.asarray(costs, dtype=np.float64)
    if array.shape != (size,) or not (np.isfinite(array) & (array > 0)).all():
        raise ValueError(f"expected {size} positive costs, found {array}")
    return array


def _check_count(name: str, value: int) -> None:
    if value != int(value) or value < 0:
        raise ValueError(f"expected {name} as a whole number from 0 on, found {value}")
