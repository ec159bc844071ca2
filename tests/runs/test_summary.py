"""Final accuracy: four summaries of one curve."""

from __future__ import annotations

import pytest

from fedretain.config import EvaluateSettings, make_experiment
from fedretain.errors import ConfigError
from fedretain.runs.summary import cost, final_accuracy, rounds_to_targets, summarise


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
    base = {"seconds": 0.5, "evaluate_seconds": 0.25, "measure_seconds": 0.25, "upload_bytes": 10, "download_bytes": 20}
    rows = [
        {"round": 1, **base, "forgetting_by_model": 0.2, "forgetting_by_data": 0.1, "forgettable_examples": 4},
        {"round": 2, **base, "test_accuracy": 0.5},
        {"round": 3, **base, "forgetting_by_model": 0.4, "forgetting_by_data": 0.2, "forgettable_examples": 5},
    ]
    found = summarise(rows, 0.1, 7, EvaluateSettings())
    assert found["mean_forgetting"] == pytest.approx(0.3)
    assert found["client_forgetting"] == {"by_model": pytest.approx(0.3), "by_data": pytest.approx(0.15)}
    assert found["forgettable_examples"] == 4.5
    assert found["forgetting_events"] == 9
    assert (found["seconds"], found["upload_bytes"], found["download_bytes"]) == (1.5, 30, 60)
    assert (found["rounds"], found["clients"], found["initial_accuracy"]) == (3, 7, 0.1)


def test_never_measured() -> None:
    found = summarise([], 0.1, 7, EvaluateSettings())
    assert found["final_accuracy"] == dict.fromkeys(("last", "mean_last_100", "top", "average"), 0.1)
    assert found["mean_forgetting"] is None
    assert found["client_forgetting"] == {"by_model": None, "by_data": None}
    assert found["forgetting_events"] is None
    assert found["rounds_to_accuracy"] == {"0.5": None, "0.9": None}
    assert found["cost"]["measuring_share"] == 0


def test_rounds_to_accuracy_with_and_without_a_reference() -> None:
    """Accuracies 0.3, 0.45, –, 0.81, 0.7 in rounds 1 to 5. As accuracies: 0.5 in round 4, 0.9 never.

    Against a reference of 0.9: 0.5 · 0.9 = 0.45 in round 2 and 0.9 · 0.9 = 0.81 in round 4, both met exactly.
    """
    accuracies = {1: 0.3, 2: 0.45, 4: 0.81, 5: 0.7}
    rows = [{"round": t, **({"test_accuracy": accuracies[t]} if t in accuracies else {})} for t in range(1, 6)]
    assert rounds_to_targets(rows, EvaluateSettings()) == {"0.5": 4, "0.9": None}
    assert rounds_to_targets(rows, EvaluateSettings(reference=0.9)) == {"0.5": 2, "0.9": 4}
    assert rounds_to_targets(rows, EvaluateSettings(targets=())) == {}


def test_cost_adds_up_and_tells_the_share_of_measuring() -> None:
    """2 · 3 s training, 2 · 0.5 s testing, 1 s measuring in one of the rounds: 1 of 8 seconds."""
    row = {"seconds": 3.0, "evaluate_seconds": 0.5, "measure_seconds": 0.0}
    assert cost([row, {**row, "measure_seconds": 1.0}]) == {
        "training_seconds": 6.0,
        "evaluating_seconds": 1.0,
        "measuring_seconds": 1.0,
        "measuring_share": 0.125,
    }


@pytest.mark.parametrize("targets", [[0.0], [1.1], [0.9, 0.5], [0.5, 0.5]])
def test_targets_are_ascending_shares(targets: list[float]) -> None:
    with pytest.raises(ConfigError, match=r"^evaluate\.targets"):
        make_experiment({"evaluate": {"targets": targets}})
