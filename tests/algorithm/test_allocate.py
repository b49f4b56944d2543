"""Allocations against exact integer programs, and against the reference solver's order."""

from __future__ import annotations

import itertools
import random
import time

import numpy as np
import pytest

from trace_megatron.algorithm.allocate import allocate_prefixes, allocate_roots, allocate_table
from trace_megatron.algorithm.contrast import flip_prob, mixed_prob

GRID = 64  # probabilities a / GRID make every value a whole number of GRID ** -budget


def root_value(a: int, m: int, budget: int) -> int:
    """f(m; a / GRID) * GRID ** budget."""
    return 0 if m < 2 else GRID ** (budget - m) * (GRID**m - a**m - (GRID - a) ** m)


def best_values(tables: list[dict[int, int]], budget: int) -> list[int | None]:
    """Exact optimum of every total from 0 to budget; None where no choice of counts sums to it."""
    best: list[int | None] = [0] + [None] * budget
    for table in tables:
        new: list[int | None] = [None] * (budget + 1)
        for spent, value in enumerate(best):
            if value is not None:
                for count, gain in table.items():
                    if spent + count <= budget and (new[spent + count] is None or new[spent + count] < value + gain):
                        new[spent + count] = value + gain
        best = new
    return best


def random_root_case(rng: random.Random) -> tuple[list[int], int, int | None]:
    size, budget = rng.randint(1, 5), rng.randint(0, 10)
    kind = rng.random()
    if kind < 0.3:  # ties everywhere
        choices = rng.sample(range(GRID + 1), 2)
        grid = [rng.choice(choices) for _ in range(size)]
    elif kind < 0.6:
        grid = [rng.choice([0, GRID // 2, GRID, GRID // 4, 3 * GRID // 4]) for _ in range(size)]
    else:
        grid = [rng.randint(0, GRID) for _ in range(size)]
    return grid, budget, rng.choice([None, None, 1, 2, 3, 4, 6])


def test_roots_reach_the_exact_optimum_in_10000_cases():
    rng = random.Random(0)
    infeasible = lone = 0
    for _ in range(10_000):
        grid, budget, cap = random_root_case(rng)
        counts = [0, *range(2, min(budget, budget if cap is None else cap) + 1)]
        best = best_values([{m: root_value(a, m, budget) for m in counts} for a in grid], budget)
        probs = np.array(grid) / GRID
        if best[budget] is None:
            infeasible += 1
            with pytest.raises(ValueError, match="expected"):
                allocate_roots(probs, budget, max_rollouts=cap)
        else:
            m = allocate_roots(probs, budget, max_rollouts=cap)
            assert m.dtype == np.int64 and m.sum() == budget and set(m.tolist()) <= set(counts)
            value = sum(root_value(a, int(k), budget) for a, k in zip(grid, m, strict=True))
            assert best[budget] - value <= GRID**budget * 1e-13, (grid, budget, cap, m)
            lone += budget % 2
        at_most = allocate_roots(probs, budget, max_rollouts=cap, exact=False)
        assert at_most.sum() <= budget and set(at_most.tolist()) <= set(counts)
        assert not at_most[(probs == 0) | (probs == 1)].any()
        value = sum(root_value(a, int(k), budget) for a, k in zip(grid, at_most, strict=True))
        assert max(b for b in best if b is not None) - value <= GRID**budget * 1e-13, (grid, budget, cap, at_most)
    assert infeasible > 500 and lone > 1000


def reference_solver(probs: list[float], budget: int) -> list[int]:
    """The authors' dynamic program: prompts in order, counts rising, replaced only if better by more than 1e-12."""
    best = [0.0] + [-np.inf] * budget
    back = []
    for v in probs:
        new, choice = [-np.inf] * (budget + 1), [0] * (budget + 1)
        for total in range(budget + 1):
            for m in (0, *range(2, total + 1)):
                value = best[total - m] + (0.0 if m == 0 else 1 - v**m - (1 - v) ** m)
                if value > new[total] + 1e-12:
                    new[total], choice[total] = value, m
        best = new
        back.append(choice)
    counts = []
    for choice in reversed(back):
        counts.append(choice[budget])
        budget -= choice[budget]
    return counts[::-1]


def test_generic_roots_equal_the_reference_solver():
    rng = np.random.default_rng(1)
    for _ in range(120):
        size, budget = int(rng.integers(1, 14)), int(rng.integers(2, 26))
        probs = rng.uniform(0.02, 0.98, size)
        expected = reference_solver(probs.tolist(), budget)
        assert allocate_roots(probs, budget).tolist() == expected
        table = np.where(np.arange(budget + 1) == 1, -np.inf, mixed_prob(probs[:, None], np.arange(budget + 1)))
        assert allocate_table(table, budget).tolist() == expected


def test_table_breaks_ties_as_the_reference_solver():
    probs = [0.5, 0.5, 0.25, 0.0, 0.5]
    for budget in (2, 5, 8, 11):
        table = np.where(
            np.arange(budget + 1) == 1, -np.inf, mixed_prob(np.array(probs)[:, None], np.arange(budget + 1))
        )
        assert allocate_table(table, budget).tolist() == reference_solver(probs, budget)


@pytest.mark.parametrize(
    ("probs", "budget", "cap", "message"),
    [
        ([0.5, 0.5], 1, None, "at least 2"),
        ([0.5, 0.5, 0.5], 3, 2, "even"),
        ([0.5, 0.5], 9, 4, "at most 2 prompts x 4"),
        ([0.5, 0.5], 4, 1, "max_rollouts of at least 2"),
        ([], 2, None, "found none"),
        ([0.5], -2, None, "whole number"),
        ([0.5, 1.5], 2, None, r"\[0, 1\]"),
        ([[0.5]], 2, None, r"\[P\]"),
    ],
)
def test_infeasible_roots_say_why(probs, budget, cap, message):
    with pytest.raises(ValueError, match=message):
        allocate_roots(probs, budget, max_rollouts=cap)


def test_roots_spread_where_nothing_tells_prompts_apart():
    assert allocate_roots(np.full(512, 0.5), 1024).tolist() == [2] * 512
    assert allocate_roots(np.zeros(6), 12).tolist() == [2] * 6
    assert allocate_roots(np.zeros(6), 12, exact=False).tolist() == [0] * 6
    assert allocate_roots([0.0, 0.5, 1.0], 0).tolist() == [0, 0, 0]


def test_roots_far_beyond_useful_demand():
    """One open prompt, 2,000 units: exact burns them, at-most stops where float64 sees no value."""
    probs = np.array([0.5, 0.0])
    assert allocate_roots(probs, 2000).sum() == 2000
    assert 1000 < allocate_roots(probs, 2000, exact=False)[0] < 1100


def test_512_candidates_1024_rollouts_within_3_ms():
    rng = np.random.default_rng(0)
    cases = [rng.beta(0.5, 0.5, 512), rng.random(512), np.full(512, 0.5), np.r_[np.zeros(511), 0.5]]
    for probs in cases:
        seconds = []
        for _ in range(20):
            start = time.perf_counter()
            allocate_roots(probs, 1024)
            seconds.append(time.perf_counter() - start)
        assert min(seconds) < 3e-3


def test_prefixes_reach_the_exact_optimum_in_2000_cases():
    rng = random.Random(2)
    for _ in range(2000):
        size, budget = rng.randint(1, 5), rng.randint(0, 8)
        grid = [rng.choice([0, GRID // 2, GRID, rng.randint(0, GRID)]) for _ in range(size)]
        tables = [{k: GRID**budget - GRID ** (budget - k) * a**k for k in range(budget + 1)} for a in grid]
        counts = allocate_prefixes(np.array(grid) / GRID, budget)
        assert counts.dtype == np.int64 and counts.sum() == budget
        value = sum(table[int(k)] for table, k in zip(tables, counts, strict=True))
        assert best_values(tables, budget)[budget] - value <= GRID**budget * 1e-13


def test_first_continuation_goes_to_the_least_expected_ending():
    """A failure at V = 0.9 (q = 0.1) before a success at V = 0.4, though V (1 - V) is larger there."""
    assert allocate_prefixes([0.4, 0.1, 0.6], 1).tolist() == [0, 1, 0]
    assert allocate_prefixes([0.4, 0.1, 0.6], 3).tolist() == [1, 1, 1]
    assert allocate_prefixes([0.4, 0.1, 0.6], 4).tolist() == [2, 1, 1]


def test_prefixes_need_an_anchor():
    assert allocate_prefixes([], 0).tolist() == []
    with pytest.raises(ValueError, match="found none"):
        allocate_prefixes([], 2)
    with pytest.raises(ValueError, match=r"\[0, 1\]"):
        allocate_prefixes([np.nan], 2)


def test_prefixes_by_cost_are_the_best_for_the_tokens_that_they_take():
    rng = np.random.default_rng(3)
    for _ in range(60):
        size, budget = int(rng.integers(1, 4)), int(rng.integers(1, 6))
        q, costs = rng.random(size), rng.uniform(1.0, 4.0, size)
        counts = allocate_prefixes(q, budget, costs=costs)
        spent, value = counts @ costs, flip_prob(q, counts).sum()
        assert abs(spent - budget * costs.mean()) <= costs.max() / 2
        for other in itertools.product(range(14), repeat=size):
            if np.array(other) @ costs <= spent + 1e-12:
                assert flip_prob(q, other).sum() <= value + 1e-12
    np.testing.assert_array_equal(allocate_prefixes([0.2, 0.5], 5, costs=[7, 7]), allocate_prefixes([0.2, 0.5], 5))


def test_roots_by_cost():
    """Two prompts alike, one four times as long: the short one gets the rollouts. Never one alone."""
    counts = allocate_roots([0.4, 0.4], 6, costs=[100.0, 400.0])
    assert counts[0] > counts[1] and abs(counts @ [100, 400] - 6 * 250) <= 200
    rng = np.random.default_rng(4)
    for _ in range(100):
        probs, costs = rng.random(8), rng.uniform(50, 800, 8)
        counts = allocate_roots(probs, 16, costs=costs, max_rollouts=5)
        assert set(counts.tolist()) <= {0, 2, 3, 4, 5}
        assert counts @ costs <= 16 * costs.mean() + costs.max()
    with pytest.raises(ValueError, match="positive costs"):
        allocate_roots([0.5, 0.5], 4, costs=[1.0, 0.0])


def test_table_equals_enumeration():
    rng = np.random.default_rng(5)
    for _ in range(300):
        size, cap, budget = int(rng.integers(1, 4)), int(rng.integers(0, 5)), int(rng.integers(0, 9))
        table = rng.normal(size=(size, cap + 1))
        table[rng.random(table.shape) < 0.2] = -np.inf
        totals: dict[int, float] = {}
        for counts in itertools.product(range(cap + 1), repeat=size):
            value = table[np.arange(size), counts].sum()
            if sum(counts) <= budget and value > -np.inf:
                totals[sum(counts)] = max(value, totals.get(sum(counts), -np.inf))
        for exact in (True, False):
            optimum = totals.get(budget) if exact else max(totals.values(), default=None)
            if optimum is None:
                with pytest.raises(ValueError, match="spend"):
                    allocate_table(table, budget, exact=exact)
            else:
                counts = allocate_table(table, budget, exact=exact)
                assert counts.sum() == budget if exact else counts.sum() <= budget
                assert table[np.arange(size), counts].sum() == pytest.approx(optimum, abs=1e-11)
