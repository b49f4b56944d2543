"""The two chances against exact rationals."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest

from trace_megatron.algorithm.contrast import flip_prob, mixed_prob, repeat_prob

PROBS = [0.0, 1e-60, 1e-18, 1e-9, 0.1, 0.5, 0.75, 1 - 1e-9, 1 - 2**-53, 1.0]
COUNTS = [0, 1, 2, 3, 7, 64, 1024]


@pytest.mark.parametrize("prob", PROBS)
@pytest.mark.parametrize("count", COUNTS)
def test_equal_exact_rationals(prob, count):
    v = Fraction(prob)
    mixed = 0 if count < 2 else 1 - v**count - (1 - v) ** count
    assert mixed_prob(prob, count) == pytest.approx(float(mixed), rel=1e-12, abs=0)
    assert flip_prob(prob, count) == pytest.approx(float(1 - v**count), rel=1e-12, abs=0)


def test_broadcast_and_types():
    mixed = mixed_prob(np.array([[0.5], [0.25]], dtype=np.float32), np.array([2, 3]))
    assert mixed.dtype == np.float64
    np.testing.assert_allclose(mixed, [[0.5, 0.75], [0.375, 0.5625]], rtol=1e-15)
    np.testing.assert_allclose(flip_prob([0.5, 0.0], 2), [0.75, 1.0])
    np.testing.assert_allclose(repeat_prob([0.0, 1.0, 0.5], [0.9, 0.9, 0.9]), [0.1, 0.9, 0.5])


@pytest.mark.parametrize("prob", [-0.1, 1.1, float("nan")])
def test_probabilities_are_checked(prob):
    for call in (lambda: mixed_prob(prob, 2), lambda: flip_prob(prob, 2), lambda: repeat_prob(1.0, prob)):
        with pytest.raises(ValueError, match=r"in \[0, 1\]"):
            call()


@pytest.mark.parametrize("count", [-1, 1.5])
def test_counts_are_checked(count):
    with pytest.raises(ValueError, match="whole numbers"):
        mixed_prob(0.5, count)
