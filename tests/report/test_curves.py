from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fedretain.report import read_run
from fedretain.report.comparison import Spread, group_runs
from fedretain.report.curves import ACCURACY, accuracy_by_traffic, over_seeds, sent_megabytes

MakeRun = Callable[..., Path]


def rewrite(run: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Apply a change to each row of the log."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    for row in rows:
        change(row)
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_a_round_that_one_seed_lacks_is_the_other_seeds(make_run: MakeRun, experiment: Any) -> None:
    """Round 1: 20 and 40 %, mean 30, deviation √200 = 14.142; round 2: only the first seed, no deviation."""
    runs = [
        make_run("a", experiment(), accuracies=(0.2, 0.5)),
        make_run("b", experiment(seed=1), accuracies=(0.4,)),
    ]
    (group,) = group_runs(runs)
    first, second = over_seeds(group, ACCURACY)
    assert first.x == 1
    assert first.y == Spread(pytest.approx(30), pytest.approx(200**0.5), 2)
    assert second == (2, Spread(50, None, 1))


def test_traffic_differs_between_seeds(make_run: MakeRun, experiment: Any) -> None:
    """The second seed sends 4 MB up a round instead of 2: after round 1 it stands at 5 MB, the first at 3; mean 4.

    Accuracies 20 and 40 %: mean 30. Before: both have 10 % for nothing.
    """
    runs = [
        make_run("a", experiment(), accuracies=(0.2,)),
        make_run("b", experiment(seed=1), accuracies=(0.4,)),
    ]
    rewrite(runs[1], lambda row: row.update(upload_bytes=4_000_000))
    (group,) = group_runs(runs)
    start, end = accuracy_by_traffic(group)
    assert (start.x, start.y.mean, start.y.std) == (0, 10, 0)
    assert (end.x, end.y.mean) == (4, pytest.approx(30))


def test_only_evaluated_rounds_are_points_but_all_traffic_counts(make_run: MakeRun) -> None:
    """Evaluated in rounds 2 and 4 only: 6 and 12 MB."""
    run = make_run(finished=False)
    rewrite(run, lambda row: row.pop("test_accuracy") if row["round"] % 2 else None)
    (group,) = group_runs([run])
    assert [(point.x, point.y.mean) for point in accuracy_by_traffic(group)] == [(6, 40), (12, 80)]


def test_without_traffic_there_is_no_curve(make_run: MakeRun) -> None:
    """One direction alone is counted as it is: 1 MB a round."""
    run = make_run()
    rewrite(run, lambda row: row.pop("upload_bytes"))
    assert sent_megabytes(read_run(run)) == {1: 1, 2: 2, 3: 3, 4: 4}
    rewrite(run, lambda row: row.pop("download_bytes"))
    assert sent_megabytes(read_run(run)) == {}
    assert accuracy_by_traffic(group_runs([run])[0]) == []
