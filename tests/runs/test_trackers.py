"""TensorBoard, MLflow and W&B read back with their own libraries: the numbers are those of ``metrics.jsonl``."""

from __future__ import annotations

import builtins
import json
import logging
import random
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

import fedretain
from fedretain.cli import main
from fedretain.config import make_experiment
from fedretain.errors import ConfigError, MissingExtraError, RunError
from fedretain.runs.directory import locked
from fedretain.runs.trackers import TRACKERS, MLflow, RunFacts, TensorBoard, WeightsAndBiases
from fedretain.runs.trackers.protocol import client_lists, numbers_of, read_memory, round_numbers, summary_numbers
from fedretain.runs.trackers.tracking import build_trackers, run_facts

ALL = ["tensorboard", "mlflow", "wandb"]

# MLflow's own use of SQLAlchemy; fedretain's tracker does not let it through, the reader below would.
pytestmark = pytest.mark.filterwarnings("ignore:The ``noload`` loader strategy:DeprecationWarning")

Series = dict[str, dict[int, float]]
"""Values by metric and round."""


@pytest.fixture(autouse=True)
def _at_home(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """No setting of the user's leads a tracker elsewhere, and no cache of the user's is touched."""
    for name in ("MLFLOW_TRACKING_URI", "WANDB_MODE", "WANDB_PROJECT"):
        monkeypatch.delenv(name, raising=False)
    for kind in ("CACHE", "CONFIG", "DATA"):
        monkeypatch.setenv(f"WANDB_{kind}_DIR", str(tmp_path_factory.getbasetemp() / "wandb"))


@pytest.fixture
def few(small: dict[str, Any]) -> dict[str, Any]:
    """Three rounds, forgetting in the second."""
    return {**small, "rounds": 3, "forgetting": {"every": 2}}


# ------------------------------------------------------------------ what each library itself reads


def from_tensorboard(path: Path) -> tuple[Series, Series]:
    """Scalars, and of each histogram how many values it counts."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    read = EventAccumulator(str(path / "tensorboard"), size_guidance={"scalars": 0, "histograms": 0})
    read.Reload()
    scalars = {tag: read.Scalars(tag) for tag in read.Tags()["scalars"]}
    for tag, events in scalars.items():
        assert len(events) == len({event.step for event in events}), f"{tag}: a round twice"
    histograms = {tag: read.Histograms(tag) for tag in read.Tags()["histograms"]}
    return (
        {tag: {event.step: event.value for event in events} for tag, events in scalars.items()},
        {tag: {event.step: event.histogram_value.num for event in events} for tag, events in histograms.items()},
    )


def mlflow_client(home: Path) -> Any:
    from mlflow.tracking import MlflowClient

    return MlflowClient(f"sqlite:///{home}/mlflow.db")


def mlflow_run(path: Path, home: Path | None = None) -> Any:
    """The only run of the only experiment (besides MLflow's own), or the one whose id the run directory keeps."""
    return mlflow_client(home or path).get_run(read_memory(path)["mlflow"])


def from_mlflow(path: Path, home: Path | None = None) -> Series:
    client, run = mlflow_client(home or path), mlflow_run(path, home)
    found: Series = {}
    for key in run.data.metrics:
        history = client.get_metric_history(run.info.run_id, key)
        assert len(history) == len({point.step for point in history}), f"{key}: a round twice"
        found[key] = {point.step: point.value for point in history}
    return found


def wandb_records(path: Path) -> list[Any]:
    """The records of the only offline run, all of them: W&B's service may write the last ones after ``finish``."""
    deadline = time.monotonic() + 10
    while True:
        (file,) = path.glob("wandb/offline-run-*/run-*.wandb")
        records = list(log_records(file.read_bytes()))
        if (records and records[-1].HasField("exit")) or time.monotonic() > deadline:
            return records
        time.sleep(0.05)


def log_records(data: bytes) -> Iterator[Any]:
    """LevelDB's log format, blocks of 32 KiB after seven bytes of header.

    A record is one piece (type 1), or first, middle and last pieces (2, 3, 4), each behind checksum, length and type.
    """
    from wandb.proto.wandb_internal_pb2 import Record

    assert b":W&B".startswith(data[:4])
    place, whole = 7, b""
    while place + 7 <= len(data):
        if (left := 32768 - place % 32768) < 7:
            place += left
            continue
        _, size, kind = struct.unpack("<IHB", data[place : place + 7])
        if place + 7 + size > len(data):
            return
        whole += data[place + 7 : place + 7 + size]
        place += 7 + size
        if kind in (1, 4):
            yield Record.FromString(whole)
            whole = b""


def from_wandb(path: Path) -> tuple[Series, Series]:
    """The history and, at step 0, the summary; of each histogram how many values it counts."""
    scalars: Series = {}
    histograms: Series = {}
    for record in wandb_records(path):
        for item in record.history.item:
            key, value = "/".join(item.nested_key) or item.key, json.loads(item.value_json)
            step = record.history.step.num
            if key.endswith("/values"):
                histograms.setdefault(key.removesuffix("/values"), {})[step] = sum(value)
            elif not key.startswith("_") and not key.endswith(("/bins", "/_type")):
                assert step not in scalars.setdefault(key, {}), f"{key}: round {step} twice"
                scalars[key][step] = value
        for item in record.summary.update:
            key = "/".join(item.nested_key) or item.key
            if key.startswith("summary/"):
                scalars[key] = {0: json.loads(item.value_json)}
    return scalars, histograms


def expected(path: Path) -> tuple[Series, Series, dict[str, float]]:
    """From the files alone: numbers by round, lengths of the clients' lists, numbers of the summary."""
    rows = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    numbers: Series = {}
    lengths: Series = {}
    for row in rows:
        for key, value in row.items():
            if key not in ("round", "clients"):
                numbers.setdefault(key, {})[row["round"]] = value
        for key, values in row["clients"].items():
            if key != "id":
                lengths.setdefault(f"clients/{key}", {})[row["round"]] = len([v for v in values if v is not None])
    summary: dict[str, float] = {}
    if (path / "summary.json").exists():
        for key, value in json.loads((path / "summary.json").read_text()).items():
            parts = {f"{key}.{inner}": v for inner, v in value.items()} if isinstance(value, dict) else {key: value}
            summary |= {f"summary/{name}": v for name, v in parts.items() if isinstance(v, int | float)}
    return numbers, lengths, summary


def singles(series: Series) -> Series:
    """The numbers as float32, TensorBoard's precision."""
    return {key: {step: float(np.float32(value)) for step, value in values.items()} for key, values in series.items()}


def assert_everything_arrived(path: Path, home: Path | None = None) -> None:
    """Every number of every round and of the summary, once and no other, in all three."""
    numbers, lengths, summary = expected(path)
    last = max(numbers["seconds"])
    at_the_end = {key: {last: value} for key, value in summary.items()}
    scalars, histograms = from_tensorboard(path)
    assert scalars == singles(numbers | at_the_end)
    assert histograms == lengths
    assert from_mlflow(path, home) == numbers | at_the_end
    scalars, histograms = from_wandb(path)
    assert scalars == numbers | {key: {0: value} for key, value in summary.items()}
    assert histograms == lengths


def same_bits(one: Path, other: Path) -> None:
    """The same metrics but for the seconds, and the same final weights."""
    rows = [
        [
            {key: value for key, value in json.loads(line).items() if "seconds" not in key}
            for line in (path / "metrics.jsonl").read_text().splitlines()
        ]
        for path in (one, other)
    ]
    assert rows[0] == rows[1]
    for a, b in zip(fedretain.Run(one).model().parameters(), fedretain.Run(other).model().parameters(), strict=True):
        assert torch.equal(a, b)


# ------------------------------------------------------------------ a whole run


def test_every_number_arrives_and_training_does_not_notice(
    few: dict[str, Any], tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All three at once: same bits as without, nothing printed, no global random state touched, nothing elsewhere."""
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    plain = fedretain.run(few, out=tmp_path / "plain")
    capfd.readouterr()
    before = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state()  # noqa: NPY002
    tracked = fedretain.run({**few, "track": ALL}, out=tmp_path / "tracked")
    after = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state()  # noqa: NPY002
    assert capfd.readouterr() == ("", "")
    assert before[:2] == after[:2]
    assert torch.equal(before[2], after[2])
    same_bits(plain.path, tracked.path)
    assert_everything_arrived(tracked.path)
    assert {p.name for p in tmp_path.iterdir()} == {"elsewhere", "plain", "tracked"}
    assert not list((tmp_path / "elsewhere").iterdir())

    numbers, _, _ = expected(tracked.path)
    assert {"train_loss", "test_accuracy", "upload_bytes", "forgetting_by_model"} <= numbers.keys()
    run = mlflow_run(tracked.path)
    assert run.info.status == "FINISHED"
    assert run.info.run_name == "small"
    assert mlflow_client(tracked.path).get_experiment(run.info.experiment_id).name == "small"
    assert run.data.params["local.lr"] == "0.1"
    assert run.data.tags["rounds"] == "3"
    (header,) = [record.run for record in wandb_records(tracked.path) if record.HasField("run")]
    assert (header.run_id, header.display_name) == (read_memory(tracked.path)["wandb"], "small")
    assert (header.project, header.run_group) == ("fedretain", "")
    assert {item.key: item.value_json for item in header.config.update}["local.lr"] == "0.1"


def test_going_on_continues_the_same_run(few: dict[str, Any], tmp_path: Path) -> None:
    """Two rounds, then four, then nothing left to do: one run with each round once; trackers may come and go."""
    path = tmp_path / "run"
    fedretain.run({**few, "rounds": 2, "track": ["mlflow", "wandb"]}, out=path)
    ids = read_memory(path)
    fedretain.run({**few, "rounds": 3}, out=path, resume=True)
    fedretain.run({**few, "rounds": 4, "track": ALL}, out=path, resume=True)
    fedretain.run({**few, "rounds": 4, "track": ALL}, out=path, resume=True)
    assert read_memory(path) == ids
    numbers, _, summary = expected(path)
    seen = from_mlflow(path)
    assert {key: seen[key] for key in numbers} == numbers
    # Each time that it was finished, after rounds 2 and 4: MLflow keeps the history of the summary.
    assert {key: seen[key][4] for key in summary if seen[key].get(4) is not None} == {
        key: value for key, value in summary.items() if 4 in seen[key]
    }
    assert seen["summary/rounds"] == {2: 2, 4: 4}
    assert len(mlflow_client(path).search_runs([mlflow_run(path).info.experiment_id])) == 1
    assert mlflow_run(path).data.tags["rounds"] == "4"
    scalars, _ = from_tensorboard(path)
    assert scalars == singles(numbers | {key: {4: value} for key, value in summary.items()})
    scalars, _ = from_wandb(path)
    assert scalars == numbers | {key: {0: value} for key, value in summary.items()}


KILLED = """
import os, signal, sys
import torch
torch.set_num_threads(1)
import fedretain
def watch(experiment, row):
    if row["round"] == 3:
        os.kill(os.getpid(), signal.SIGKILL)
fedretain.run(sys.argv[1], out=sys.argv[2], watch=watch)
"""


def test_killed_and_resumed(small: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed after round 3 of 5 with a checkpoint of round 2: round 3 is done again, and is there once.

    MLflow had it already, and keeps the first numbers: the same but for the seconds.
    """
    experiment, path = tmp_path / "experiment.yaml", tmp_path / "run"
    experiment.write_text(yaml.safe_dump({**small, "checkpoint": {"every": 2}, "track": ALL}))
    monkeypatch.delenv("WANDB_SERVICE", raising=False)  # a child would share this process's, which nobody kills
    killed = subprocess.run([sys.executable, "-c", KILLED, str(experiment), str(path)], capture_output=True, text=True)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert from_mlflow(path)["train_loss"].keys() == {1, 2, 3}
    ids = read_memory(path)
    fedretain.run(experiment, out=path, resume=True)
    assert read_memory(path) == ids
    numbers, lengths, summary = expected(path)
    assert numbers["train_loss"].keys() == {1, 2, 3, 4, 5}
    scalars, histograms = from_tensorboard(path)
    assert scalars == singles(numbers | {key: {5: value} for key, value in summary.items()})
    assert histograms == lengths
    scalars, histograms = from_wandb(path)
    assert scalars == numbers | {key: {0: value} for key, value in summary.items()}
    assert histograms == lengths
    seen = from_mlflow(path)
    for key, values in numbers.items():
        assert seen[key].keys() == values.keys()
        assert "seconds" in key or seen[key] == values
    assert mlflow_run(path).info.status == "FINISHED"


def test_a_stop_is_told(few: dict[str, Any], tmp_path: Path) -> None:
    """Ctrl-C after round 2: what was done is there, and the run does not count as finished."""

    def stop(experiment: Any, row: Mapping[str, Any]) -> None:
        if row["round"] == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fedretain.run({**few, "track": ALL}, out=tmp_path / "run", watch=stop)
    assert mlflow_run(tmp_path / "run").info.status == "KILLED"
    assert_everything_arrived(tmp_path / "run")
    assert expected(tmp_path / "run")[0]["seconds"].keys() == {1, 2}


# ------------------------------------------------------------------ trouble


class Failing:
    """Fails at one of its calls."""

    def __init__(self, when: str, error: BaseException | None = None) -> None:
        self.when = when
        self.error = error or ConnectionError("server\ngone")
        self.calls: list[str] = []

    def _call(self, name: str) -> None:
        self.calls.append(name)
        if name == self.when:
            raise self.error

    def open(self, facts: RunFacts) -> int:
        self._call("open")
        return 0

    def log(self, round: int, numbers: Mapping[str, float], clients: Mapping[str, list[float]]) -> None:
        self._call(f"log {round}")

    def close(self, rounds: int, summary: Mapping[str, float] | None) -> None:
        self._call("close" if summary else "stop")


@pytest.mark.parametrize(
    ("when", "calls"),
    [
        ("open", ["open"]),
        ("log 2", ["open", "log 1", "log 2", "stop"]),
        ("close", ["open", "log 1", "log 2", "log 3", "close"]),
    ],
)
def test_a_failing_tracker_costs_one_warning(
    when: str, calls: list[str], few: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    plain = fedretain.run(few, out=tmp_path / "plain")
    failing, sound = Failing(when), Failing("never")
    with caplog.at_level(logging.WARNING, "fedretain"):
        run = fedretain.run(few, out=tmp_path / "run", trackers=[failing, sound])
    assert failing.calls == calls
    assert sound.calls == ["open", "log 1", "log 2", "log 3", "close"]
    (record,) = caplog.records
    message = record.getMessage()
    assert message.startswith("warning: Failing failed in round ")
    assert "(ConnectionError: server gone); the run goes on without it" in message
    assert f"fedretain.track({str(run.path)!r}, to=...)" in message
    same_bits(plain.path, run.path)


def test_ctrl_c_in_a_tracker_is_the_users(few: dict[str, Any], tmp_path: Path) -> None:
    """It stops the run like any other, after a whole round; trackers that were not opened are not closed."""
    failing, later = Failing("open", KeyboardInterrupt()), Failing("never")
    with pytest.raises(KeyboardInterrupt):
        fedretain.run(few, out=tmp_path / "run", trackers=[failing, later])
    assert (failing.calls, later.calls) == (["open"], [])
    failing = Failing("log 2", KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        fedretain.run(few, out=tmp_path / "run", resume=True, trackers=[failing])
    assert failing.calls == ["open", "log 1", "log 2", "stop"]
    assert fedretain.Run(tmp_path / "run").checkpoint().state.round == 2


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # TensorBoard writes in a thread
@pytest.mark.parametrize("name", ALL)
def test_a_library_that_breaks_down_mid_run(
    name: str, few: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The real libraries, with the ground taken away after round 1; sent again, everything is there."""
    path = tmp_path / "run"

    def break_down(experiment: Any, row: Mapping[str, Any]) -> None:
        if row["round"] > 1:
            return
        if name == "tensorboard":
            from tensorboard.summary.writer.record_writer import RecordWriter

            monkeypatch.setattr(RecordWriter, "write", lambda *_: (_ for _ in ()).throw(OSError(28, "disk full")))
        elif name == "mlflow":
            import sqlite3

            with sqlite3.connect(path / "mlflow.db") as database:
                database.execute("ALTER TABLE metrics RENAME TO elsewhere")
        else:
            import wandb

            monkeypatch.setattr(wandb.Run, "log", lambda *_, **__: (_ for _ in ()).throw(BrokenPipeError("no service")))

    with caplog.at_level(logging.WARNING, "fedretain"):
        fedretain.run({**few, "track": name}, out=path, watch=break_down)
    (message,) = [record.getMessage() for record in caplog.records if record.name == "fedretain"]
    assert message.startswith(f"warning: {name} failed in round ")
    assert message.endswith(f"Send it again with: fedretain track {path}")
    monkeypatch.undo()
    if name == "mlflow":
        import sqlite3

        with sqlite3.connect(path / "mlflow.db") as database:
            database.execute("ALTER TABLE elsewhere RENAME TO metrics")
    fedretain.track(path)
    numbers, _, _ = expected(path)
    read: Any = {"tensorboard": from_tensorboard, "mlflow": lambda p: (from_mlflow(p), {}), "wandb": from_wandb}[name]
    found = read(path)[0]
    wanted = singles(numbers) if name == "tensorboard" else numbers
    assert {key: found[key] for key in wanted} == wanted


def test_a_server_that_does_not_answer(
    few: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """MLFLOW_TRACKING_URI is heeded, and its password is written nowhere."""
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://me:secret@127.0.0.1:9")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    with caplog.at_level(logging.WARNING, "fedretain"):
        run = fedretain.run({**few, "track": "mlflow"}, out=tmp_path / "run")
    assert run.summary["status"] == "finished"
    assert "127.0.0.1" in caplog.text
    assert not (run.path / "mlflow.db").exists()
    texts = [p.read_bytes() for p in run.path.rglob("*") if p.is_file()]
    assert not any(b"secret" in text for text in texts)
    assert "secret" not in caplog.text


@pytest.mark.parametrize(
    ("name", "module"),
    [("tensorboard", "tensorboard"), ("mlflow", "mlflow"), ("mlflow", "sqlalchemy"), ("wandb", "wandb")],
)
def test_a_missing_library_is_an_error_before_anything_is_written(
    name: str, module: str, few: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = builtins.__import__

    def without(wanted: str, *rest: Any, **more: Any) -> Any:
        if wanted.split(".")[0] == module:
            raise ModuleNotFoundError(f"No module named {module!r}", name=module)
        return real(wanted, *rest, **more)

    for loaded in [key for key in sys.modules if key.startswith("torch.utils.tensorboard")]:
        monkeypatch.delitem(sys.modules, loaded)
    if hasattr(torch.utils, "tensorboard"):
        monkeypatch.delattr(torch.utils, "tensorboard")
    monkeypatch.setattr(builtins, "__import__", without)
    message = rf"track: {name} needs the package '{module}'.*pip install 'fedretain\[track\]'"
    with pytest.raises(MissingExtraError, match=message):
        fedretain.run({**few, "track": name}, out=tmp_path / "run")
    with pytest.raises(MissingExtraError, match=message):
        fedretain.compare({**few, "track": name, "variants": {"seed": [0, 1]}}, out=tmp_path / "runs")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("tensorbord", r"unknown tracker 'tensorbord'; did you mean 'tensorboard'\?"),
        (["wandb", {"name": "wandb", "mode": "online"}], "track: 'wandb' stands there twice"),
        ({"name": "wandb", "mood": "online"}, r"unknown key 'track\.mood'; did you mean 'track\.mode'\?"),
        ({"name": "wandb", "mode": "on"}, r"track\.mode: must be 'offline' or 'online'"),
        ({"name": "tensorboard", "folder": "x"}, "'track.folder'.*takes no parameters"),
        ({"uri": "x"}, r"track\.name: must be text"),
        (3, "track: must be a name, or a mapping"),
        ({"name": "mlflow", "uri": "mlruns"}, r"track\.uri: MLflow no longer writes to plain folders"),
        ("pathlib:Path", "'pathlib:Path' makes no tracker; it needs the methods open, log and close"),
    ],
)
def test_wrong_settings_are_an_error_before_anything_is_written(
    given: Any, message: str, few: dict[str, Any], tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        fedretain.run({**few, "track": given}, out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_what_is_no_tracker_is_refused(few: dict[str, Any], tmp_path: Path) -> None:
    for wrong in (print, Failing, object()):
        with pytest.raises(ConfigError, match="is no tracker; it needs the methods open, log and close"):
            fedretain.run(few, out=tmp_path / "run", trackers=[wrong])  # type: ignore[list-item]
    assert not (tmp_path / "run").exists()


# ------------------------------------------------------------------ settings, names, groups


def test_the_key_is_written_out_and_decides_nothing() -> None:
    plain = make_experiment({})
    assert plain.as_dict()["track"] == []
    tracked = make_experiment({"track": [{"name": "mlflow", "experiment": "mine"}, "tensorboard"]})
    assert tracked.as_dict()["track"] == [
        {"name": "mlflow", "uri": None, "experiment": "mine"},
        {"name": "tensorboard"},
    ]
    assert make_experiment(tracked.as_dict()) == tracked
    assert tracked.key == plain.key
    assert [type(named.tracker) for named in build_trackers(tracked)] == [MLflow, TensorBoard]
    assert set(TRACKERS) == set(ALL)


def test_numbers_only() -> None:
    row = {"round": 2, "a": 1, "b": 0.5, "c": None, "d": float("nan"), "e": "x", "f": True, "g": [1.0]}
    clients = {"id": [4, 7], "loss": [0.5, None], "gone": [None, None]}
    assert round_numbers({**row, "clients": clients}) == {"a": 1, "b": 0.5}
    assert client_lists({**row, "clients": clients}) == {"clients/loss": [0.5]}
    assert client_lists(row) == {}
    assert numbers_of({"a": {"b": {"c": 1}, "d": None}}) == {"a.b.c": 1}
    assert summary_numbers({"status": "finished", "seconds": 2, "accuracy": {"last": 0.5}}) == {
        "summary/seconds": 2,
        "summary/accuracy.last": 0.5,
    }


def test_facts(tmp_path: Path) -> None:
    """By itself a run is called as its experiment and shares nothing; in a comparison it is called as its folder."""
    experiment = make_experiment({"name": "mine", "track": "wandb"})
    path = tmp_path / "seed=0"
    path.mkdir()
    facts = run_facts(path, experiment)
    assert (facts.name, facts.group, facts.home) == ("mine", None, path)
    assert facts.config["local.lr"] == 0.1
    assert not any(key.startswith("track") for key in facts.config)
    assert facts.recall("x") is None
    facts.remember("x", "1")
    facts.remember("group", "grid")
    assert run_facts(path, experiment).recall("x") == "1"
    facts = run_facts(path, experiment)
    assert (facts.name, facts.group, facts.home) == ("seed=0", "grid", tmp_path)
    (path / "tracking.json").write_text("{half")
    assert run_facts(path, experiment).group is None
    (tmp_path / "comparison.json").write_text(json.dumps({"variants": {"seed=0": "seed=0"}}))
    assert run_facts(path, experiment).group == "mine"
    (tmp_path / "comparison.json").write_text(json.dumps({"variants": {"seed=1": "seed=1"}}))
    assert run_facts(path, experiment).group is None


def test_a_comparison_is_a_group(few: dict[str, Any], tmp_path: Path) -> None:
    """One MLflow database and experiment, one W&B group, event files below one folder; each variant a run."""
    grid = {**few, "name": "grid", "rounds": 2, "track": ALL, "variants": {"loss": ["ce", "wsm"]}}
    comparison = fedretain.compare(grid, out=tmp_path / "runs")
    fedretain.compare(grid, out=tmp_path / "runs")
    assert not comparison.failures
    client = mlflow_client(comparison.path)
    experiment = client.get_experiment_by_name("grid")
    runs = client.search_runs([experiment.experiment_id])
    assert {run.info.run_name for run in runs} == {"loss=ce", "loss=wsm"}
    assert len(runs) == 2
    for run in comparison.runs.values():
        assert_everything_arrived(run.path, comparison.path)
        (header,) = [record.run for record in wandb_records(run.path) if record.HasField("run")]
        assert (header.run_group, header.display_name) == ("grid", run.path.name)
    assert len(list(comparison.path.glob("*/tensorboard/events.*"))) == 2


def test_wandb_takes_its_settings(few: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Offline unless asked; on its server a run goes on after the last step that is there. The server is played."""
    asked: dict[str, Any] = {}

    class Server:
        starting_step = 3

    def init(**settings: Any) -> Server:
        asked.update(settings)
        return Server()

    tracker = WeightsAndBiases(project="p", entity="e", mode="online")
    monkeypatch.setattr(tracker._library, "init", init)
    (tmp_path / "run").mkdir()
    facts = run_facts(tmp_path / "run", make_experiment(few))
    assert tracker.open(facts) == 2
    assert (asked["project"], asked["entity"], asked["mode"], asked["resume"]) == ("p", "e", "online", "allow")
    asked.clear()
    monkeypatch.setenv("WANDB_MODE", "online")
    monkeypatch.setenv("WANDB_PROJECT", "mine")
    WeightsAndBiases().open(facts)
    assert (asked["project"], asked["mode"]) == ("mine", "online")
    monkeypatch.delenv("WANDB_MODE")
    WeightsAndBiases().open(facts)
    assert (asked["mode"], asked["resume"]) == ("offline", None)


def test_mlflow_takes_its_settings(few: dict[str, Any], tmp_path: Path) -> None:
    """A database elsewhere has its own run; the one in the run directory keeps its own."""
    elsewhere = {"name": "mlflow", "uri": f"sqlite:///{tmp_path}/all.db", "experiment": "mine"}
    run = fedretain.run({**few, "rounds": 1, "track": elsewhere}, out=tmp_path / "run")
    assert not (run.path / "mlflow.db").exists()
    fedretain.track(run, "mlflow")
    fedretain.track(run)
    ids = read_memory(run.path)
    assert ids.keys() == {"mlflow", f"mlflow sqlite:///{tmp_path}/all.db"}
    assert from_mlflow(run.path)["train_loss"].keys() == {1}
    from mlflow.tracking import MlflowClient

    client = MlflowClient(elsewhere["uri"])
    found = client.search_runs([client.get_experiment_by_name("mine").experiment_id])
    assert [run.info.run_id for run in found] == [ids[f"mlflow sqlite:///{tmp_path}/all.db"]]


# ------------------------------------------------------------------ afterwards


def test_sending_afterwards(few: dict[str, Any], tmp_path: Path) -> None:
    run = fedretain.run(few, out=tmp_path / "run")
    with pytest.raises(ConfigError, match="names no tracker; say where to"):
        fedretain.track(run)
    fedretain.track(run, ALL)
    assert_everything_arrived(run.path)
    fedretain.track(run.path, ALL)
    assert_everything_arrived(run.path)
    own = Failing("never")
    fedretain.track(run, own)
    assert own.calls == ["open", "log 1", "log 2", "log 3", "close"]
    with pytest.raises(RunError, match="could not be sent to Failing"):
        fedretain.track(run, [Failing("log 1")])
    with locked(run.path), pytest.raises(RunError, match="another process is writing"):
        fedretain.track(run, own)


def test_the_verb(
    few: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = fedretain.run({**few, "track": "tensorboard"}, out=tmp_path / "run")

    def call(*arguments: str) -> int:
        monkeypatch.setattr(sys, "argv", ["fedretain", "track", *arguments])
        monkeypatch.setattr(sys, "path", list(sys.path))
        try:
            main()
        except SystemExit as stop:
            return stop.code if isinstance(stop.code, int) else 0
        return 0

    for file in (run.path / "tensorboard").iterdir():
        file.unlink()
    capsys.readouterr()
    assert call(str(run.path)) == 0
    assert capsys.readouterr().out == f"sent: {run.path}\n"
    assert from_tensorboard(run.path)[0]["train_loss"].keys() == {1, 2, 3}
    assert call(str(run.path), "--to", "tensorboard", "--to", "{name: wandb, project: mine}") == 0
    (header,) = [record.run for record in wandb_records(run.path) if record.HasField("run")]
    assert header.project == "mine"
    assert call(str(run.path), "--to", "nowhere") == 2
    assert "unknown tracker 'nowhere'" in capsys.readouterr().err
    assert call(str(tmp_path / "missing")) == 1


def test_importing_fedretain_imports_no_tracker() -> None:
    code = "import fedretain, sys; print({'tensorboard', 'mlflow', 'wandb', 'sqlalchemy'} & set(sys.modules))"
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert said.stdout.strip() == "set()"
