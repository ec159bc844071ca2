"""Kill -9 at any moment, resume, and get the bits of the run that was never interrupted."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from safetensors.torch import load_file

import fedretain
import fedretain.engines.planner
from fedretain.errors import RunError

EXPERIMENT = {
    "name": "killed",
    "rounds": 6,
    "participation": 3,
    "data": {"name": "digits"},
    "partition": {"kind": "dirichlet", "clients": 8, "alpha": 0.3},
    "model": {"name": "mlp", "hidden": [16]},
    "loss": "wsm",
    "method": [{"name": "scaffold", "option": "I"}, {"name": "fedwavg", "alpha": 0.3}],
    "local": {"lr": 0.1, "momentum": 0.9, "epochs": 1, "batch_size": 16},
    "server": {"optimizer": "adam", "lr": 0.01},
    "forgetting": {"every": 2},
    "checkpoint": {"every": 2},
}

KILLS_ITSELF = """
import os, signal, sys
from pathlib import Path
import torch
torch.set_num_threads(1)
import fedretain.files, fedretain.runs.directory as directory
what, count, experiment, out = sys.argv[1], int(sys.argv[2]), sys.argv[3], sys.argv[4]
calls = 0
def killer(function):
    def wrapped(*args, **kwargs):
        global calls
        calls += 1
        if calls == count:
            if what == "append":  # half a line has reached the disk
                log = Path(out, "metrics.jsonl").open("ab")
                log.write(b'{"round": 4, "train_lo')
                log.flush()
            os.kill(os.getpid(), signal.SIGKILL)
        return function(*args, **kwargs)
    return wrapped
if what == "append":
    directory.RunDirectory.append = killer(directory.RunDirectory.append)
elif what == "rename":
    Path.replace = killer(Path.replace)
elif what == "fsync":
    os.fsync = killer(os.fsync)
import fedretain
fedretain.run(experiment, out=out, resume=True)
print("finished without being killed after", calls, "calls")
"""


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> fedretain.Run:
    return fedretain.run(EXPERIMENT, out=tmp_path_factory.mktemp("whole") / "run")


def same_bits(a: Path, b: Path) -> None:
    """Metrics (but for the time they took), forgetting matrices, final weights and server state."""
    for run in (a, b):
        assert json.loads((run / "summary.json").read_text())["status"] == "finished"
    rows = [
        [
            {k: v for k, v in json.loads(line).items() if "seconds" not in k}
            for line in (run / "metrics.jsonl").read_text().splitlines()
        ]
        for run in (a, b)
    ]
    assert rows[0] == rows[1]
    ours, theirs = (load_file(sorted((run / "checkpoint").glob("*.safetensors"))[-1]) for run in (a, b))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    index, other_index = (fedretain.Run(run).checkpoint().clients for run in (a, b))
    assert index == other_index
    assert len(index) > 3
    for version in index.items():
        one_state, other_state = (fedretain.Run(run).client_states.read(version, torch.zeros(())) for run in (a, b))
        assert all(torch.equal(one_state[name], other_state[name]) for name in one_state)
    names = sorted(path.name for path in (a / "forgetting").iterdir())
    assert names == sorted(path.name for path in (b / "forgetting").iterdir())
    for name in names:
        with np.load(a / "forgetting" / name) as one, np.load(b / "forgetting" / name) as other:
            assert all(np.array_equal(one[key], other[key], equal_nan=True) for key in one)


@pytest.mark.parametrize(
    ("what", "count"),
    [("append", 1), ("append", 4), ("rename", 1), ("rename", 6), ("rename", 9), ("fsync", 8), ("fsync", 12)],
)
def test_killed_and_resumed(what: str, count: int, whole: fedretain.Run, tmp_path: Path) -> None:
    """Killed in the middle of a metrics line, before a rename, before a flush to disk; then resumed."""
    experiment, out = tmp_path / "experiment.yaml", tmp_path / "run"
    experiment.write_text(yaml.safe_dump(EXPERIMENT))
    killed = subprocess.run(
        [sys.executable, "-c", KILLS_ITSELF, what, str(count), str(experiment), str(out)],
        capture_output=True,
        text=True,
    )
    assert killed.returncode == -signal.SIGKILL, killed.stdout + killed.stderr
    fedretain.run(experiment, out=out, resume=True)
    same_bits(whole.path, out)


def test_resuming_what_is_finished_changes_nothing(whole: fedretain.Run) -> None:
    before = {path: path.read_bytes() for path in whole.path.rglob("*.safetensors")}
    metrics = (whole.path / "metrics.jsonl").read_bytes()
    again = fedretain.run(EXPERIMENT, out=whole.path, resume=True)
    assert (whole.path / "metrics.jsonl").read_bytes() == metrics
    assert before == {path: path.read_bytes() for path in whole.path.rglob("*.safetensors")}
    assert again.summary == whole.summary


def test_more_rounds_can_be_added(whole: fedretain.Run, tmp_path: Path) -> None:
    short = fedretain.run({**EXPERIMENT, "rounds": 4}, out=tmp_path / "run")
    assert len(short.metrics) == 4
    fedretain.run(EXPERIMENT, out=tmp_path / "run", resume=True)
    same_bits(whole.path, tmp_path / "run")
    with pytest.raises(RunError, match="has 6 rounds already"):
        fedretain.run({**EXPERIMENT, "rounds": 2}, out=tmp_path / "run", resume=True)


@pytest.mark.parametrize("bound", [0, 2000])
def test_client_states_on_disk_are_those_in_memory(bound: int, whole: fedretain.Run, tmp_path: Path) -> None:
    """A memory bound of nothing, and of less than one client's state, changes no bit."""
    run = fedretain.run({**EXPERIMENT, "engine": {"state_memory": bound}}, out=tmp_path / "run")
    same_bits(whole.path, run.path)


