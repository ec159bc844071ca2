"""Final accuracy: four summaries of one curve."""

from __future__ import annotations

import pytest

from fedretain.runs.summary import final_accuracy, summarise


def test_the_last_hundred_rounds_not_the_last_hundred_measurements() -> None:
    """150 rounds, measured every tenth: 0.10, 0.20 … 1.50. The last 100 rounds are 51 … 150: the values 0.6 … 1.5,
    mean 1.05; the mean of all is 0.8."""
    rows = [{"round": t, **({"test_accuracy": t / 100} if t % 10 == 0 else {})} for t in range(1, 151)]
    assert final_accuracy(rows) == {
        "last": 1.5,
        "mean_last_100": pytest.approx(1.05),
        "top": 1.5,
        "average": pytest.approx(0.8),
    }


def test_top_is_not_the_last() -> None:
    rows = [{"round": t, "test_accuracy": a} for t, a in enumerate([0.2, 0.9, 0.4], 1)]
    assert final_accuracy(rows) == {
        "last": 0.4,
        "mean_last_100": pytest.approx(0.5),
        "top": 0.9,
        "average": pytest.approx(0.5),
    }


def test_totals_and_means() -> None:
    """Forgetting is a mean over the rounds in which it was measured; seconds and bytes are sums."""
    base = {"seconds": 0.5, "upload_bytes": 10, "download_bytes": 20}
    rows = [
        {"round": 1, **base, "forgetting_by_model": 0.2, "forgettable_examples": 4},
        {"round": 2, **base, "test_accuracy": 0.5},
        {"round": 3, **base, "forgetting_by_model": 0.4, "forgettable_examples": 5},
    ]
    found = summarise(rows, 0.1, 7)
    assert found["mean_forgetting"] == pytest.approx(0.3)
    assert found["forgettable_examples"] == 4.5
    assert (found["seconds"], found["upload_bytes"], found["download_bytes"]) == (1.5, 30, 60)
    assert (found["rounds"], found["clients"], found["initial_accuracy"]) == (3, 7, 0.1)


def test_never_measured() -> None:
    found = summarise([], 0.1, 7)
    assert found["final_accuracy"] == dict.fromkeys(("last", "mean_last_100", "top", "average"), 0.1)
    assert found["mean_forgetting"] is None
