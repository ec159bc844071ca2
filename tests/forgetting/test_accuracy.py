"""Summaries of an accuracy curve, by hand and against a search round by round."""

from __future__ import annotations

import numpy as np
import pytest

from fedretain.forgetting import accuracy_summaries, rounds_to_accuracy, rounds_to_relative_accuracy


def test_summaries_by_hand() -> None:
    """Measured in rounds 50, 100, 150 and 200: 0.2, 0.8, 0.6, 0.4. The last 100 rounds are 101 … 200, so their mean is
    (0.6 + 0.4)/2 = 0.5; the top is 0.8 and the mean of all 2.0/4 = 0.5. Up to round 240 only 150 and 200 count as
    well (141 … 240); up to round 250 (151 … 250) only 0.4 does."""
    curve = [(50, 0.2), (100, 0.8), (150, 0.6), (200, 0.4)]
    expected = {"last": 0.4, "mean_last_100": pytest.approx(0.5), "top": 0.8, "average": pytest.approx(0.5)}
    assert accuracy_summaries(curve) == expected
    assert accuracy_summaries(curve, last_round=240) == expected
    assert accuracy_summaries(curve, last_round=250) == {**expected, "mean_last_100": pytest.approx(0.4)}


def test_nothing_measured() -> None:
    assert accuracy_summaries([]) is None
    with pytest.raises(ValueError, match="last 100 rounds up to 300"):
        accuracy_summaries([(200, 0.5)], last_round=300)


def test_rounds_to_accuracy_by_hand() -> None:
    """0.3, 0.5, 0.4, 0.7 in rounds 2, 4, 6, 8. A FedSGD run that ends at 0.5: R_0.5 asks for 0.25 (round 2), R_1.0 for
    0.5 (round 4, reached exactly), R_1.4 for 0.7 (round 8), R_2 for 1.0 (never)."""
    curve = [(2, 0.3), (4, 0.5), (6, 0.4), (8, 0.7)]
    assert [rounds_to_accuracy(curve, target) for target in (0.0, 0.3, 0.31, 0.6, 0.71)] == [2, 2, 4, 8, None]
    assert [rounds_to_relative_accuracy(curve, a, 0.5) for a in (0.5, 1.0, 1.4, 2.0)] == [2, 4, 8, None]
    assert rounds_to_accuracy([], 0.0) is None


def test_rounds_to_accuracy_is_the_first_of_all_that_reach_it() -> None:
    rng = np.random.default_rng(0)
    for _ in range(50):
        curve = [(3 * t, float(a)) for t, a in enumerate(rng.random(12), 1)]
        target = float(rng.random() * 1.2)
        reached = [t for t, a in curve if a >= target]
        assert rounds_to_accuracy(curve, target) == (min(reached) if reached else None)
