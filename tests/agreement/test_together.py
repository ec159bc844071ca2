"""Variants that train together give the numbers of those that train alone, whatever happens to some of them."""

from __future__ import annotations

import json
import logging
import shutil
import signal
import subprocess
import sys
import textwrap
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from tests.agreement.conftest import dataset, settings

import fedretain
from fedretain import evaluation, rounds
from fedretain.config import expand_variants
from fedretain.errors import RunError
from fedretain.experiment import build_world
from fedretain.together import Entry, groups

SWEEP: dict[str, list[Any]] = {"seed": [0, 1], "local.lr": [0.1, 0.02], "loss": ["ce", "wsm"]}


def comparison(variants: dict[str, list[Any]], **changes: Any) -> dict[str, Any]:
    """Six uneven clients; evaluation and forgetting are measured too."""
    given = settings(**changes)
    return given | {
        "name": "together",
        "variants": variants,
        "evaluate": {"every": 1},
        "forgetting": {"every": 2},
        "engine": {"name": "vectorised", **changes.get("engine", {})},
    }


def assert_same_numbers(one: fedretain.Comparison, other: fedretain.Comparison, tolerance: float = 1e-8) -> None:
    """All metrics but the seconds, the arrays of forgetting, the final model and the clients' states."""
    assert one.runs.keys() == other.runs.keys()
    for name, run in one.runs.items():
        theirs = other.runs[name]
        assert len(run.metrics) == len(theirs.metrics)
        for row, their_row in zip(run.metrics, theirs.metrics, strict=True):
            assert_like(without_seconds(row), without_seconds(their_row), tolerance)
        ours, others = run.checkpoint(), theirs.checkpoint()
        for key, value in ours.state.params.items():
            torch.testing.assert_close(value, others.state.params[key], rtol=tolerance, atol=tolerance)
        assert ours.clients == others.clients
        for version in ours.clients.items():
            a, b = (each.client_states.read(version, torch.zeros(())) for each in (run, theirs))
            for key, value in a.items():
                torch.testing.assert_close(value, b[key], rtol=tolerance, atol=tolerance)
        files = sorted(path.name for path in (run.path / "forgetting").iterdir())
        assert files == sorted(path.name for path in (theirs.path / "forgetting").iterdir())
        for file in files:
            with np.load(run.path / "forgetting" / file) as a, np.load(theirs.path / "forgetting" / file) as b:
                for key in a:
                    np.testing.assert_allclose(a[key], b[key], rtol=tolerance, atol=tolerance)


def without_seconds(row: Any) -> dict[str, Any]:
    return {key: value for key, value in row.items() if "seconds" not in key}


def assert_like(a: Any, b: Any, tolerance: float) -> None:
    """Nested dictionaries and lists of numbers."""
    if isinstance(a, dict):
        assert a.keys() == b.keys()
        for key, value in a.items():
            assert_like(value, b[key], tolerance)
    elif isinstance(a, list):
        assert len(a) == len(b)
        for one, other in zip(a, b, strict=True):
            assert_like(one, other, tolerance)
    elif isinstance(a, float):
        assert a == pytest.approx(b, rel=tolerance, abs=tolerance)
    else:
        assert a == b


def together_and_alone(given: dict[str, Any], tmp_path: Path, caplog: Any, stacked: int | None = None) -> None:
    """Both ways; ``stacked`` says how many variants must have trained together."""
    with caplog.at_level(logging.INFO, logger="fedretain"):
        together = fedretain.compare(given, out=tmp_path / "together", data=dataset())
    told = [record.getMessage() for record in caplog.records if "variants together" in record.getMessage()]
    alone_given = given | {"engine": {**given["engine"], "stack": False}}
    alone = fedretain.compare(alone_given, out=tmp_path / "alone", data=dataset())
    assert together.failures == alone.failures == []
    if stacked is not None:
        assert [f"for {stacked} variants together" in text for text in told] == [True]
    assert_same_numbers(together, alone)


