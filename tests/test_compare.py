"""Comparisons: every variant in a directory of its own, and nothing done twice."""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

import fedretain as fr
from fedretain import experiment
from fedretain.compare import directory_name
from fedretain.errors import RunError


@pytest.fixture
def grid(small: dict[str, Any]) -> dict[str, Any]:
    return {**small, "rounds": 2, "variants": {"loss": ["ce", "wsm"], "seed": [0, 1]}}


def kept(folder: Path) -> dict[str, tuple[int, bytes]]:
    """What training wrote: the time of writing and the bytes."""
    names = ("metrics.jsonl", "summary.json", "environment.json", "partition.npz")
    found = [p for p in folder.rglob("*") if p.name in names or p.suffix == ".safetensors"]
    return {str(p.relative_to(folder)): (p.stat().st_mtime_ns, p.read_bytes()) for p in found}


def numbers(folder: Path) -> dict[str, Any]:
    """The metrics of every variant, but for the time they took."""
    return {
        path.parent.name: [
            {k: v for k, v in json.loads(line).items() if "seconds" not in k} for line in path.read_text().splitlines()
        ]
        for path in sorted(folder.rglob("metrics.jsonl"))
    }


def test_every_variant_has_its_directory(tmp_path: Path, grid: dict[str, Any]) -> None:
    begun: list[str] = []
    comparison = fr.compare(
        grid, out=tmp_path, begin=lambda variant, number, total: begun.append(f"{number}/{total} {variant.name}")
    )
    names = ["loss=ce,seed=0", "loss=ce,seed=1", "loss=wsm,seed=0", "loss=wsm,seed=1"]
    assert begun == [f"{i}/4 {name}" for i, name in enumerate(names)]
    assert list(comparison.runs) == names
    assert comparison.failures == []
    assert [run.path for run in comparison.runs.values()] == [tmp_path / name for name in names]
    assert json.loads((tmp_path / "comparison.json").read_text())["variants"] == dict(zip(names, names, strict=True))
    assert (tmp_path / "report.html").exists()
    assert [(row["label"], row["seeds"]) for row in comparison.rows] == [("loss=ce", [0, 1]), ("loss=wsm", [0, 1])]
    accuracy = [comparison.runs[n].summary["final_accuracy"]["last"] for n in names[:2]]
    assert comparison.rows[0]["final_accuracy"].mean == pytest.approx(sum(accuracy) / 2)


def test_finished_runs_are_not_done_again(tmp_path: Path, grid: dict[str, Any]) -> None:
    fr.compare(grid, out=tmp_path)
    before = kept(tmp_path)
    assert len(before) == 4 * 6
    trained: list[int] = []
    fr.compare(grid, out=tmp_path, watch=lambda experiment, row: trained.append(row["round"]))
    assert trained == []
    metrics = {name: value for name, value in before.items() if not name.endswith("summary.json")}
    after = kept(tmp_path)
    assert {name: after[name][1] for name in before} == {name: value[1] for name, value in before.items()}
    unchanged = [name for name in metrics if name.endswith((".safetensors", "environment.json", "partition.npz"))]
    assert all(after[name] == before[name] for name in unchanged)


def test_one_diverging_variant_does_not_stop_the_others(tmp_path: Path, small: dict[str, Any]) -> None:
    given = {**small, "rounds": 2, "variants": {"local.lr": [0.1, 1e30, 0.2]}}
    comparison = fr.compare(given, out=tmp_path)
    assert list(comparison.runs) == ["local.lr=0.1", "local.lr=0.2"]
    (failure,) = comparison.failures
    assert failure.variant == "local.lr=1e+30"
    assert "round 1, client" in failure.reason
    assert json.loads((tmp_path / "comparison.json").read_text())["failures"] == {failure.variant: failure.reason}


def test_other_settings_in_the_same_place_are_refused(tmp_path: Path, grid: dict[str, Any]) -> None:
    fr.compare({**grid, "variants": {"loss": ["ce"]}}, out=tmp_path)
    before = kept(tmp_path)
    with pytest.raises(RunError, match="holds another experiment"):
        fr.compare({**grid, "participation": 2, "variants": {"loss": ["ce"]}}, out=tmp_path)
    assert kept(tmp_path) == before


def test_no_two_variants_share_a_folder() -> None:
    """Letters that are no good in a folder name, and names too long for a file system, are told apart by a hash."""
    names = ["data.path=ä", "data.path=ö", "data.path=a/b", "data.path=a_b", "x" * 400, "x" * 401, "loss=ce,seed=0"]
    folders = [directory_name(name) for name in names]
    assert len(set(folders)) == len(names)
    assert all(len(folder.encode()) < 200 and "/" not in folder for folder in folders)
    assert directory_name("loss=ce,seed=0") == "loss=ce,seed=0"


def test_default_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, small: dict[str, Any]) -> None:
    monkeypatch.chdir(tmp_path)
    assert fr.compare({**small, "rounds": 0}).path == Path("runs/small")


