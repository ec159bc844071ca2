"""Forgetting events of ordinary training, by hand and against a dictionary that remembers every answer."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from fedretain.forgetting import ForgettingEvents, margin_error


def test_events_by_hand() -> None:
    """Three examples, error 1 for a wrong answer, NaN where the batch did not bring the example:

    step   1  2  3  4  5      example 0: right, wrong (event), right, wrong (event)          2
    ex. 0  0  1  –  0  1      example 1: wrong, wrong, right: learned, never forgotten       0
    ex. 1  1  –  1  0  –      example 2: right when last seen in step 1, wrong in step 4     1
    ex. 2  0  –  –  1  1
    """
    events = ForgettingEvents(3)
    steps = [([0, 1, 2], [0, 1, 0]), ([0], [1]), ([1], [1]), ([2, 0, 1], [1, 0, 0]), ([2, 0], [1, 1])]
    assert [events.see(numbers, errors) for numbers, errors in steps] == [0, 1, 0, 1, 1]
    assert events.counts.tolist() == [2, 0, 1]
    assert events.total == 3


def test_margin_error_by_hand() -> None:
    """Logits (1, 4, 2), label 1: 2 − 4 = −2, right. Label 0: 4 − 1 = 3, wrong. Logits (0, −1, −5), label 0: −1."""
    found = margin_error([[1, 4, 2], [1, 4, 2], [0, -1, -5]], [1, 0, 0])
    assert found.tolist() == [-2, 3, -1]


def test_a_growing_margin_error_is_an_event_even_when_the_answer_stays_right() -> None:
    """−2, −1, −1, −3: it grows once, stays once, shrinks once."""
    events = ForgettingEvents(1)
    assert [events.see([0], [error]) for error in (-2.0, -1.0, -1.0, -3.0)] == [0, 1, 0, 0]


def test_margin_error_equals_a_loop() -> None:
    rng = np.random.default_rng(0)
    logits, labels = rng.normal(size=(30, 4)), rng.integers(0, 4, 30)
    for row, label, found in zip(logits, labels, margin_error(logits, labels), strict=True):
        assert found == max(f for c, f in enumerate(row) if c != label) - row[label]
        assert (found < 0) == (row.argmax() == label)


def test_events_equal_a_dictionary_of_answers() -> None:
    rng = np.random.default_rng(1)
    events, answers = ForgettingEvents(20), dict[int, list[bool]]()
    for _ in range(60):
        batch = rng.choice(20, 6, replace=False)
        wrong = rng.random(6) < 0.4
        events.see(batch, wrong)
        for number, is_wrong in zip(batch.tolist(), wrong.tolist(), strict=True):
            answers.setdefault(number, []).append(not is_wrong)
    for number, history in answers.items():
        lost = [was and not now for was, now in itertools.pairwise(history)]
        assert events.counts[number] == sum(lost)
    assert events.total > 0


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(ValueError, match="no example twice"):
        ForgettingEvents(3).see([1, 1], [0, 1])
    with pytest.raises(ValueError, match="one error for each example"):
        ForgettingEvents(3).see([1, 2], [0])
    with pytest.raises(ValueError, match="do not fit"):
        margin_error([[1.0], [2.0]], [0, 0])
