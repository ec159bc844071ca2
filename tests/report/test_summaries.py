"""Every summary of a setting: accuracies, both averages, rounds to an accuracy, and federated against centralised."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fedretain.report import Spread, read_run, summary_rows, training_pairs, write_report
from fedretain.report.summaries import Reached, run_cost, run_summaries

MakeRun = Callable[..., Path]
Experiment = Callable[..., dict[str, Any]]


def test_all_summaries_of_a_run(make_run: MakeRun) -> None:
    """Accuracies 0.2, 0.4, 0.6, 0.8; forgetting 0.1 in rounds 2 and 4; 6 and 12 forgettable examples.

    4 · 0.5 s training, 4 · 0.25 s testing, 2 · 0.5 s measuring: measuring is 1 of 4 seconds.
    """
    run = read_run(make_run())
    assert run_summaries(run) == {
        "last": 0.8,
        "mean_last_100": pytest.approx(0.5),
        "top": 0.8,
        "average": pytest.approx(0.5),
        "by_model": pytest.approx(0.1),
        "by_data": pytest.approx(0.1),
        "forgetting_events": 18,
        "measuring_share": 0.25,
    }
    assert run_cost(run) == {"training": 2.0, "evaluating": 1.0, "measuring": 1.0}


def test_rounds_to_accuracy_over_seeds(make_run: MakeRun, experiment: Experiment) -> None:
    """Seed 0 reaches 50 % in round 3, seed 1 in round 2: 2.5 ± 0.7. 90 % is reached by seed 1 alone, in round 4."""
    runs = [
        make_run("a", experiment(), accuracies=(0.2, 0.4, 0.6, 0.8)),
        make_run("b", experiment(seed=1), accuracies=(0.2, 0.5, 0.6, 0.9)),
        make_run("c", experiment(loss={"name": "wsm"}), accuracies=(0.1, 0.2, 0.3)),
    ]
    ce, wsm = summary_rows(runs)
    assert ce["rounds_to"][0.5] == Reached(pytest.approx(Spread(2.5, 0.5**0.5, 2)), 2, 4)
    assert ce["rounds_to"][0.5].text == "2.5 ± 0.7"
    assert ce["rounds_to"][0.9].text == "4.0 (1 of 2 seeds)"
    assert [reached.text for reached in wsm["rounds_to"].values()] == ["not within 3", "not within 3"]
    assert ce["reference"] == wsm["reference"] == "100.0 % (none)"
    page = write_report(runs, runs[0].parent / "page.html").read_text(encoding="utf-8")
    assert "not within 3" in page
    assert "4.0 (1 of 2 seeds)" in page


def test_the_reference_is_the_fedsgd_run_of_the_same_setting_and_seed(
    make_run: MakeRun, experiment: Experiment
) -> None:
    """FedSGD ends with 0.8 (seed 0) and 0.4 (seed 1): 90 % of that are 0.72 and 0.36, first met in rounds 4 and 1.

    FedSGD itself reaches half of that, 0.4 and 0.2, in rounds 3 and 1: mean 2, deviation √2. A FedSGD run on another
    split is of another setting; one that is not finished has no final accuracy.
    """
    other_split = {"kind": "iid", "clients": 3}
    runs = [
        make_run("a", experiment(), accuracies=(0.2, 0.4, 0.6, 0.75)),
        make_run("b", experiment(seed=1), accuracies=(0.37, 0.4, 0.4, 0.4)),
        make_run("s", experiment(method={"name": "fedsgd"}), accuracies=(0.2, 0.3, 0.6, 0.8)),
        make_run("t", experiment(method={"name": "fedsgd"}, seed=1), accuracies=(0.2, 0.3, 0.3, 0.4)),
        make_run("u", experiment(partition=other_split), accuracies=(0.2, 0.4, 0.6, 0.8)),
    ]
    fedavg, fedsgd, elsewhere = summary_rows(runs)
    assert fedavg["reference"] == "40.0 to 80.0 % (FedSGD)"
    assert fedavg["rounds_to"][0.9].spread == pytest.approx(Spread(2.5, 4.5**0.5, 2))
    assert fedsgd["rounds_to"][0.5].text == "2.0 ± 1.4"
    assert elsewhere["reference"] == "100.0 % (none)"
    (runs[3] / "summary.json").unlink()
    assert summary_rows(runs)[0]["reference"] == "80.0 to 100.0 % (FedSGD or none)"


def test_a_reference_in_the_file_comes_first(make_run: MakeRun, experiment: Experiment) -> None:
    """50 % of 0.8 is 0.4, reached in round 2."""
    evaluate = {"every": 1, "targets": [0.5], "reference": 0.8}
    path = make_run("a", experiment(evaluate=evaluate))
    (row,) = summary_rows([path])
    assert (row["reference"], row["rounds_to"][0.5].text) == ("80.0 % (given)", "2")
    assert "rounds to 50 % of 80.0 %" in write_report([path], path / "page.html").read_text(encoding="utf-8")


def test_a_run_without_accuracies_reaches_nothing(make_run: MakeRun) -> None:
    path = make_run()
    (path / "metrics.jsonl").write_text("")
    (row,) = summary_rows([path])
    assert row["rounds_to"] == {}
    assert row["last"] is None
    assert run_cost(read_run(path)) is None


def test_pairs_of_federated_and_centralised_runs(make_run: MakeRun, experiment: Experiment) -> None:
    """18 events in four rounds, 6 in two rounds: 18 / 6 is 200 % more. A setting trained one way only has no pair."""
    other = {"name": "mnist"}
    runs = [
        make_run("c", experiment(training="centralised"), accuracies=(0.5, 0.6)),
        make_run("f", experiment(training="federated")),
        make_run("g", experiment(training="federated", data=other)),
    ]
    (pair,) = training_pairs(runs)
    assert (pair.centralised.mean, pair.federated.mean, pair.increase) == (6, 18, pytest.approx(200))
    assert pair.texts == ("6", "18", "+200 %")
    assert "data=digits" in pair.label
    assert "training" not in pair.label
    page = write_report(runs, runs[0].parent / "page.html").read_text(encoding="utf-8")
    assert "+200 %" in page
    assert training_pairs(runs[1:]) == []