STOPS = """
import os, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job starts with it ignored
import torch
torch.set_num_threads(1)
import fedretain.engines.loop as loop
number, experiment, out = int(sys.argv[1]), sys.argv[2], sys.argv[3]
train, calls = loop.LoopEngine.train, 0
def stopped(*arguments, **keys):
    global calls
    calls += 1
    if calls == 4:  # round 2 of the second variant
        os.kill(os.getpid(), number)
    return train(*arguments, **keys)
loop.LoopEngine.train = stopped
from fedretain.cli import main
sys.argv = ["fedretain", "compare", experiment, "--out", out, "--quiet"]
main()
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
def test_stopped_and_compared_again(number: signal.Signals, tmp_path: Path, grid: dict[str, Any]) -> None:
    """Killed, interrupted or asked to end in the middle: what was finished stays, the rest comes out the same."""
    grid |= {"variants": {"loss": ["ce", "wsm"]}, "engine": "loop"}
    fr.compare(grid, out=tmp_path / "whole")
    (tmp_path / "grid.yaml").write_text(yaml.safe_dump(grid, sort_keys=False))
    ran = subprocess.run(
        [sys.executable, "-c", STOPS, str(int(number)), str(tmp_path / "grid.yaml"), str(tmp_path / "cut")],
        capture_output=True,
        text=True,
        env={**os.environ, "COLUMNS": "200"},
    )
    assert ran.returncode == (-number if number == signal.SIGKILL else 130), ran.stderr
    assert "Traceback" not in ran.stderr
    if number != signal.SIGKILL:
        assert "stopped; the finished rounds are saved" in ran.stderr
        assert fr.Run(tmp_path / "cut" / "loss=wsm").checkpoint().state.round == 1
    finished = kept(tmp_path / "cut" / "loss=ce")
    assert len(finished) == 6
    fr.compare(grid, out=tmp_path / "cut")
    assert {k: v[1] for k, v in kept(tmp_path / "cut" / "loss=ce").items()} == {k: v[1] for k, v in finished.items()}
    assert numbers(tmp_path / "cut") == numbers(tmp_path / "whole")


def counting(monkeypatch: pytest.MonkeyPatch, where: Any, name: str) -> list[Any]:
    """Notes every call of a function, which is then made."""
    calls: list[Any] = []
    real = getattr(where, name)

    def noted(*given: Any, **named: Any) -> Any:
        calls.append(given)
        return real(*given, **named)

    monkeypatch.setattr(where, name, noted)
    return calls


@pytest.mark.parametrize("engine", ["vectorised", "loop"])
def test_data_are_read_once(engine: str, tmp_path: Path, grid: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Four variants of the same data, together or one after the other."""
    loads = counting(monkeypatch, sys.modules["fedretain.compare"], "load_data")
    monkeypatch.setattr(experiment, "load_data", None)
    assert fr.compare({**grid, "engine": engine}, out=tmp_path).failures == []
    assert len(loads) == 1


def test_other_data_are_read_too(tmp_path: Path, small: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """How inputs are scaled does not change what is read; the last that was read serves the next variant."""
    loads = counting(monkeypatch, sys.modules["fedretain.compare"], "load_data")
    given = {**small, "engine": {"name": "loop", "stack": False}}
    scaled = {**given, "variants": {"data.normalise": ["unit", "mean_std"]}}
    assert len(fr.compare(scaled, out=tmp_path / "scaled").runs) == 2
    assert len(loads) == 1
    x, y = np.zeros((30, 1, 8, 8), dtype=np.uint8), np.arange(30) % 10
    np.savez(tmp_path / "own.npz", x_train=x, y_train=y, x_test=x, y_test=y)
    own = {"name": "npz", "path": str(tmp_path / "own.npz")}
    others = {**given, "variants": {"data": [{"name": "digits"}, own], "seed": [0, 1]}}
    assert len(fr.compare(others, out=tmp_path / "others").runs) == 4
    assert [experiment.data.name for (experiment,) in loads[1:]] == ["digits", "npz"]


@pytest.mark.parametrize(("seed", "partitions"), [(None, 2), (7, 1)])
def test_examples_are_divided_once_for_every_seed(
    seed: int | None, partitions: int, tmp_path: Path, grid: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two losses, two seeds; a partition with a seed of its own is the same for both."""
    splits = counting(monkeypatch, experiment, "split_examples")
    given = {**grid, "engine": "vectorised", "partition": {**grid.get("partition", {}), "seed": seed}}
    together = fr.compare(given, out=tmp_path / "together")
    assert len(splits) == partitions
    alone = fr.compare({**given, "engine": {"name": "vectorised", "stack": False}}, out=tmp_path / "alone")
    assert len(splits) == partitions + 4
    for name, run in together.runs.items():
        assert (run.path / "partition.npz").read_bytes() == (alone.runs[name].path / "partition.npz").read_bytes()


@pytest.mark.parametrize("engine", ["vectorised", "loop"])
def test_the_disk_that_client_states_need_is_told_once(
    engine: str, tmp_path: Path, small: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "fedretain")
    given = {**small, "method": "scaffold", "engine": engine, "variants": {"local.lr": [0.1, 0.01]}}
    assert fr.compare(given, out=tmp_path).failures == []
    told = [record.getMessage() for record in caplog.records if "for each client seen" in record.getMessage()]
    assert len(told) == (1 if engine == "vectorised" else 2)
