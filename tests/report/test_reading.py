from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from fedretain.errors import RunError
from fedretain.report import read_forgetting, read_run

MakeRun = Callable[..., Path]


def test_a_finished_run_is_read_whole(make_run: MakeRun) -> None:
    run = read_run(make_run())
    assert (run.name, run.seed, run.status, run.last_round) == ("digits", 0, "finished", 4)
    assert run.series("test_accuracy") == ([1, 2, 3, 4], [0.2, 0.4, 0.6, 0.8])
    assert run.class_counts is not None
    assert run.class_counts.tolist() == [[9, 1, 0], [0, 5, 5], [2, 2, 6]]
    assert run.class_names == ("zero", "one", "two")
    assert list(run.forgetting_files) == [2, 4]
    assert run.environment["device"] == {"kind": "cpu"}


def test_numbers_absent_from_a_round_are_left_out_of_its_series(make_run: MakeRun) -> None:
    """Forgetting is measured in rounds 2 and 4; a NaN and a null count as not measured."""
    path = make_run()
    with (path / "metrics.jsonl").open("a") as log:
        log.write('{"round": 5, "forgettable_examples": NaN}\n{"round": 6, "forgettable_examples": null}\n')
    assert read_run(path).series("forgettable_examples") == ([2, 4], [6.0, 12.0])


def test_forgetting_keeps_data_in_rows_and_models_in_columns(make_run: MakeRun) -> None:
    run = read_run(make_run())
    matrix = read_forgetting(run, 2)
    assert matrix.models.tolist() == [0, 2]
    assert matrix.forgetting.tolist() == [[-0.05, 0.1], [0.2, 0.0]]
    np.testing.assert_allclose(matrix.before[:, None] - matrix.after, matrix.forgetting)


def test_an_unmeasured_round_of_forgetting_is_refused_with_the_measured_ones(make_run: MakeRun) -> None:
    run = read_run(make_run())
    with pytest.raises(RunError, match=r"round 3 \(measured: 2, 4\)"):
        read_forgetting(run, 3)


def test_only_the_config_must_be_there(make_run: MakeRun) -> None:
    path = make_run()
    for name in ("environment.json", "metrics.jsonl", "partition.npz", "summary.json"):
        (path / name).unlink()
    shutil.rmtree(path / "forgetting")
    run = read_run(path)
    assert (run.status, run.last_round, run.class_counts, run.metrics) == ("unfinished", 0, None, ())
    assert set(run.headline().values()) == {None}


def test_a_last_line_cut_off_by_a_crash_is_ignored(make_run: MakeRun) -> None:
    path = make_run(finished=False)
    with (path / "metrics.jsonl").open("a") as log:
        log.write('{"round": 5, "test_accu')
    assert read_run(path).last_round == 4


def test_a_broken_line_in_the_middle_is_named(make_run: MakeRun) -> None:
    path = make_run()
    lines = (path / "metrics.jsonl").read_text().splitlines()
    lines[1] = lines[1][:20]
    (path / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    with pytest.raises(RunError, match=r"metrics\.jsonl, line 2"):
        read_run(path)


def test_the_headline_of_a_finished_run_is_its_summary(make_run: MakeRun) -> None:
    assert read_run(make_run()).headline() == {
        "final_accuracy": 0.8,
        "mean_forgetting": 0.1,
        "forgettable_examples": 9.0,
        "seconds": 2.0,
        "upload_bytes": 8_000_000.0,
        "download_bytes": 4_000_000.0,
    }


def test_the_headline_of_an_unfinished_run_comes_from_its_log(make_run: MakeRun) -> None:
    """Four rounds of 0.5 s, 2 MB up, 1 MB down; forgettable examples 6 and 12, mean 9; last accuracy 0.8."""
    headline = read_run(make_run(finished=False)).headline()
    assert headline.pop("mean_forgetting") == pytest.approx(0.1)
    assert headline == {
        "final_accuracy": 0.8,
        "forgettable_examples": 9.0,
        "seconds": 2.0,
        "upload_bytes": 8_000_000.0,
        "download_bytes": 4_000_000.0,
    }


def test_a_summary_with_a_number_that_is_not_finite_falls_back_on_the_log(make_run: MakeRun) -> None:
    path = make_run()
    (path / "summary.json").write_text(json.dumps({"status": "finished", "seconds": math.nan}))
    assert read_run(path).headline()["seconds"] == 2.0


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"no config\.yaml"):
        read_run(tmp_path)
    with pytest.raises(RunError, match="no run directory at"):
        read_run(tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("config.yaml", "a: [1"),
        ("config.yaml", "just text"),
        ("summary.json", '{"status"'),
        ("summary.json", "[1]"),
        ("partition.npz", "no archive"),
    ],
)
def test_a_damaged_file_is_named(make_run: MakeRun, name: str, content: str) -> None:
    path = make_run()
    (path / name).write_text(content)
    with pytest.raises(RunError, match=name.replace(".", r"\.")):
        read_run(path)


def test_a_damaged_matrix_is_named(make_run: MakeRun) -> None:
    path = make_run()
    file = path / "forgetting" / "round-000004.npz"
    np.savez(file, models=[1], data=[1, 2], before=[0.5], after=[[0.5]], forgetting=[[0.0]])
    with pytest.raises(RunError, match=r"round-000004\.npz.*do not fit 2 data clients"):
        read_forgetting(read_run(path), 4)
    np.savez(file, models=[1])
    with pytest.raises(RunError, match="no array after, before"):
        read_forgetting(read_run(path), 4)


def test_with_a_list_for_problems_the_rest_is_read(make_run: MakeRun) -> None:
    """Half a partition, half a matrix and a damaged third line: rounds 1 and 2 and the other matrix remain."""
    path = make_run()
    for name in ("partition.npz", "forgetting/round-000002.npz"):
        content = (path / name).read_bytes()
        (path / name).write_bytes(content[: len(content) // 2])
    lines = (path / "metrics.jsonl").read_text().splitlines(keepends=True)
    (path / "metrics.jsonl").write_text("".join([*lines[:2], "damaged\n", lines[3]]))
    (path / "summary.json").write_text("[1]")
    problems: list[str] = []
    run = read_run(path, problems)
    assert (run.last_round, list(run.forgetting_files), run.class_counts, run.summary) == (2, [4], None, None)
    named = ("partition.npz", "metrics.jsonl, line 3", "round-000002.npz", "summary.json")
    assert [name in problem for name, problem in zip(named, problems, strict=True)] == [True] * 4


def test_an_array_that_would_run_code_when_loaded_is_refused(make_run: MakeRun) -> None:
    path = make_run()
    np.savez(path / "partition.npz", class_counts=np.array([[1], ["x", 2]], dtype=object))
    with pytest.raises(RunError, match=r"partition\.npz"):
        read_run(path)
