"""Forgetting by class, by hand and against loops over examples, classes and models."""

from __future__ import annotations

import numpy as np
import pytest

from fedretain.forgetting import Vanishing, class_accuracy, class_forgetting, vanished, vanishings

NAN = float("nan")


def test_accuracy_by_hand() -> None:
    """Labels 0 0 0 1 1 3, answers 0 1 0 1 3 0, four classes: 2/3, 1/2, no example of class 2, 0/1."""
    found = class_accuracy([0, 0, 0, 1, 1, 3], [0, 1, 0, 1, 3, 0], 4)
    np.testing.assert_allclose(found, [2 / 3, 0.5, NAN, 0])


def test_accuracy_equals_a_loop_over_examples() -> None:
    rng = np.random.default_rng(1)
    labels, predictions = rng.integers(0, 5, 200), rng.integers(0, 6, 200)
    found = class_accuracy(labels, predictions, 6)
    for c in range(6):
        answers = [p == c for y, p in zip(labels, predictions, strict=True) if y == c]
        assert found[c] == pytest.approx(sum(answers) / len(answers) if answers else NAN, nan_ok=True)


def test_forgetting_by_hand() -> None:
    """Three classes, before = (0.8, 0.4, 0.6); client 0 holds classes 0 and 1, client 1 holds class 2.

    after[c, i]:  0.9 0.2      F:  −0.1 0.6      held by 0: (−0.1 + 0.1)/2 = 0,    absent: 0.6
                  0.3 0.0           0.1 0.4      held by 1: −0.4,                   absent: (0.6 + 0.4)/2 = 0.5
                  0.0 1.0           0.6 −0.4
    """
    found = class_forgetting(
        [0.8, 0.4, 0.6], [[0.9, 0.2], [0.3, 0.0], [0.0, 1.0]], [[True, False], [True, False], [False, True]]
    )
    np.testing.assert_allclose(found.matrix, [[-0.1, 0.6], [0.1, 0.4], [0.6, -0.4]], atol=1e-15)
    np.testing.assert_allclose(found.held, [0, -0.4], atol=1e-15)
    np.testing.assert_allclose(found.absent, [0.6, 0.5], atol=1e-15)


def test_forgetting_equals_loops() -> None:
    """Class 4 has no test examples, client 0 holds everything, client 1 nothing that is tested."""
    rng = np.random.default_rng(2)
    before, after, held = rng.random(5), rng.random((5, 6)), rng.random((5, 6)) < 0.5
    before[4] = after[4] = NAN
    held[:, 0], held[:, 1] = True, [False, False, False, False, True]
    found = class_forgetting(before, after, held)
    for i in range(6):
        own = [before[c] - after[c, i] for c in range(4) if held[c, i]]
        others = [before[c] - after[c, i] for c in range(4) if not held[c, i]]
        assert found.held[i] == pytest.approx(np.mean(own) if own else NAN, nan_ok=True)
        assert found.absent[i] == pytest.approx(np.mean(others) if others else NAN, nan_ok=True)
    assert np.isnan(found.absent[0])
    assert np.isnan(found.held[1])


def test_which_classes_vanish_when_and_who_held_them() -> None:
    """Round 2: class 0 goes from 0.5 to 0 and neither participant holds it; class 1 from 0.2 to 0.1 has not vanished.
    Round 4: class 1 goes from 0.1 to 0 though one participant holds it; class 0 was lost already; class 2 unknown."""
    before, after = [[0.5, 0.2, NAN], [0.0, 0.1, NAN]], [[0.0, 0.1, NAN], [0.0, 0.0, NAN]]
    held = [[[0, 0], [1, 1], [0, 0]], [[1, 0], [0, 1], [0, 0]]]
    assert vanished(before, after).tolist() == [[True, False, False], [False, True, False]]
    assert vanishings([2, 4], before, after, held) == [Vanishing(2, 0, holders=0), Vanishing(4, 1, holders=1)]


def test_shapes_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="not the same examples"):
        class_accuracy([0, 1], [0], 2)
    with pytest.raises(ValueError, match="0 … 1"):
        class_accuracy([0, 2], [0, 1], 2)
    with pytest.raises(ValueError, match="shapes"):
        class_forgetting([0.5], [[0.5, 0.1]], [[True]])
    with pytest.raises(ValueError, match="1 rounds"):
        vanishings([1], [[0.5], [0.5]], [[0.5], [0.5]], [[[True]], [[True]]])
