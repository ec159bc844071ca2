"""Fisher agreement, by hand and against the textbook sums."""

from __future__ import annotations

import math

import numpy as np
import pytest

from fedretain.forgetting import fisher_agreement


def test_by_hand() -> None:
    """a = (1, 2, 3, 6), b = (2, 1, 4, 5), both of mean 3: deviations (−2, −1, 0, 3) and (−1, −2, 1, 2).
    Products 2 + 2 + 0 + 6 = 10, squares 4 + 1 + 0 + 9 = 14 and 1 + 4 + 1 + 4 = 10: r = 10/√140 = 0.8451…"""
    assert fisher_agreement([1, 2, 3, 6], [2, 1, 4, 5]) == pytest.approx(10 / math.sqrt(140))
    assert fisher_agreement([[1, 2], [3, 6]], [[2, 1], [4, 5]]) == pytest.approx(10 / math.sqrt(140))
    assert fisher_agreement([1, 2, 4], [3, 5, 9]) == pytest.approx(1)
    assert fisher_agreement([1, 2, 4], [-1, -2, -4]) == pytest.approx(-1)


def test_equals_the_textbook_sums_even_when_the_values_are_tiny() -> None:
    """Correlation does not see the scale: values around 1e-200, whose squares are 0 in float64, give the same."""
    rng = np.random.default_rng(0)
    a, noise = rng.exponential(size=300), rng.exponential(size=300)
    b = a + noise
    mean_a, mean_b = sum(a) / 300, sum(b) / 300
    top = sum((x - mean_a) * (y - mean_b) for x, y in zip(a, b, strict=True))
    bottom = math.sqrt(sum((x - mean_a) ** 2 for x in a) * sum((y - mean_b) ** 2 for y in b))
    assert fisher_agreement(a, b) == pytest.approx(top / bottom)
    assert fisher_agreement(1e-200 * a, 1e-30 * b) == pytest.approx(top / bottom)


def test_constant_values_have_no_correlation() -> None:
    assert math.isnan(fisher_agreement([0.1] * 7, range(7)))
    assert math.isnan(fisher_agreement(range(3), [0, 0, 0]))


@pytest.mark.parametrize(("a", "b"), [([1, 2], [1, 2, 3]), ([], [])])
def test_other_parameters_are_refused(a, b) -> None:
    with pytest.raises(ValueError, match="not the same parameters"):
        fisher_agreement(a, b)
