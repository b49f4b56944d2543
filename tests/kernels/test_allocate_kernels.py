"""Allocation kernels against the references, which take one unit after the other, and against the CPU ops."""

from __future__ import annotations

import functools
import math

import pytest
import torch

from trace_megatron.ops import native
from trace_megatron.ops.reference import allocate as reference

from .simt import Kernel, KernelFault

SPECIAL = torch.tensor([0.0, 1.0, 0.5, 1e-30, 0.25, 0.75, 1 - 2**-24, 1e-10, 2**-53])


@functools.cache
def kernel(name: str) -> Kernel:
    return Kernel(f"allocate_{name}.cu")


def random_probs(size, generator, special=0.4):
    probs = torch.rand(size, generator=generator, dtype=torch.float64)
    values = SPECIAL.double()[torch.randint(0, len(SPECIAL), (size,), generator=generator)]
    return torch.where(torch.rand(size, generator=generator) < special, values, probs)


def fields(probs, budgets, offsets):
    size = probs.numel()
    return {
        "float_probs": probs if probs.dtype == torch.float32 else None,
        "double_probs": probs if probs.dtype == torch.float64 else None,
        "budgets": budgets,
        "offsets": offsets,
        "rows": ((2 * size * 32,), torch.uint8),
        "counts": torch.full((size,), -1),
        "num_rows": size,
        "num_segments": budgets.numel(),
    }


def allocate_prefixes(probs, budgets, offsets, **how):
    out = kernel("prefixes").run(
        "launch_allocate_prefixes", "AllocatePrefixesParams", fields(probs, budgets, offsets), **how
    )
    return out["counts"]


def allocate_roots(probs, budgets, offsets, cap=None, exact=True, **how):
    more = {"max_rollouts": -1 if cap is None else cap, "exact": exact}
    out = kernel("roots").run(
        "launch_allocate_roots", "AllocateRootsParams", fields(probs, budgets, offsets) | more, **how
    )
    return out["counts"]


def random_batch(generator, segments, most_rows, most_budget, least_budget=0, special=0.4):
    sizes = torch.randint(1, most_rows + 1, (segments,), generator=generator)
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), sizes.cumsum(0)])
    budgets = torch.randint(least_budget, most_budget + 1, (segments,), generator=generator)
    probs = random_probs(int(offsets[-1]), generator, special)
    return probs, budgets, offsets, sizes


def test_prefixes_equal_the_reference():
    generator = torch.Generator().manual_seed(1)
    for case in range(40):
        most_rows, most_budget = [(5, 12), (30, 60), (1, 300), (280, 20)][case % 4]
        probs, budgets, offsets, _ = random_batch(
            generator, (8, 8, 8, 2)[case % 4], most_rows, most_budget, special=(0.4, 1.0, 0.0)[case % 3]
        )
        probs = probs.float() if case % 2 else probs
        actual = allocate_prefixes(probs, budgets, offsets, seed=case)
        wanted = reference.allocate_prefixes(probs, budgets, offsets)
        assert torch.equal(actual, wanted), (case, probs, budgets, offsets)


