"""The learning rate at the points where a schedule can be off by one."""

import math

import pytest

from trace_megatron.config import OptimizerConfig
from trace_megatron.policy.schedule import learning_rate


def rates(total_steps=10, **options):
    config = OptimizerConfig(learning_rate=2.0, min_learning_rate=0.5, **options)
    return [learning_rate(step, config, total_steps) for step in range(total_steps)]


def test_constant():
    assert rates() == [2.0] * 10


def test_warm_up_starts_above_zero_and_ends_at_the_peak():
    assert rates(warmup_steps=4)[:5] == [0.5, 1.0, 1.5, 2.0, 2.0]


def test_linear_reaches_the_floor_with_the_last_step():
    assert rates(total_steps=4, schedule="linear") == pytest.approx([2.0, 1.5, 1.0, 0.5])


def test_cosine_is_half_way_in_the_middle():
    found = rates(total_steps=7, warmup_steps=2, schedule="cosine")
    assert found == pytest.approx([1.0, 2.0, 2.0, 0.5 + 0.75 * (1 + math.cos(math.pi / 4)), 1.25, found[5], 0.5])
    assert found[4] > found[5] > 0.5


@pytest.mark.parametrize("schedule", ["cosine", "linear"])
def test_beyond_the_end_the_floor_stays(schedule):
    config = OptimizerConfig(learning_rate=2.0, min_learning_rate=0.5, schedule=schedule)
    assert learning_rate(50, config, 10) == pytest.approx(0.5)
    assert learning_rate(0, config, 1) == 2.0
