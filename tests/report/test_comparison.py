from __future__ import annotations

import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fedretain.errors import RunError
from fedretain.report import COLUMNS, Spread, comparison_rows, read_run
from fedretain.report.comparison import group_runs, plain_loss_first

MakeRun = Callable[..., Path]
Experiment = Callable[..., dict[str, Any]]


@pytest.fixture
def two_losses(make_run: MakeRun, experiment: Experiment) -> list[Path]:
    """ce and wsm with two seeds each; last accuracies 0.80, 0.84 and 0.90, 0.92."""
    return [
        make_run("a", experiment(seed=0), accuracies=(0.5, 0.80), forgetting=0.10),
        make_run("b", experiment(seed=0, loss={"name": "wsm"}), accuracies=(0.5, 0.90), forgetting=0.02),
        make_run("c", experiment(seed=1), accuracies=(0.5, 0.84), forgetting=0.14),
        make_run("d", experiment(seed=1, loss={"name": "wsm"}), accuracies=(0.5, 0.92), forgetting=0.04),
    ]


def test_runs_are_grouped_over_seeds_and_named_by_what_differs(two_losses: list[Path]) -> None:
    rows = comparison_rows(two_losses)
    assert [(row["label"], row["seeds"]) for row in rows] == [("loss=ce", [0, 1]), ("loss=wsm", [0, 1])]
    assert [[path.name for path in row["runs"]] for row in rows] == [["a", "c"], ["b", "d"]]


def test_numbers_are_means_and_sample_deviations_over_seeds(two_losses: list[Path]) -> None:
    """0.80 and 0.84: mean 0.82, deviation √(2 · 0.02² / 1) = 0.02828; forgetting 0.10, 0.14 likewise."""
    row = comparison_rows(two_losses)[0]
    assert row["final_accuracy"] == pytest.approx(Spread(0.82, 0.02 * 2**0.5, 2))
    assert row["mean_forgetting"] == pytest.approx(Spread(0.12, 0.02 * 2**0.5, 2))
    assert [column.text(row[column.key]) for column in COLUMNS] == [
        "82.0 ± 2.8",
        "12.0 ± 2.8",
        "9.0 ± 0.0",
        "2.0 ± 0.0",
        "8.00 ± 0.00",
        "4.00 ± 0.00",
    ]


def test_the_winner_of_each_column_is_marked_and_a_tie_of_all_is_not(two_losses: list[Path]) -> None:
    """wsm is more accurate and forgets less; seconds and bytes are the same everywhere."""
    ce, wsm = comparison_rows(two_losses)
    assert ce["best"] == frozenset()
    assert wsm["best"] == {"final_accuracy", "mean_forgetting"}


def test_an_unfinished_setting_wins_nothing(make_run: MakeRun, experiment: Experiment) -> None:
    """The unfinished run is ahead, but its rounds, seconds and bytes are not all spent yet."""
    rows = comparison_rows(
        [
            make_run("a", accuracies=(0.5, 0.9), finished=False),
            make_run("b", experiment(loss={"name": "tce"}), accuracies=(0.5, 0.8)),
            make_run("c", experiment(loss={"name": "wsm"}), accuracies=(0.5, 0.7)),
        ]
    )
    assert [row["unfinished"] for row in rows] == [1, 0, 0]
    assert ["final_accuracy" in row["best"] for row in rows] == [False, True, False]


def test_a_single_run_has_no_deviation_and_is_named_by_its_experiment(
    make_run: MakeRun, experiment: Experiment
) -> None:
    (row,) = comparison_rows([make_run()])
    assert row["label"] == "digits"
    assert row["final_accuracy"] == Spread(0.8, None, 1)
    assert COLUMNS[0].text(row["final_accuracy"]) == "80.0"
    assert COLUMNS[0].text(None) == "–"
    assert row["best"] == frozenset()


@pytest.mark.parametrize(
    ("changes", "labels"),
    [
        ([{}, {"local": {"optimizer": "sgd", "lr": 0.5, "epochs": 20}}], ["local.lr=0.1", "local.lr=0.5"]),
        (
            [{}, {"loss": {"name": "fedlc", "tau": 1.0}}, {"loss": {"name": "fedlc", "tau": 2.0}}],
            ["loss=ce", "loss=fedlc, loss.tau=1.0", "loss=fedlc, loss.tau=2.0"],
        ),
        (
            [{}, {"partition": {"kind": "iid", "clients": 3}}],
            ["partition=dirichlet, partition.alpha=0.1", "partition=iid"],
        ),
        (
            [{}, {"method": [{"name": "fedprox", "mu": 0.1}, {"name": "fedwavg"}]}],
            ["method=fedavg", "method=fedprox(mu=0.1) + fedwavg"],
        ),
        ([{}, {"server": {"lr": 1.0, "momentum": None}}], ["server.momentum unset", "server.momentum=none"]),
        ([{}, {"model": {"name": "mlp", "hidden": [8, 8]}}], ["model.hidden=[64]", "model.hidden=[8, 8]"]),
    ],
)
def test_labels_say_only_what_differs(
    make_run: MakeRun, experiment: Experiment, changes: list[dict[str, Any]], labels: list[str]
) -> None:
    runs = [make_run(str(number), experiment(**change)) for number, change in enumerate(changes)]
    assert [group.label for group in group_runs(runs)] == labels


def test_the_name_of_an_experiment_does_not_split_its_seeds(make_run: MakeRun, experiment: Experiment) -> None:
    runs = [make_run(str(seed), experiment(seed=seed, name=f"seed {seed}")) for seed in (3, 1)]
    (group,) = group_runs(runs)
    assert group.seeds == [1, 3]


def test_the_same_directory_given_twice_counts_once(make_run: MakeRun) -> None:
    path = make_run()
    (row,) = comparison_rows([path, path / ".." / "run", read_run(path)])
    assert row["final_accuracy"] == Spread(0.8, None, 1)


def test_no_run_at_all_is_refused() -> None:
    with pytest.raises(RunError, match="at least one run directory"):
        comparison_rows([])


def test_a_number_one_seed_lacks_is_averaged_over_the_others(make_run: MakeRun, experiment: Experiment) -> None:
    """Seed 1 logged nothing: the mean over the group is seed 0's alone, with no deviation."""
    runs = [make_run("a"), make_run("b", experiment(seed=1), finished=False)]
    (runs[1] / "metrics.jsonl").write_text("")
    (row,) = comparison_rows(runs)
    assert row["seconds"] == Spread(statistics.fmean([2.0]), None, 1)


def test_plain_cross_entropy_stands_above_the_losses_that_change_it(make_run: MakeRun, experiment: Experiment) -> None:
    """Listed as wsm, ce for one rate and wsm, ce for another: each pair stays together and is turned round."""
    runs = [
        make_run(f"{rate} {loss}", experiment(loss={"name": loss}, local={"lr": rate}))
        for rate in (0.5, 0.1)
        for loss in ("wsm", "ce")
    ]
    assert [group.label for group in plain_loss_first(group_runs([runs[0], *runs[2:], runs[1]]))] == [
        "loss=ce, local.lr=0.5",
        "loss=wsm, local.lr=0.5",
        "loss=ce, local.lr=0.1",
        "loss=wsm, local.lr=0.1",
    ]


def test_without_a_named_loss_the_order_stays(make_run: MakeRun, experiment: Experiment) -> None:
    runs = [make_run(method, experiment(loss=None, method={"name": method})) for method in ("fedprox", "fedavg")]
    assert [group.label for group in plain_loss_first(group_runs(runs))] == ["method=fedprox", "method=fedavg"]