def test_a_lost_client_state_makes_its_checkpoint_worthless(whole: fedretain.Run, tmp_path: Path) -> None:
    out = tmp_path / "run"
    shutil.copytree(whole.path, out)
    sorted((out / "clients").glob("*-000006.safetensors"))[0].unlink()
    fedretain.run(EXPERIMENT, out=out, resume=True)
    same_bits(whole.path, out)


def test_states_that_cannot_fit_on_the_disk_are_refused_up_front(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """64·16 + 16 + 16·10 + 10 = 1,210 parameters of 4 bytes: SCAFFOLD keeps 4,840 bytes per client."""
    given = {**EXPERIMENT, "method": "scaffold", "local": {"steps": 1}, "rounds": 1}
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10**9, 10**9, 14_519))
    with pytest.raises(
        RunError, match=r"scaffold keeps 4.84 kB for each client seen: at worst 14.5 kB on disk, and 14.5 kB are free"
    ):
        fedretain.run(given, out=tmp_path / "run")
    assert not (tmp_path / "run").exists()
    monkeypatch.undo()
    with caplog.at_level("INFO", logger="fedretain"):
        fedretain.run(given, out=tmp_path / "run", resume=True)
    assert "at worst 14.5 kB on disk" in caplog.text


@pytest.mark.parametrize("every", [1, 3, 1000])
def test_states_on_disk_never_exceed_the_estimate(every: int, tmp_path: Path) -> None:
    """Six clients by threes for twelve rounds: at most 3·6 + 3 versions, however rarely a checkpoint is saved."""
    counts: list[int] = []
    given = {
        **EXPERIMENT,
        "rounds": 12,
        "partition": {"kind": "iid", "clients": 6},
        "checkpoint": {"every": every},
        "engine": {"state_memory": 0},
    }
    fedretain.run(
        given,
        out=tmp_path / "run",
        watch=lambda experiment, row: counts.append(len(list((tmp_path / "run" / "clients").iterdir()))),
    )
    assert max(counts) <= 3 * 6 + 3
    assert min(counts[4:]) >= 6


