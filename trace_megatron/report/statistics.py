"""Comparing methods over seeds: paired differences with Student's t intervals.

Runs of one seed see the same prompts, so that their difference varies less than the runs themselves.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy import stats


@dataclass(frozen=True, slots=True)
class Interval:
    """A mean over seeds with its confidence interval; without bounds where there are fewer than two seeds."""

    mean: float
    low: float
    high: float
    num_seeds: int

    def __str__(self) -> str:
        if self.num_seeds < 2:
            return f"{self.mean:.3f}"
        return f"{self.mean:.3f} [{self.low:.3f}, {self.high:.3f}]"


def mean_interval(values: Sequence[float], confidence: float = 0.95) -> Interval:
    """Student's t interval of the mean of independent values. Raises ValueError without values."""
    array = np.asarray(values, dtype=np.float64)
    if not array.size:
        raise ValueError("expected at least one value, found none")
    mean = float(array.mean())
    if array.size == 1:
        return Interval(mean, -math.inf, math.inf, 1)
    error = float(array.std(ddof=1)) / math.sqrt(array.size)
    margin = float(stats.t.ppf(0.5 + confidence / 2, array.size - 1)) * error
    return Interval(mean, mean - margin, mean + margin, array.size)


def paired_difference(first: dict[int, float], second: dict[int, float], confidence: float = 0.95) -> Interval:
    """``first - second`` over the seeds that both have. Raises ValueError where they share none."""
    seeds = sorted(first.keys() & second.keys())
    return mean_interval([first[seed] - second[seed] for seed in seeds], confidence)


def value_at(positions: Sequence[float], values: Sequence[float], position: float) -> float:
    """A curve's value at ``position``, linear between its points, constant beyond its ends.

    For comparing runs at equal measured tokens instead of equal steps.
    """
    return float(np.interp(position, positions, values))
