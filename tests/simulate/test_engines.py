"""The fleet model against cases that can be worked out by hand, and against what no schedule can beat."""

from dataclasses import replace

import numpy as np
import pytest

from trace_megatron.simulate.engines import Fleet, Workload, draw_workload, simulate_fleet

FLEET = Fleet(1, num_slots=4, base_ms=10.0, per_request_ms=1.0, prefill_tokens=100.0)
MODES = [{"barrier": barrier, "affinity": affinity} for barrier in (False, True) for affinity in (False, True)]


def work(bare, continuations=None, **more):
    options = {"prompt_tokens": 0, "observation_tokens": 0, "tool_ms": 0.0} | more
    return Workload(bare, continuations or [[] for _ in bare], **options)


@pytest.mark.parametrize("mode", MODES)
def test_one_request_alone(mode):
    result = simulate_fleet(work([[[100, 50]]], tool_ms=2000.0), FLEET, **mode)
    assert result.seconds == pytest.approx(150 * 11 / 1e3 + 2)
    assert result.idle_share == pytest.approx(2 / result.seconds)
    assert result.lower_bound_s == pytest.approx(result.seconds)


def test_requests_share_an_engine_and_wait_for_a_slot():
    # Two run together, 12 ms a token, until the short one ends; then the long one alone.
    result = simulate_fleet(work([[[100], [50]]]), FLEET, barrier=False, affinity=True)
    assert result.seconds == pytest.approx((50 * 12 + 50 * 11) / 1e3)
    assert result.empty_share == pytest.approx(1 - (50 * 12 * 2 + 50 * 11) / 1e3 / result.seconds / 4)
    # Six in four slots: four together, then two.
    result = simulate_fleet(work([[[100]] * 6]), FLEET, barrier=False, affinity=True)
    assert result.seconds == pytest.approx((100 * 14 + 100 * 12) / 1e3)


def test_history_is_prefilled_once_where_the_tree_stays():
    turns = work([[[10, 10]]], prompt_tokens=1000, observation_tokens=200)
    home = simulate_fleet(turns, replace(FLEET, num_engines=2), barrier=False, affinity=True)
    assert home.prefilled_tokens == 1000 + 200
    assert home.seconds == pytest.approx((20 + 1200 / 100) * 11 / 1e3)
    # Elsewhere the first engine is busy with the other prompt when the second turn comes.
    busy = work([[[10, 10]], [[500]]], prompt_tokens=1000, observation_tokens=200)
    away = simulate_fleet(busy, replace(FLEET, num_engines=2), barrier=False, affinity=False)
    assert away.prefilled_tokens in (2 * 1000 + 200, 2 * 1000 + 1000 + 10 + 200)


def test_the_barrier_holds_continuations_back():
    trees = work([[[10]], [[100]]], [[[100]], [[10]]])
    free = simulate_fleet(trees, replace(FLEET, num_engines=2), barrier=False, affinity=True)
    held = simulate_fleet(trees, replace(FLEET, num_engines=2), barrier=True, affinity=True)
    assert free.seconds == pytest.approx(110 * 11 / 1e3)
    assert held.seconds == pytest.approx(200 * 11 / 1e3)
    assert free.idle_share == pytest.approx(0.0)
    assert held.idle_share == pytest.approx(180 / 400)


@pytest.mark.parametrize("num_engines", [1, 3, 16])
def test_no_schedule_beats_the_bound_and_no_token_is_lost(num_engines):
    rng = np.random.default_rng(num_engines)
    trees = draw_workload(12, 4, 2, 6, 0.3, 40.0, 1.0, rng)
    fleet = replace(FLEET, num_engines=num_engines, prefill_tokens=1e12)
    for mode in MODES:
        result = simulate_fleet(trees, fleet, **mode)
        assert result.seconds >= result.lower_bound_s * (1 - 1e-9)
        assert 0 <= result.idle_share <= result.empty_share < 1
    # At most one request runs at a time: the slots in use are the tokens times the time of one.
    alone = simulate_fleet(trees, replace(fleet, num_slots=1), barrier=False, affinity=False)
    in_use_s = (1 - alone.empty_share) * alone.seconds * num_engines
    assert in_use_s == pytest.approx(trees.num_tokens * 11 / 1e3, rel=1e-6)


def test_the_long_tail_is_as_long_as_was_asked():
    rng = np.random.default_rng(0)
    trees = draw_workload(400, 4, 0, 10, 0.25, 100.0, 1.0, rng)
    tokens = np.array([count for prompt in trees.bare for rollout in prompt for count in rollout])
    assert tokens.mean() == pytest.approx(100, rel=0.06)
    assert np.log(tokens).std() == pytest.approx(1.0, rel=0.05)