def test_roots_equal_the_reference_and_the_cpu_op():
    generator = torch.Generator().manual_seed(2)
    for case in range(40):
        most_rows, most_budget = [(5, 12), (30, 60), (2, 200), (280, 400)][case % 4]
        cap, exact = (None, 40, 3, None)[case // 4 % 4], case % 5 != 0
        probs, budgets, offsets, sizes = random_batch(
            generator, (8, 8, 8, 2)[case % 4], most_rows, most_budget, least_budget=2, special=(0.4, 1.0, 0.0)[case % 3]
        )
        probs = probs.float() if case % 2 else probs
        if cap is not None and exact:
            budgets = torch.minimum(budgets, cap * sizes)
        actual = allocate_roots(probs, budgets, offsets, cap, exact, seed=case)
        if native.AVAILABLE:
            wanted = torch.ops.trace_megatron.allocate_roots(probs, budgets, offsets, cap, exact)
            assert torch.equal(actual, wanted), (case, probs, budgets, offsets)
        wanted = reference.allocate_roots(probs, budgets, offsets, cap, exact)
        assert torch.equal(actual, wanted), (case, probs, budgets, offsets)


def test_extremes():
    one = torch.tensor([0, 1])
    for dtype in (torch.float32, torch.float64):
        for prob in (0.0, 0.5, 1.0, 1e-30):
            probs = torch.tensor([prob], dtype=dtype)
            for budget in (0, 1, 2, 3, 2**31 - 1):
                budgets = torch.tensor([budget])
                assert allocate_prefixes(probs, budgets, one).tolist() == [budget]
                wanted = [-1] if budget == 1 else [budget]
                assert allocate_roots(probs, budgets, one).tolist() == wanted
    # a budget that no loop over units could spend
    flat = torch.tensor([0.0, 1.0, 0.0, 1.0, 1e-30], dtype=torch.float64)
    counts = allocate_roots(flat, torch.tensor([2**31 - 1]), torch.tensor([0, 5]))
    assert counts.tolist() == [0, 0, 0, 0, 2**31 - 1]
    counts = allocate_prefixes(torch.ones(4), torch.tensor([2**31 - 1]), torch.tensor([0, 4]))
    assert counts.tolist() == [2**29, 2**29, 2**29, 2**29 - 1]
    empty = torch.zeros(0)
    assert allocate_prefixes(empty, torch.tensor([0, 0]), torch.tensor([0, 0, 0])).numel() == 0
    assert allocate_roots(empty, torch.zeros(0, dtype=torch.int64), torch.tensor([0])).numel() == 0


def test_many_equal_rows():
    for size in (255, 256, 257):
        for budget in (1, 255, 257, 1111):
            how = torch.full((size,), 0.5), torch.tensor([budget]), torch.tensor([0, size])
            assert torch.equal(allocate_prefixes(*how), reference.allocate_prefixes(*how))
            if budget > 1:
                assert torch.equal(allocate_roots(*how), reference.allocate_roots(*how, None, True))


def test_wrong_values_leave_the_segment_or_all_unwritten():
    probs = torch.tensor([0.5, math.nan, 0.25, 0.5, -0.1, 0.5])
    offsets = torch.tensor([0, 2, 4, 5, 6])
    budgets = torch.tensor([2, 2, 2, -2])
    assert allocate_prefixes(probs, budgets, offsets).tolist() == [-1, -1, 1, 1, -1, -1]
    assert allocate_roots(probs, budgets, offsets).tolist() == [-1, -1, 0, 2, -1, -1]
    fine = torch.full((6,), 0.5)
    for wrong in ([0, 4, 2, 5, 6], [1, 2, 3, 4, 6], [0, 2, 3, 4, 5], [0, 2, 3, 4, 7]):
        assert allocate_prefixes(fine, torch.tensor([2, 2, 2, 2]), torch.tensor(wrong)).tolist() == [-1] * 6
    pair = torch.tensor([0, 2])
    assert allocate_prefixes(fine[:2], torch.tensor([2**31]), pair).tolist() == [-1, -1]
    for budget, cap in [(1, None), (7, 3), (3, 2), (2, 1), (2, 0)]:
        assert allocate_roots(fine[:2], torch.tensor([budget]), pair, cap).tolist() == [-1, -1]
        assert int(allocate_roots(fine[:2], torch.tensor([budget]), pair, cap, exact=False).min()) >= 0


def test_searches_are_as_short_as_on_paper():
    """Each barrier is a dependent step; without ties and with them."""
    generator = torch.Generator().manual_seed(7)
    for step in (None, 0.125):
        probs = torch.rand(512, generator=generator)
        probs = probs if step is None else (probs / step).round() * step
        allocate_roots(probs, torch.tensor([1024]), torch.tensor([0, 512]))
        assert kernel("roots").counts.barriers <= 45
        allocate_prefixes(probs[:60], torch.tensor([12]), torch.tensor([0, 60]))
        assert kernel("prefixes").counts.barriers <= 45


@pytest.mark.parametrize("allocate", [allocate_prefixes, allocate_roots])
def test_each_barrier_is_needed_every_time(allocate):
    how = torch.full((3,), 0.5), torch.tensor([5]), torch.tensor([0, 3])  # ends with one prompt at m = 1
    wanted = allocate(*how)
    barriers = kernel(allocate.__name__.removeprefix("allocate_")).syncs()
    assert len(barriers) == 2
    for seed in range(100):
        for barrier in barriers:
            with pytest.raises(KernelFault, match=r"race|not written before"):
                allocate(*how, seed=seed, drop=barrier)
    assert torch.equal(allocate(*how, seed=1), wanted)


def allocate_tables(values, budget, exact=True, **how):
    problems, rows, counts = values.shape
    how_fields = {
        "values": values,
        "table": ((problems, rows, budget + 1), torch.float64),
        "counts": ((problems, rows), torch.int64),
        "num_problems": problems,
        "num_rows": rows,
        "num_counts": counts,
        "budget": budget,
        "exact": exact,
    }
    return kernel("table").run("launch_allocate_table", "AllocateTableParams", how_fields, **how)["counts"]


def reference_tables(values, budget, exact=True):
    rows = []
    for table in values:
        try:
            rows.append(reference.allocate_table(table, budget, exact))
        except ValueError:
            rows.append(torch.full((values.size(1),), -1))
    return torch.stack(rows)


def test_tables_equal_the_reference():
    generator = torch.Generator().manual_seed(4)
    infeasible = 0
    for case in range(70):
        rows, cap, budget = (int(torch.randint(1, high, (), generator=generator)) for high in (6, 9, 40))
        cap, budget = (0, budget % 3) if case % 20 == 0 else (cap, budget)
        values = torch.randint(0, 4, (3, rows, cap + 1), generator=generator).double()  # many ties
        if case % 2:
            values = torch.rand(values.shape, generator=generator, dtype=torch.float64)
        values[torch.rand(values.shape, generator=generator) < 0.2] = -math.inf
        exact = case % 3 != 0
        wanted = reference_tables(values, budget, exact)
        infeasible += int((wanted == -1).any())
        assert torch.equal(allocate_tables(values, budget, exact, seed=case), wanted), (values, budget, exact)
    assert 14 < infeasible < 56


def test_long_tables():
    generator = torch.Generator().manual_seed(5)
    for rows, counts, budget in [(2, 1200, 1100), (3, 40, 1024), (1, 300, 255)]:
        values = torch.rand(1, rows, counts, generator=generator, dtype=torch.float64).cumsum(-1)
        budget = min(budget, rows * (counts - 1))
        wanted = torch.ops.trace_megatron.allocate_table if native.AVAILABLE else reference.allocate_table
        assert torch.equal(allocate_tables(values, budget)[0], wanted(values[0], budget, True))


def test_tables_with_wrong_values():
    for wrong in (math.nan, math.inf):
        values = torch.zeros(2, 2, 3, dtype=torch.float64)
        values[1, 1, 2] = wrong
        assert allocate_tables(values, 2).tolist() == [[2, 0], [-1, -1]]
    with pytest.raises(ValueError, match="CUDA error 1"):
        allocate_tables(torch.zeros(1, 1, 20480, dtype=torch.float64), 1)


def test_each_barrier_of_the_table_is_needed_every_time():
    values = torch.rand(1, 3, 4, generator=torch.Generator().manual_seed(6), dtype=torch.float64)
    allocate_tables(values, 9)
    barriers = kernel("table").syncs()
    assert len(barriers) == 3
    for seed in range(100):
        for barrier in barriers:
            with pytest.raises(KernelFault, match=r"race|not written before"):
                allocate_tables(values, 9, seed=seed, drop=barrier)
