"""Spearman, Brier and the reliability table against values by hand, against scipy, and where they are undefined."""

import numpy as np
import pytest
from example_trees import make_prompt, make_rollout, make_turn
from scipy.stats import spearmanr

from trace_megatron.predictor import predictor_diagnostics
from trace_megatron.predictor.diagnostics import brier, reliability_table, spearman
from trace_megatron.types import Anchor, RolloutTree


def test_spearman_by_hand():
    assert spearman([0.1, 0.2, 0.3, 0.4], [1, 2, 3, 4]) == pytest.approx(1.0)
    assert spearman([0.1, 0.2, 0.3, 0.4], [4, 3, 2, 1]) == pytest.approx(-1.0)
    # no ties: 1 - 6 sum d^2 / (n (n^2 - 1)) = 1 - 6 * 4 / 60
    assert spearman([0.1, 0.2, 0.3, 0.4], [2, 1, 4, 3]) == pytest.approx(0.6)
    # ranks 1.5 1.5 3 4 against 1 2.5 2.5 4, centred: products sum to 3.75, both norms are 4.5
    assert spearman([0.1, 0.1, 0.2, 0.3], [0, 1, 1, 2]) == pytest.approx(3.75 / 4.5)


def test_spearman_agrees_with_scipy():
    rng = np.random.default_rng(0)
    for _ in range(50):
        scores, outcomes = rng.integers(0, 6, 20) / 6, rng.integers(0, 2, 20).astype(float)
        assert spearman(scores, outcomes) == pytest.approx(spearmanr(scores, outcomes).statistic, abs=1e-12)


def test_undefined_is_none():
    assert spearman([], []) is spearman([0.5], [1.0]) is None
    assert spearman([0.5, 0.5], [0.0, 1.0]) is spearman([0.4, 0.5], [1.0, 1.0]) is None
    assert brier([], []) is None
    assert reliability_table([], []) == ()


def test_brier_by_hand():
    assert brier([0.5, 1.0, 0.2], [1.0, 1.0, 0.0]) == pytest.approx((0.25 + 0.04) / 3)


def test_reliability_by_hand():
    low, middle, high = reliability_table([0.0, 0.05, 0.1, 0.95, 1.0], [0.0, 1.0, 1.0, 1.0, 0.5])
    assert (low.low, low.high, low.count) == (0.0, 0.1, 2)
    assert (low.score_mean, low.success_mean) == (pytest.approx(0.025), 0.5)
    assert (middle.low, middle.count, middle.success_mean) == (0.1, 1, 1.0)
    assert (high.low, high.high, high.count) == (0.9, 1.0, 2)
    assert (high.score_mean, high.success_mean) == (pytest.approx(0.975), 0.75)


def test_diagnostics_of_a_step_by_hand():
    turn = make_turn([1], [2])
    first = RolloutTree(
        make_prompt([1]),
        (
            make_rollout([turn, turn, turn], 1.0),
            make_rollout([turn, turn], 0.0),
            make_rollout([turn, turn], 0.0, trained=False),
            make_rollout([turn], 1.0, Anchor(1, 1)),  # a continuation counts nowhere
        ),
    )
    second = RolloutTree(make_prompt([2]), (make_rollout([turn], 1.0),))
    unknown = RolloutTree(make_prompt([3]), (make_rollout([turn], 0.0, trained=False),))
    found = predictor_diagnostics(
        [0.4, 0.9, 0.3], [first, second, unknown], [np.array([0.6, 0.8, 0.3]), np.array([]), np.array([])]
    )
    assert (found.num_roots, found.num_prefixes) == (2, 3)
    assert found.root_brier == pytest.approx((0.1**2 + 0.1**2) / 2)
    assert found.root_spearman == pytest.approx(1.0)
    assert found.prefix_brier == pytest.approx((0.4**2 + 0.2**2 + 0.3**2) / 3)
    assert found.prefix_spearman == pytest.approx(spearmanr([0.6, 0.8, 0.3], [1, 1, 0]).statistic)
    assert [row.count for row in found.prefix_reliability] == [1, 1, 1]
    assert [row.success_mean for row in found.root_reliability] == [0.5, 1.0]


def test_diagnostics_of_nothing():
    found = predictor_diagnostics([], [], [])
    assert (found.root_spearman, found.root_brier, found.prefix_spearman, found.prefix_brier) == (None,) * 4


def test_scores_must_match_the_prefixes():
    tree = RolloutTree(make_prompt([1]), (make_rollout([make_turn([1], [2]), make_turn([3])], 1.0),))
    with pytest.raises(ValueError, match="zip"):
        predictor_diagnostics([0.5], [tree], [np.array([0.1, 0.2])])
