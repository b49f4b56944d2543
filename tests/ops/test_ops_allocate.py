"""Allocation against the best of all allocations: a dynamic program over every table of values."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from trace_megatron.ops import allocate_prefixes, allocate_roots, allocate_table, check_counts, native
from trace_megatron.ops.reference import allocate as reference

BUILDS = [False, pytest.param(True, marks=pytest.mark.skipif(not native.AVAILABLE, reason="not built"))]
SPECIAL = torch.tensor([0.0, 1.0, 0.5, 1e-30, 0.25, 0.75, 1 - 2**-24])


def random_probs(size, generator, dtype=torch.float32):
    probs = torch.rand(size, generator=generator).to(dtype)
    special = SPECIAL[torch.randint(0, len(SPECIAL), (size,), generator=generator)].to(dtype)
    return torch.where(torch.rand(size, generator=generator) < 0.4, special, probs)


def root_values(probs, cap):
    m = torch.arange(cap + 1, dtype=torch.float64)
    u = torch.minimum(probs.double(), 1.0 - probs.double())[:, None]
    values = -torch.expm1(m * torch.log1p(-u)) - u**m
    values[:, 0] = 0.0
    values[:, 1:2] = -math.inf
    return values


def prefix_values(probs, cap):
    return 1.0 - probs.double()[:, None] ** torch.arange(cap + 1, dtype=torch.float64)


def total(values, counts):
    return float(values.gather(1, counts[:, None]).sum())


def best_total(values, budget, exact=True):
    """The optimum alone, by a max-plus product that shares nothing with the ops."""
    best = torch.full((budget + 1,), -math.inf, dtype=torch.float64)
    best[0] = 0.0
    for row in values:
        best = torch.stack([(best[: s + 1].flip(0)[: row.numel()] + row[: s + 1]).max() for s in range(budget + 1)])
    return float(best[budget] if exact else best.max())


@pytest.mark.parametrize("built", BUILDS)
def test_roots_reach_the_optimum(built, monkeypatch):
    monkeypatch.setattr(native, "AVAILABLE", built)
    generator = torch.Generator().manual_seed(1)
    feasible = 0
    for case in range(250):
        size, budget = (int(torch.randint(1, high, (), generator=generator)) for high in (7, 14))
        cap = None if case % 3 else int(torch.randint(2, 6, (), generator=generator))
        exact = case % 5 != 0
        probs = random_probs(size, generator, torch.float64 if case % 2 else torch.float32)
        values = root_values(probs, budget if cap is None else min(cap, budget))
        wanted = best_total(values, budget, exact)
        if wanted == -math.inf:
            with pytest.raises(ValueError, match="expected"):
                allocate_roots(probs, torch.tensor([budget]), max_rollouts=cap, exact=exact)
            continue
        counts = allocate_roots(probs, torch.tensor([budget]), max_rollouts=cap, exact=exact)
        assert (int(counts.sum()) == budget) if exact else (int(counts.sum()) <= budget)
        assert total(values, counts) == pytest.approx(wanted, abs=1e-12), (probs, budget, cap, exact, counts)
        feasible += 1
    assert feasible > 200


@pytest.mark.parametrize("built", BUILDS)
def test_prefixes_reach_the_optimum(built, monkeypatch):
    monkeypatch.setattr(native, "AVAILABLE", built)
    generator = torch.Generator().manual_seed(2)
    for _ in range(100):
        size, budget = (int(torch.randint(1, high, (), generator=generator)) for high in (6, 12))
        probs = random_probs(size, generator)
        counts = allocate_prefixes(probs, torch.tensor([budget]))
        values = prefix_values(probs, budget)
        assert int(counts.sum()) == budget
        assert total(values, counts) == pytest.approx(best_total(values, budget), abs=1e-12)


@pytest.mark.parametrize("built", BUILDS)
def test_tables_reach_the_optimum(built, monkeypatch):
    monkeypatch.setattr(native, "AVAILABLE", built)
    generator = torch.Generator().manual_seed(3)
    for case in range(60):
        size, cap, budget = (int(torch.randint(1, high, (), generator=generator)) for high in (5, 5, 9))
        values = torch.randint(0, 4, (size, cap + 1), generator=generator).double()  # many ties
        values[torch.rand(values.shape, generator=generator) < 0.2] = -math.inf
        wanted, exact = best_total(values, budget, case % 2 == 0), case % 2 == 0
        if wanted == -math.inf:
            with pytest.raises(ValueError, match=f"spend exactly, found {budget}"):
                allocate_table(values, budget, exact=exact)
            continue
        counts = allocate_table(values, budget, exact=exact)
        assert total(values, counts) == wanted
        # of all best ones the last row's count is smallest, then the one before it ...
        spent = int(counts.sum())
        others = itertools.product(range(cap + 1), repeat=size)
        best = [c for c in others if sum(c) == spent and total(values, torch.tensor(c)) == wanted]
        assert tuple(counts.tolist()) == min(best, key=lambda c: c[::-1])


@pytest.mark.skipif(not native.AVAILABLE, reason="not built")
def test_native_equals_reference_in_every_segment():
    generator = torch.Generator().manual_seed(4)
    for case in range(40):
        sizes = torch.randint(1, 30, (6,), generator=generator)
        offsets = torch.cat([torch.zeros(1, dtype=torch.int64), sizes.cumsum(0)])
        probs = random_probs(int(offsets[-1]), generator)
        budgets = torch.randint(2, 60, (6,), generator=generator)
        cap, exact = (None, 40)[case % 2], case % 3 != 0
        budgets = torch.minimum(budgets, 40 * sizes)
        op = torch.ops.trace_megatron
        actual = op.allocate_roots(probs, budgets, offsets, cap, exact)
        wanted = reference.allocate_roots(probs, budgets, offsets, cap, exact)
        for first, last in itertools.pairwise(offsets.tolist()):
            values = root_values(probs[first:last], 60)
            same = total(values, actual[first:last]), total(values, wanted[first:last])
            assert same[0] == pytest.approx(same[1], abs=1e-12)
        actual = op.allocate_prefixes(probs, budgets, offsets)
        assert torch.equal(actual, reference.allocate_prefixes(probs, budgets, offsets))
        table = torch.rand(5, 7, generator=generator, dtype=torch.float64)
        assert torch.equal(op.allocate_table(table, 12, True), reference.allocate_table(table, 12, True))


@pytest.mark.parametrize("built", BUILDS)
def test_ties_go_to_breadth_and_pairs(built, monkeypatch):
    monkeypatch.setattr(native, "AVAILABLE", built)
    half = torch.full((4,), 0.5)
    assert allocate_roots(half, torch.tensor([8])).tolist() == [2, 2, 2, 2]
    assert allocate_roots(half, torch.tensor([5])).tolist() == [3, 2, 0, 0]
    assert allocate_prefixes(half, torch.tensor([6])).tolist() == [2, 2, 1, 1]
    never = torch.zeros(3)
    assert allocate_roots(never, torch.tensor([6]), exact=False).tolist() == [0, 0, 0]
    assert allocate_roots(torch.tensor([0.5, 0.0]), torch.tensor([0])).tolist() == [0, 0]


@pytest.mark.parametrize("built", BUILDS)
def test_wrong_arguments_are_named(built, monkeypatch):
    monkeypatch.setattr(native, "AVAILABLE", built)
    probs = torch.tensor([0.5, 0.25])

    def roots(budget, **options):
        return allocate_roots(probs, torch.tensor([budget]), **options)

    for call, message in [
        (lambda: allocate_roots(torch.tensor([0.5, 1.5]), torch.tensor([2])), r"success_probs in \[0, 1\], found 1.5"),
        (lambda: allocate_roots(torch.tensor([math.nan]), torch.tensor([2])), "found nan"),
        (lambda: roots(1), "at least 2 rollouts, found 1"),
        (lambda: roots(-1), "budget from 0"),
        (lambda: roots(7, max_rollouts=3), "at most 2 prompts x 3 rollouts, found 7"),
        (lambda: roots(3, max_rollouts=2), "even budget where max_rollouts is 2, found 3"),
        (lambda: roots(2, max_rollouts=1), "max_rollouts of at least 2, found 1"),
        (lambda: roots(2, max_rollouts=-1), "max_rollouts from 0 on, found -1"),
        (lambda: allocate_roots(probs[:0], torch.tensor([2])), "found none"),
        (lambda: allocate_prefixes(probs[:0], torch.tensor([2])), "an anchor to spend 2 continuations on, found none"),
        (lambda: allocate_prefixes(probs, torch.tensor([2, 2])), "one budget for each of 1 segments, found 2"),
        (lambda: allocate_prefixes(probs, torch.tensor([2]), torch.tensor([0, 3])), "offsets from 0 to 2"),
        (lambda: allocate_prefixes(probs, torch.tensor([1, 1, 1]), torch.tensor([0, 2, 1, 2])), "do not fall"),
        (lambda: allocate_table(torch.full((2, 3), math.inf, dtype=torch.float64), 2), "below infinity"),
        (lambda: allocate_table(torch.full((2, 3), math.nan, dtype=torch.float64), 2), "below infinity"),
    ]:
        with pytest.raises(ValueError, match=message):
            call()


@pytest.mark.skipif(not native.AVAILABLE, reason="not built")
def test_native_checks_beyond_the_references():
    with pytest.raises(ValueError, match="float32 or float64 on the cpu, found Half"):
        allocate_roots(torch.ones(2).half(), torch.tensor([2]))
    with pytest.raises(ValueError, match="budgets as a vector of Long on the cpu, found Int"):
        allocate_roots(torch.ones(2), torch.tensor([2], dtype=torch.int32))
    with pytest.raises(ValueError, match="found 4294967296"):
        allocate_prefixes(torch.ones(2), torch.tensor([2**32]))
    with pytest.raises(ValueError, match="found 4294967296"):
        allocate_table(torch.zeros(1, 1, dtype=torch.float64), 2**32)


def test_counts_of_wrong_values_are_told():
    check_counts(torch.tensor([0, 3]))
    check_counts(torch.zeros(0, dtype=torch.int64))
    with pytest.raises(ValueError, match="found none of entry 1 of 3 allocated on the GPU: allocate on the CPU"):
        check_counts(torch.tensor([2, -1, -1]))


@pytest.mark.skipif(not native.AVAILABLE, reason="not built")
def test_registrations():
    probs, budgets, offsets = torch.rand(5), torch.tensor([4, 2]), torch.tensor([0, 3, 5])
    op = torch.ops.trace_megatron
    torch.library.opcheck(op.allocate_roots.default, (probs, budgets, offsets, None, True))
    torch.library.opcheck(op.allocate_prefixes.default, (probs, budgets, offsets))
    torch.library.opcheck(op.allocate_table.default, (torch.rand(3, 4, dtype=torch.float64), 5, True))
