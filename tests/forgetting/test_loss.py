"""Loss increase, by hand and client by client."""

from __future__ import annotations

import numpy as np
import pytest

from fedretain.forgetting import loss_increase


def test_by_hand() -> None:
    """Two clients of the round before, losses 0.5 and 1.0; three local models with losses (1, 2, 3) and (1, 0.5, 0.9)
    on their data: 6/3 − 0.5 = 1.5, and 2.4/3 − 1 = −0.2 (local training even helped the second)."""
    np.testing.assert_allclose(loss_increase([0.5, 1.0], [[1, 2, 3], [1, 0.5, 0.9]]), [1.5, -0.2])


def test_equals_sums_one_by_one() -> None:
    rng = np.random.default_rng(0)
    before, after = rng.random(4), rng.random((4, 7))
    found = loss_increase(before, after)
    for i in range(4):
        total = 0.0
        for j in range(7):
            total += after[i, j]
        assert found[i] == pytest.approx(total / 7 - before[i])


@pytest.mark.parametrize(("before", "after"), [([0.5], [0.5]), ([0.5, 0.5], [[0.5]]), ([0.5], np.empty((1, 0)))])
def test_shapes_that_do_not_fit_are_refused(before, after) -> None:
    with pytest.raises(ValueError, match="shapes"):
        loss_increase(before, after)
