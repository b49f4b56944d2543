"""Intervals on synthetic data: textbook values, and coverage as promised."""

import math

import numpy as np
import pytest

from trace_megatron.report.statistics import mean_interval, paired_difference, value_at


def test_a_textbook_interval():
    # t(0.975, 4) = 2.776; the standard deviation of 1..5 is 1.5811
    interval = mean_interval([1.0, 2.0, 3.0, 4.0, 5.0])
    assert interval.mean == 3.0 and interval.num_seeds == 5
    assert interval.high - 3.0 == pytest.approx(2.7764 * 1.58114 / math.sqrt(5), rel=1e-4)
    assert 3.0 - interval.low == pytest.approx(interval.high - 3.0)


@pytest.mark.parametrize("num_seeds", [3, 5, 10])
@pytest.mark.parametrize("confidence", [0.8, 0.95])
def test_coverage(num_seeds, confidence):
    rng = np.random.default_rng(num_seeds)
    intervals = [mean_interval(row, confidence) for row in rng.normal(1.5, 2.0, (4000, num_seeds))]
    covered = np.mean([interval.low <= 1.5 <= interval.high for interval in intervals])
    assert covered == pytest.approx(confidence, abs=0.02)


def test_pairing_takes_out_what_seeds_share():
    rng = np.random.default_rng(0)
    shared = rng.normal(0.0, 10.0, 8)  # a lucky seed is lucky for both
    first = {seed: shared[seed] + 1.0 + rng.normal(0.0, 0.1) for seed in range(8)}
    second = {seed: shared[seed] + rng.normal(0.0, 0.1) for seed in range(1, 8)}
    difference = paired_difference(first, second)
    assert difference.num_seeds == 7
    assert difference.low < 1.0 < difference.high and difference.high - difference.low < 0.5
    unpaired = mean_interval(list(first.values()))
    assert unpaired.high - unpaired.low > 5.0


def test_few_seeds():
    single = mean_interval([2.0])
    assert (single.mean, single.low, single.high, str(single)) == (2.0, -math.inf, math.inf, "2.000")
    with pytest.raises(ValueError, match="found none"):
        mean_interval([])
    with pytest.raises(ValueError, match="found none"):
        paired_difference({1: 1.0}, {2: 1.0})


def test_curves_between_their_points():
    assert [value_at([0, 10, 20], [0.0, 1.0, 3.0], at) for at in (-5, 5, 15, 99)] == [0.0, 0.5, 2.0, 3.0]