def test_seeds_rates_and_losses(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Every seed has its own uneven partition."""
    together_and_alone(comparison(SWEEP, local={"batch_size": 100}), tmp_path, caplog, stacked=8)


def test_numbers_of_a_method(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    mu = [{"name": "fedprox", "mu": value} for value in (0.0, 0.1, 2.0)]
    chains = [[method, {"name": "fedwavg", "alpha": 0.2}] for method in mu]
    given = comparison({"method": chains}, local={"epochs": 1, "batch_size": 8})
    together_and_alone(given, tmp_path, caplog, stacked=3)


def test_stateful_methods_and_cohorts_of_different_size(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    variants = {"participation": [2, 5], "local.lr_decay": [1.0, 0.5]}
    given = comparison(variants, rounds=4, method={"name": "scaffold", "option": "II"}, local={"batch_size": 100})
    together_and_alone(given, tmp_path, caplog, stacked=4)


def test_running_statistics(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    given = comparison(
        {"seed": [0, 1]},
        model={"name": "tests.agreement.test_vectorised:BatchNormed"},
        local={"batch_size": 100, "epochs": 3},
    )
    together_and_alone(given, tmp_path, caplog, stacked=2)


@pytest.mark.parametrize("inner", ["loop", "vectorised"])
def test_in_workers(inner: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    given = comparison({"seed": [0, 1]}, method={"name": "fedwavg", "alpha": 0.3}, local={"batch_size": 100})
    given["engine"] = {"name": "workers", "workers": 2, "inner": inner}
    with caplog.at_level(logging.INFO, logger="fedretain"):
        together = fedretain.compare(given, out=tmp_path / "together", data=dataset())
    assert f"workers (2 × {inner}) for 2 variants together" in caplog.text
    loop = fedretain.compare(given | {"engine": "loop"}, out=tmp_path / "loop", data=dataset())
    assert_same_numbers(together, loop, tolerance=0 if inner == "loop" else 1e-8)


def test_one_that_diverges_does_not_disturb_the_others(tmp_path: Path) -> None:
    given = comparison({"local.lr": [0.1, 1e200, 0.02]}, rounds=3)
    mixed = fedretain.compare(given, out=tmp_path / "mixed", data=dataset())
    assert [failure.variant for failure in mixed.failures] == ["local.lr=1e+200"]
    assert "round 1, client" in mixed.failures[0].reason
    assert "lower local.lr (it is 1e+200)" in mixed.failures[0].reason
    good = fedretain.compare(comparison({"local.lr": [0.1, 0.02]}, rounds=3), out=tmp_path / "good", data=dataset())
    assert_same_numbers(mixed, good)
    again = fedretain.compare(given, out=tmp_path / "mixed", data=dataset())
    assert [failure.variant for failure in again.failures] == ["local.lr=1e+200"]


def test_one_whose_global_model_overflows(tmp_path: Path) -> None:
    """The clients are sound; the server of one variant is not."""
    given = comparison({"server.lr": [1.0, 1e308]}, rounds=3)
    mixed = fedretain.compare(given, out=tmp_path / "mixed", data=dataset())
    assert [failure.variant for failure in mixed.failures] == ["server.lr=1e+308"]
    good = fedretain.compare(comparison({"server.lr": [1.0]}, rounds=3), out=tmp_path / "good", data=dataset())
    assert_same_numbers(
        mixed._replace(runs=mixed.runs), good._replace(runs=dict.fromkeys(mixed.runs, *good.runs.values()))
    )


def test_one_whose_global_model_gives_no_numbers(tmp_path: Path) -> None:
    """Parameters near 1e200 are finite, their products are not: the test loss of that variant alone is no number."""
    mixed = fedretain.compare(
        comparison({"server.lr": [1.0, 1e200, 0.5]}, rounds=3), out=tmp_path / "mixed", data=dataset()
    )
    assert [failure.variant for failure in mixed.failures] == ["server.lr=1e+200"]
    assert "round 1: training diverged" in mixed.failures[0].reason
    good = fedretain.compare(comparison({"server.lr": [1.0, 0.5]}, rounds=3), out=tmp_path / "good", data=dataset())
    assert_same_numbers(mixed, good)


def forward_passes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of examples of every forward pass of an evaluation, however many models share it."""
    seen: list[int] = []
    forward = evaluation.forward

    def counted(world: Any, params: Any, buffers: Any, inputs: torch.Tensor, *, training: bool) -> torch.Tensor:
        seen.append(len(inputs))
        return forward(world, params, buffers, inputs, training=training)

    monkeypatch.setattr(evaluation, "forward", counted)
    return seen


@pytest.mark.parametrize(
    ("engine", "a_round"),
    [({"name": "vectorised"}, 1), ({"name": "workers", "workers": 2, "inner": "loop"}, 3)],
    ids=str,
)
def test_variants_are_tested_together(
    engine: dict[str, Any], a_round: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """16 test examples, three variants, four rounds: three initial models, then one pass a round, or one each.

    Where training keeps the loop engine's bits, so does testing.
    """
    given = comparison({"seed": [0, 1, 2]}, rounds=4)
    given |= {"engine": engine, "forgetting": {"every": 0}}
    passes = forward_passes(monkeypatch)
    fedretain.compare(given, out=tmp_path / "together", data=dataset())
    assert passes == [16] * (3 + 4 * a_round)


def test_variants_that_test_at_other_times_and_in_other_batches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every second round those of ``every: 2`` join in; each batch size is a stack of its own."""
    given = comparison({"evaluate.every": [1, 2], "evaluate.batch_size": [16, 10]}, rounds=4)
    given |= {"forgetting": {"every": 0}}
    del given["evaluate"]
    passes = forward_passes(monkeypatch)
    together = fedretain.compare(given, out=tmp_path / "together", data=dataset())
    assert sorted(passes) == sorted([16, 10, 6] * (2 + 4))
    monkeypatch.undo()
    for name, run in together.runs.items():
        every = 2 if "every=2" in name else 1
        assert [row["round"] for row in run.metrics if "test_loss" in row] == list(range(every, 5, every))
    alone = fedretain.compare(
        given | {"engine": {**given["engine"], "stack": False}}, out=tmp_path / "alone", data=dataset()
    )
    for name, run in together.runs.items():
        for row, their_row in zip(run.metrics, alone.runs[name].metrics, strict=True):
            assert_like(without_seconds(row), without_seconds(their_row), 1e-8)


def test_the_time_of_testing_is_shared_and_not_that_of_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A clock that goes only when told to: adding up takes 0.3 s for each of three variants, testing all of them 0.6 s.

    So each has 0.9 / 3 = 0.3 s of training and 0.6 / 3 = 0.2 s of testing.
    """
    now = [0.0]
    tested, gathered = evaluation.evaluate_all, rounds.Rounds.gather

    def testing(*given: Any, **named: Any) -> list[dict[str, float]]:
        now[0] += 0.6
        return tested(*given, **named)

    def gathering(*given: Any) -> rounds.Gathered:
        now[0] += 0.3
        return gathered(*given)

    monkeypatch.setattr(rounds, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    monkeypatch.setattr(rounds, "evaluate_all", testing)
    monkeypatch.setattr(rounds.Rounds, "gather", gathering)
    given = comparison({"seed": [0, 1, 2]}, rounds=1) | {"forgetting": {"every": 0}}
    found = fedretain.compare(given, out=tmp_path / "runs", data=dataset())
    rows = [run.metrics[-1] for run in found.runs.values()]
    assert [row["evaluate_seconds"] for row in rows] == [pytest.approx(0.2)] * 3
    assert [row["seconds"] for row in rows] == [pytest.approx(0.3)] * 3


@pytest.mark.parametrize(
    "variants",
    [
        {"local.batch_size": [5, 7]},
        {"model.hidden": [[8], [9]]},
        {"data.normalise": ["unit", "mean_std"]},
        {"method": ["fedavg", {"name": "fedprox", "mu": 0.1}]},
        {"engine.name": ["vectorised", "loop"]},
        {"rounds": [1, 2]},
    ],
    ids=str,
)
def test_what_does_not_fit_trains_alone(variants: dict[str, list[Any]]) -> None:
    entries: list[Entry] = []
    for variant in expand_variants(comparison(variants)):
        beside = entries[0].world if entries else None
        entries.append(Entry(variant, Path("nowhere"), build_world(variant.experiment, dataset(), beside)))
    assert [len(group) for group in groups(entries)] == [1, 1]


def test_a_hook_that_decides_by_a_number_trains_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """FedNova asks whether there is a proximal term; with another number in every variant it cannot be stacked."""
    chains = [["fednova", {"name": "fedprox", "mu": mu}] for mu in (0.1, 1.0)]
    together_and_alone(comparison({"method": chains}, local={"batch_size": 100}), tmp_path, caplog)


def test_states_that_cannot_fit_on_the_disk_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10**9, 10**9, 1000))
    with pytest.raises(RunError, match=r"scaffold keeps .* and 1 kB are free"):
        fedretain.compare(comparison({"seed": [0, 1]}, method="scaffold"), out=tmp_path / "runs", data=dataset())
    assert not (tmp_path / "runs").exists()


KILLED = """
    import os, signal, sys
    import torch
    torch.set_num_threads(1)
    import fedretain
    from fedretain.keeping import Keeper
    from tests.agreement.conftest import dataset
    how, count, experiment, out = sys.argv[1], int(sys.argv[2]), sys.argv[3], sys.argv[4]
    signal.signal(signal.SIGINT, signal.default_int_handler)
    calls, keep = 0, Keeper.keep
    def counted(self, ended):
        global calls
        calls += 1
        if calls == count:
            os.kill(os.getpid(), getattr(signal, how))
        return keep(self, ended)
    Keeper.keep = counted
    try:
        fedretain.compare(experiment, out=out, data=dataset())
    except KeyboardInterrupt:
        sys.exit(130)
"""


@pytest.mark.parametrize(("how", "count"), [("SIGKILL", 6), ("SIGKILL", 8), ("SIGINT", 8)])
def test_killed_and_compared_again(how: str, count: int, tmp_path: Path) -> None:
    """Three variants: the sixth call ends the second round, the eighth is the third round of the second variant."""
    given = comparison(
        {"seed": [0, 1, 2]}, rounds=4, method={"name": "fedwavg", "alpha": 0.3}, local={"batch_size": 100}
    )
    given["checkpoint"] = {"every": 1}
    file, out = tmp_path / "experiment.yaml", tmp_path / "killed"
    file.write_text(yaml.safe_dump(given))
    command = [sys.executable, "-c", textwrap.dedent(KILLED), how, str(count), str(file), str(out)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[2])
    assert done.returncode == (-signal.SIGKILL if how == "SIGKILL" else 130), done.stderr
    assert not list(out.glob("*/summary.json"))
    lengths = [len((run / "metrics.jsonl").read_text().splitlines()) for run in sorted(out.iterdir()) if run.is_dir()]
    assert sum(lengths) >= count - 2
    again = fedretain.compare(file, out=out, data=dataset())
    whole = fedretain.compare(given, out=tmp_path / "whole", data=dataset())
    assert again.failures == whole.failures == []
    assert_same_numbers(again, whole)
    assert json.loads((out / "comparison.json").read_text())["failures"] == {}


def test_what_workers_cannot_be_sent_is_a_failure_of_each(tmp_path: Path) -> None:
    """The method is defined within a function: no other process can import it, and every variant says so."""

    @dataclass(frozen=True)
    class Inside(fedretain.Method):
        """As good as FedAvg."""

    given = comparison({"seed": [0, 1]}, rounds=1)
    given["engine"] = {"name": "workers", "workers": 2}
    globals()["Inside"] = Inside
    try:
        given["method"] = f"{__name__}:Inside"
        found = fedretain.compare(given, out=tmp_path / "runs", data=dataset())
    finally:
        del globals()["Inside"]
    assert [failure.variant for failure in found.failures] == ["seed=0", "seed=1"]
    assert all("cannot be sent this experiment" in failure.reason for failure in found.failures)