@pytest.mark.parametrize(
    "damage", ["truncated newest", "garbled newest json", "all checkpoints", "metrics cut", "metrics garbled"]
)
def test_damaged_files_never_break_a_resume(damage: str, whole: fedretain.Run, tmp_path: Path) -> None:
    out = tmp_path / "run"
    shutil.copytree(whole.path, out)
    newest = sorted((out / "checkpoint").glob("*.safetensors"))[-1]
    if damage == "truncated newest":
        newest.write_bytes(newest.read_bytes()[:-10])
    elif damage == "garbled newest json":
        newest.with_suffix(".json").write_text('{"round": 6,')
    elif damage == "all checkpoints":
        for path in (out / "checkpoint").iterdir():
            path.write_bytes(b"")
    elif damage == "metrics cut":
        text = (out / "metrics.jsonl").read_bytes()
        (out / "metrics.jsonl").write_bytes(text[: len(text) * 3 // 4])
    else:
        lines = (out / "metrics.jsonl").read_bytes().splitlines(keepends=True)
        (out / "metrics.jsonl").write_bytes(b"".join([*lines[:4], b"\x00\xff\n", *lines[5:]]))
    fedretain.run(EXPERIMENT, out=out, resume=True)
    same_bits(whole.path, out)


def test_ctrl_c_saves_the_last_round_and_says_how_to_resume(whole: fedretain.Run, tmp_path: Path) -> None:
    """SIGINT while round 4 runs: three rounds are kept although checkpoints come every two; exit code 130."""
    experiment, out = tmp_path / "experiment.yaml", tmp_path / "run"
    experiment.write_text(yaml.safe_dump({**EXPERIMENT, "checkpoint": {"every": 100}}))
    script = (
        "import os, signal, sys, torch, fedretain.engines.loop as loop\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # a background job starts with it ignored
        "torch.set_num_threads(1)\n"
        "train = loop.LoopEngine.train\n"
        "def interrupted(self, received, *more, **keys):\n"
        "    if received.round == 4: os.kill(os.getpid(), signal.SIGINT)\n"
        "    return train(self, received, *more, **keys)\n"
        "loop.LoopEngine.train = interrupted\n"
        "from fedretain.cli import main\n"
        f"sys.argv = ['fedretain', 'run', {str(experiment)!r}, '--out', {str(out)!r}, '--quiet']\n"
        "main()\n"
    )
    stopped = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert stopped.returncode == 130, stopped.stderr
    assert "--resume" in stopped.stderr
    assert fedretain.Run(out).checkpoint().state.round == 3
    fedretain.run(EXPERIMENT, out=out, resume=True)
    same_bits(whole.path, out)


def test_divergence_keeps_the_last_good_checkpoint(tmp_path: Path) -> None:
    """The rate grows without bound by a method that scales the direction from round 3 on."""
    script = (
        "from dataclasses import dataclass\n"
        "from fedretain import Method\n"
        "@dataclass(frozen=True)\n"
        "class Explode(Method):\n"
        '    """Breaks in round 3."""\n'
        "    def direction(self, gradient, params, received, own):\n"
        "        factor = 1.0 if received.round < 3 else float('inf')\n"
        "        return {name: factor * value for name, value in gradient.items()}\n"
    )
    (tmp_path / "explode_method.py").write_text(script)
    experiment = tmp_path / "experiment.yaml"
    experiment.write_text(
        yaml.safe_dump({**EXPERIMENT, "method": "explode_method:Explode", "checkpoint": {"every": 100}})
    )
    command = [sys.executable, "-m", "fedretain", "run", str(experiment), "--out", str(tmp_path / "run"), "--quiet"]
    failed = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert failed.returncode == 1
    assert "round 3, client" in failed.stderr
    assert "diverged" in failed.stderr
    checkpoint = sorted((tmp_path / "run" / "checkpoint").glob("*.json"))[-1]
    assert checkpoint.name == "round-000002.json"
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) == 2


def test_other_data_under_the_same_name_is_refused(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)

    def data(seed: int) -> fedretain.Dataset:
        x = np.random.default_rng(seed).normal(size=(60, 5)).astype(np.float32)
        y = rng.integers(0, 3, 60)
        return fedretain.from_arrays(x, y, x, y)

    given: dict[str, Any] = {"rounds": 1, "partition": {"kind": "iid", "clients": 3}, "forgetting": {"every": 0}}
    fedretain.run(given, out=tmp_path / "run", data=data(1))
    with pytest.raises(RunError, match="was made with other examples"):
        fedretain.run({**given, "rounds": 2}, out=tmp_path / "run", data=data(2), resume=True)


FAST = {**EXPERIMENT, "engine": "vectorised", "local": {"lr": 0.1, "momentum": 0.9, "steps": 3, "batch_size": 200}}


def test_a_stack_that_was_killed_goes_on_to_the_same_bits(tmp_path: Path) -> None:
    """Killed in the middle of round 4's metrics line, after the checkpoint of round 2."""
    experiment, out = tmp_path / "experiment.yaml", tmp_path / "run"
    experiment.write_text(yaml.safe_dump(FAST))
    command = [sys.executable, "-c", KILLS_ITSELF, "append", "4", str(experiment), str(out)]
    killed = subprocess.run(command, capture_output=True, text=True)
    assert killed.returncode == -signal.SIGKILL, killed.stdout + killed.stderr
    fedretain.run(experiment, out=out, resume=True)
    same_bits(fedretain.run(FAST, out=tmp_path / "whole").path, out)
    with pytest.raises(RunError, match=r"engine\.name"):
        fedretain.run({**FAST, "engine": "loop"}, out=out, resume=True)


def test_auto_keeps_the_engine_that_it_began_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The planner chose a stack at first; what it would choose for the rounds that are left does not matter."""
    given = {**FAST, "engine": "auto"}
    chosen = iter(["vectorised", "vectorised", "loop"])
    monkeypatch.setattr(
        "fedretain.experiment.make_plan", lambda *_: fedretain.engines.planner.Plan(next(chosen), "loop", 1, "")
    )
    short = fedretain.run({**given, "rounds": 3}, out=tmp_path / "run")
    assert short.checkpoint().facts["engine"] == {"name": "vectorised", "inner": "loop"}
    long = fedretain.run(given, out=tmp_path / "run", resume=True)
    assert long.checkpoint().facts["engine"] == {"name": "vectorised", "inner": "loop"}
    whole = fedretain.run(FAST, out=tmp_path / "whole")
    same_bits(whole.path, long.path)
    assert fedretain.run(given, out=tmp_path / "loop").checkpoint().facts["engine"]["name"] == "loop"


def test_the_number_of_workers_may_change(whole: fedretain.Run, tmp_path: Path) -> None:
    """Two processes, then one: the bits of the loop engine all the same."""
    with_workers = {**EXPERIMENT, "engine": {"name": "workers", "workers": 2}}
    fedretain.run({**with_workers, "rounds": 3}, out=tmp_path / "run")
    last = fedretain.run(
        {**with_workers, "engine": {"name": "workers", "workers": 1}}, out=tmp_path / "run", resume=True
    )
    same_bits(whole.path, last.path)
