"""Client forgetting against a case worked out by hand and an independent slow implementation."""

from __future__ import annotations

import numpy as np
import pytest

from fedretain.forgetting import client_forgetting, forgettable_examples


def test_by_hand() -> None:
    """Three clients, before = (0.8, 0.6, 0.4).

    after[k, i] (data k, model i):      F = before[k] − after[k, i]:
        0.9 0.5 0.2                        −0.1  0.3  0.6
        0.1 0.7 0.3                         0.5 −0.1  0.3
        0.4 0.0 1.0                         0.0  0.4 −0.6
    by model i, over the other data k:   (0.5 + 0)/2 = 0.25, (0.3 + 0.4)/2 = 0.35, (0.6 + 0.3)/2 = 0.45.
    by data k, over the other models i:  (0.3 + 0.6)/2 = 0.45, (0.5 + 0.3)/2 = 0.4, (0 + 0.4)/2 = 0.2.
    """
    found = client_forgetting([0.8, 0.6, 0.4], [[0.9, 0.5, 0.2], [0.1, 0.7, 0.3], [0.4, 0.0, 1.0]])
    np.testing.assert_allclose(found.matrix, [[-0.1, 0.3, 0.6], [0.5, -0.1, 0.3], [0, 0.4, -0.6]], atol=1e-15)
    np.testing.assert_allclose(found.by_model, [0.25, 0.35, 0.45], atol=1e-15)
    np.testing.assert_allclose(found.by_data, [0.45, 0.4, 0.2], atol=1e-15)


def test_cohort_against_all_clients_leaves_out_own_data_by_number() -> None:
    """Models of clients 2 and 0 on the data of clients 0, 1, 2: loops over pairs give the same means."""
    rng = np.random.default_rng(0)
    before, after = rng.random(3), rng.random((3, 2))
    found = client_forgetting(before, after, data=[0, 1, 2], models=[2, 0])
    for column, model in enumerate([2, 0]):
        others = [before[k] - after[k, column] for k in range(3) if k != model]
        assert found.by_model[column] == pytest.approx(sum(others) / len(others))
    for k in range(3):
        others = [before[k] - after[k, column] for column, model in enumerate([2, 0]) if k != model]
        assert found.by_data[k] == pytest.approx(sum(others) / len(others))


def test_clients_without_validation_data_are_left_out() -> None:
    """Client 1 has none: model 0 is judged by data 2 alone, and nobody can say what data 1 lost."""
    nan = float("nan")
    found = client_forgetting([0.5, nan, 0.5], [[0.5, 0.4, 0.3], [nan, nan, nan], [0.1, 0.2, 0.5]])
    np.testing.assert_allclose(found.by_model, [0.4, (0.1 + 0.3) / 2, 0.2])
    assert np.isnan(found.by_data[1])


def test_a_single_client_forgets_nobody() -> None:
    found = client_forgetting([0.5], [[0.9]])
    assert np.isnan(found.by_model).all()
    assert np.isnan(found.by_data).all()


@pytest.mark.parametrize(
    ("before", "after", "names"),
    [([0.5], [[0.5, 0.1]], {}), ([0.5, 0.5], [[0.5]], {}), ([0.5], [0.5], {}), ([0.5], [[0.5]], {"data": [1, 2]})],
)
def test_shapes_that_do_not_fit_are_refused(before, after, names) -> None:
    with pytest.raises(ValueError, match=r"shapes|clients"):
        client_forgetting(before, after, **names)


def test_forgettable_examples_are_those_lost_by_aggregation() -> None:
    """local 1 1 1 0 0, global 1 0 0 1 0: examples 1 and 2 were right and are wrong now."""
    assert forgettable_examples([1, 1, 1, 0, 0], [1, 0, 0, 1, 0]) == 2
    with pytest.raises(ValueError, match="not the same examples"):
        forgettable_examples([1, 0], [1])
