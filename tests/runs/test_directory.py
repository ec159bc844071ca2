"""The run directory: what it refuses, and that nothing is lost when the disk is full."""

from __future__ import annotations

import fcntl
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

import fedretain
from fedretain.config import make_experiment
from fedretain.errors import RunError
from fedretain.experiment import build_world
from fedretain.rounds import initial_state
from fedretain.runs.checkpoint import Checkpoint
from fedretain.runs.directory import RunDirectory
from fedretain.runs.metrics import read_rows


def files(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file() and p.name != ".lock"}


def outcome(run: Path) -> tuple[list[dict[str, Any]], bytes]:
    """Metrics but for the time they took, and the bytes of the last checkpoint."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    last = sorted((run / "checkpoint").glob("*.safetensors"))[-1]
    return [{k: v for k, v in row.items() if "seconds" not in k} for row in rows], last.read_bytes()


def test_another_experiment_is_left_alone(tmp_path: Path, small: dict[str, Any]) -> None:
    fedretain.run(small, out=tmp_path / "run")
    before = files(tmp_path / "run")
    for resume in (False, True):
        with pytest.raises(
            RunError, match=r"holds another experiment \(seed is 0 there, 1 here\); choose another --out"
        ):
            fedretain.run({**small, "seed": 1}, out=tmp_path / "run", resume=resume)
    with pytest.raises(RunError, match=r"already holds this experiment \(5 of 5 rounds\); continue it with --resume"):
        fedretain.run(small, out=tmp_path / "run")
    with pytest.raises(RunError, match="has 5 rounds already, and rounds is 2; set rounds to 5 or more"):
        fedretain.run({**small, "rounds": 2}, out=tmp_path / "run", resume=True)
    assert files(tmp_path / "run") == before


def test_a_folder_with_other_things_is_left_alone(tmp_path: Path, small: dict[str, Any]) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(RunError, match=r"not empty \(thesis.tex\) and no run of fedretain"):
        fedretain.run(small, out=tmp_path, resume=True)
    assert files(tmp_path) == {"thesis.tex": b"years of work"}


def test_a_garbled_config_is_not_overwritten(tmp_path: Path, small: dict[str, Any]) -> None:
    for content in (b"\xff\xfe", b"[", b"just text"):
        (tmp_path / "config.yaml").write_bytes(content)
        with pytest.raises(RunError, match=r"(?s)config.yaml: .*choose another --out"):
            fedretain.run(small, out=tmp_path, resume=True)
        assert (tmp_path / "config.yaml").read_bytes() == content


def test_a_file_in_the_way(tmp_path: Path, small: dict[str, Any]) -> None:
    (tmp_path / "file").write_text("x")
    for out in (tmp_path / "file", tmp_path / "file" / "below", tmp_path / ("x" * 300)):
        with pytest.raises(RunError, match=r"cannot be written \(.*\); choose another --out"):
            fedretain.run(small, out=out)
    assert (tmp_path / "file").read_text() == "x"


def test_only_one_process_writes(tmp_path: Path, small: dict[str, Any]) -> None:
    with (tmp_path / ".lock").open("wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(RunError, match="another process is writing to this run; wait for it"):
            fedretain.run(small, out=tmp_path)
    assert files(tmp_path) == {}
    fedretain.run(small, out=tmp_path)


def test_leftovers_of_killed_writers_are_removed(tmp_path: Path, small: dict[str, Any]) -> None:
    fedretain.run({**small, "rounds": 1}, out=tmp_path / "run")
    (tmp_path / "run" / "checkpoint" / ".round-000001.json.abc.tmp").write_text("half")
    fedretain.run(small, out=tmp_path / "run", resume=True)
    assert not list((tmp_path / "run").rglob("*.tmp"))


FULL = """
import contextlib, io, json, resource, signal, sys
import torch
torch.set_num_threads(1)
from fedretain import cli
experiment, out, limits = sys.argv[1], sys.argv[2], [int(n) for n in sys.argv[3:]]
hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
def call(*arguments):
    sys.argv = ["fedretain", *arguments]
    errors = io.StringIO()
    with contextlib.redirect_stderr(errors), contextlib.redirect_stdout(io.StringIO()):
        try:
            cli.main()
        except SystemExit as stop:
            return [stop.code, errors.getvalue()]
    return [0, errors.getvalue()]
results = []
for limit in limits:
    run = f"{out}/{limit}"
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    full = call("run", experiment, "--out", run, "--quiet")
    resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
    again = call("run", experiment, "--out", run, "--quiet", "--resume")
    results.append([limit, full, again])
print(json.dumps(results))
"""


def test_disk_full_at_every_stage_then_resumed_to_the_same_bits(tmp_path: Path, small: dict[str, Any]) -> None:
    """No file may outgrow a limit, as on a full disk: the config (900 bytes), the partition (7 kB), the metrics in the
    middle of a line (about 600 bytes a round, so about round 13 of 20) or the report (megabytes) does not fit."""
    given = {**small, "rounds": 20, "checkpoint": {"every": 3}}
    whole = fedretain.run(given, out=tmp_path / "whole")
    assert (whole.path / "config.yaml").stat().st_size > 500
    assert (whole.path / "metrics.jsonl").stat().st_size > 10_000
    (tmp_path / "experiment.yaml").write_text(yaml.safe_dump(given))
    limits = ["500", "6000", "8000", "100000"]
    ran = subprocess.run(
        [sys.executable, "-c", FULL, str(tmp_path / "experiment.yaml"), str(tmp_path), *limits],
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stderr
    for limit, (code, message), (resumed, complaint) in json.loads(ran.stdout):
        assert code == 1, f"limit {limit}: {message}"
        assert "cannot be written" in message
        assert "File too large" in message
        assert "Traceback" not in message
        assert (resumed, complaint) == (0, "")
        assert outcome(tmp_path / str(limit)) == outcome(whole.path)
        assert (tmp_path / str(limit) / "report.html").exists()


NOBODY = """
import os
import fedretain
data = fedretain.load_dataset("digits")
if os.geteuid() == 0:
    os.setgid(65534)
    os.setuid(65534)
try:
    fedretain.run({"rounds": 1}, out="locked/run", data=data)
except fedretain.FedretainError as error:
    print(error)
"""


def test_a_folder_that_may_not_be_written(tmp_path: Path) -> None:
    """As an ordinary user; root may write everywhere and becomes nobody first."""
    tmp_path.chmod(0o711)
    (tmp_path / "locked").mkdir(mode=0o555)
    ran = subprocess.run([sys.executable, "-c", NOBODY], capture_output=True, text=True, cwd=tmp_path)
    assert ran.returncode == 0, ran.stderr
    assert "locked/run: cannot be written (Permission denied); choose another --out" in ran.stdout


def test_rounds_wait_a_moment_to_be_written_together(
    tmp_path: Path, small: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is written while the moment lasts, all of it before a checkpoint, and at the end whatever happens."""
    monkeypatch.setattr("fedretain.runs.directory.LINGER", 3600.0)
    experiment, path = make_experiment(small), tmp_path / "run"
    state = initial_state(experiment, build_world(experiment))

    def numbers() -> list[int]:
        return [row["round"] for row in read_rows(path / "metrics.jsonl")]

    def interrupted() -> None:
        with RunDirectory.opened(path, experiment, resume=False) as directory:
            directory.flush()
            directory.append({"round": 1})
            directory.append({"round": 2})
            assert numbers() == []
            directory.save(Checkpoint(state, {}, {}))
            assert numbers() == [1, 2]
            directory.append({"round": 3})
            assert numbers() == [1, 2]
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert numbers() == [1, 2, 3]
