"""Client drift, by hand and pair by pair."""

from __future__ import annotations

import math

import numpy as np
import pytest

from fedretain.forgetting import client_drift, drift_of_products


def test_by_hand() -> None:
    """Updates (3, 4), (−4, 3), (6, 8) and 0: norms 5, 5, 10, 0. The first two are orthogonal (−12 + 12 = 0), the first
    and third parallel (50/50 = 1), the second and third orthogonal; the fourth has no direction. Mean over the three
    pairs that have one: (0 + 1 + 0)/3."""
    found = client_drift([[3, 4], [-4, 3], [6, 8], [0, 0]])
    assert found.norms.tolist() == [5, 5, 10, 0]
    nan = float("nan")
    np.testing.assert_allclose(found.cosines, [[1, 0, 1, nan], [0, 1, 0, nan], [1, 0, 1, nan], [nan] * 4], atol=1e-15)
    assert found.mean_cosine == pytest.approx(1 / 3)


def test_equals_pairs_one_by_one() -> None:
    updates = np.random.default_rng(0).normal(size=(5, 40))
    found = client_drift(updates)
    pairs = []
    for i in range(5):
        assert found.norms[i] == pytest.approx(math.sqrt(sum(x * x for x in updates[i])))
        for j in range(5):
            dot = sum(x * y for x, y in zip(updates[i], updates[j], strict=True))
            cosine = dot / math.hypot(*updates[i]) / math.hypot(*updates[j])
            assert found.cosines[i, j] == pytest.approx(cosine)
            pairs += [cosine] if i < j else []
    assert found.mean_cosine == pytest.approx(sum(pairs) / 10)
    again = drift_of_products(updates @ updates.T)
    assert np.array_equal(again.cosines, found.cosines)


def test_nobody_to_compare_with() -> None:
    assert math.isnan(client_drift([[1.0, 2.0]]).mean_cosine)
    assert math.isnan(client_drift([[1.0, 2.0], [0.0, 0.0]]).mean_cosine)


def test_shapes_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="clients, parameters"):
        client_drift([1.0, 2.0])
    with pytest.raises(ValueError, match="clients, clients"):
        drift_of_products([[1.0, 2.0]])
