"""The Python API from an experiment to what it leaves behind."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import pytest
import torch
import yaml

import fedretain as fr
from fedretain.config import make_experiment
from fedretain.engines.workers import WorkersEngine
from fedretain.errors import ConfigError, DataError, PartitionError, RunError, TrainingError
from fedretain.experiment import build_world
from fedretain.forgetting import client_forgetting

ALWAYS = {
    "round",
    "train_loss",
    "upload_bytes",
    "download_bytes",
    "seconds",
    "evaluate_seconds",
    "measure_seconds",
    "clients",
}
EVALUATED = {"test_accuracy", "test_loss"}
FORGETTING = {"forgetting_by_model", "forgetting_by_data", "forgettable_examples"}


def vectors(train: int = 60, classes: int = 3, **changes: Any) -> fr.Dataset:
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(train, 4)).astype(np.float32), rng.integers(0, classes, train)
    arrays = {"x_train": x, "y_train": y, "x_test": x[:20], "y_test": y[:20], **changes}
    return fr.from_arrays(**arrays)


def lines(run: fr.Run) -> list[dict[str, Any]]:
    """The metrics as strict JSON: a NaN token is an error."""

    def refuse(token: str) -> None:
        raise AssertionError(f"{token} is no JSON")

    text = (run.path / "metrics.jsonl").read_text()
    return [json.loads(line, parse_constant=refuse) for line in text.splitlines()]


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> fr.Run:
    """Seven rounds; evaluated every third, forgetting every second: the last round is neither's turn."""
    return fr.run(
        {
            "name": "done",
            "rounds": 7,
            "participation": 4,
            "partition": {"kind": "dirichlet", "clients": 10, "alpha": 0.3},
            "model": {"name": "mlp", "hidden": [16]},
            "loss": "wsm",
            "evaluate": {"every": 3},
            "forgetting": {"every": 2},
        },
        out=tmp_path_factory.mktemp("done") / "run",
    )


def test_metrics_hold_exactly_what_was_measured(done: fr.Run) -> None:
    rows = lines(done)
    assert [row["round"] for row in rows] == [1, 2, 3, 4, 5, 6, 7]
    for row in rows:
        expected = set(ALWAYS)
        expected |= EVALUATED if row["round"] in (3, 6, 7) else set()
        expected |= FORGETTING if row["round"] in (2, 4, 6) else set()
        assert row.keys() == expected


def test_metrics_as_a_table(done: fr.Run) -> None:
    assert len(done.metrics) == 7
    assert done.metrics[-1]["round"] == 7
    assert [row["round"] for row in done.metrics[2:4]] == [3, 4]
    column = done.metrics["test_accuracy"]
    assert [value is None for value in column] == [True, True, False, True, True, False, False]
    assert "clients" not in done.metrics.columns
    with pytest.raises(KeyError, match="was not measured; columns: round"):
        done.metrics["accuracy"]


def test_summary_by_hand(done: fr.Run) -> None:
    rows = lines(done)
    curve = [row["test_accuracy"] for row in rows if "test_accuracy" in row]
    assert done.summary.keys() == {
        "status", "rounds", "clients", "initial_accuracy", "final_accuracy", "rounds_to_accuracy", "mean_forgetting",
        "client_forgetting", "forgettable_examples", "forgetting_events", "seconds", "upload_bytes", "download_bytes",
        "cost",
    }  # fmt: skip
    assert (done.summary["status"], done.summary["rounds"], done.summary["clients"]) == ("finished", 7, 10)
    assert done.summary["final_accuracy"] == {
        "last": curve[-1],
        "mean_last_100": pytest.approx(fmean(curve)),
        "top": max(curve),
        "average": pytest.approx(fmean(curve)),
    }
    assert done.summary["mean_forgetting"] == pytest.approx(fmean(rows[t]["forgetting_by_model"] for t in (1, 3, 5)))
    assert done.summary["forgettable_examples"] == pytest.approx(
        fmean(rows[t]["forgettable_examples"] for t in (1, 3, 5))
    )
    assert done.summary["upload_bytes"] == sum(row["upload_bytes"] for row in rows)
    # 64·16 + 16 + 16·10 + 10 float32 numbers, to and from 4 clients in 7 rounds.
    assert done.summary["upload_bytes"] == done.summary["download_bytes"] == 7 * 4 * 4 * 1210


def test_the_model_is_the_one_that_was_measured(done: fr.Run) -> None:
    data = fr.load_dataset("digits")
    world = build_world(done.experiment)
    inputs = world.federation.normalise(world.federation.test.inputs)
    model = done.model()
    assert not model.training
    with torch.no_grad():
        answers = model(inputs).argmax(1).numpy()
    assert (answers == data.test.labels).mean() == done.metrics[-1]["test_accuracy"]


def test_forgetting_files_agree_with_the_metrics(done: fr.Run) -> None:
    rows = lines(done)
    assert sorted(p.name for p in (done.path / "forgetting").iterdir()) == [f"round-00000{t}.npz" for t in (2, 4, 6)]
    for t in (2, 4, 6):
        row = rows[t - 1]
        with np.load(done.path / "forgetting" / f"round-00000{t}.npz") as kept:
            again = client_forgetting(kept["before"], kept["after"], data=kept["data"], models=kept["models"])
            np.testing.assert_array_equal(kept["forgetting"], again.matrix)
            assert kept["models"].tolist() == kept["data"].tolist() == row["clients"]["id"]
            assert row["forgettable_examples"] == kept["forgettable_examples"].sum()
        assert row["forgetting_by_model"] == pytest.approx(again.by_model.mean())
        assert row["forgetting_by_data"] == pytest.approx(again.by_data.mean())
        assert row["clients"]["forgetting_by_model"] == pytest.approx(again.by_model.tolist())


def test_partition_file_is_what_training_used(done: fr.Run) -> None:
    world = build_world(done.experiment)
    with np.load(done.path / "partition.npz") as kept:
        held = [np.concatenate([kept[f"train_{k}"], kept[f"validation_{k}"]]) for k in range(10)]
        for k in range(10):
            np.testing.assert_array_equal(kept[f"train_{k}"], world.federation.train[k])
            np.testing.assert_array_equal(kept[f"validation_{k}"], world.federation.validation[k])
            counts = np.bincount(world.federation.labels[kept[f"train_{k}"]], minlength=10)
            np.testing.assert_array_equal(kept["class_counts"][k], counts)
    everything = np.concatenate(held)
    assert len(set(everything.tolist())) == len(everything), "no example twice"
    used = {k: n for row in lines(done) for k, n in zip(row["clients"]["id"], row["clients"]["examples"], strict=True)}
    assert all(n == world.federation.train.sizes[k] for k, n in used.items())


def test_config_and_environment(done: fr.Run) -> None:
    assert make_experiment(yaml.safe_load((done.path / "config.yaml").read_text())) == done.experiment
    environment = done.environment
    assert environment["fedretain"] == fr.__version__
    assert environment["packages"]["torch"] == torch.__version__
    assert environment["data"]["shape"] == [1, 8, 8]
    assert environment["data"]["fingerprint"] == fr.load_dataset("digits").fingerprint
    assert (done.path / "report.html").stat().st_size > 1000


def test_no_rounds_is_the_initial_model(tmp_path: Path, small: dict[str, Any]) -> None:
    run = fr.run({**small, "rounds": 0}, out=tmp_path / "run")
    assert len(run.metrics) == 0
    assert set(run.summary["final_accuracy"].values()) == {run.summary["initial_accuracy"]}
    assert run.summary["mean_forgetting"] is None
    initial = build_world(make_experiment(small)).model.state_dict()
    assert all(torch.equal(initial[name], value) for name, value in run.model().state_dict().items())


def test_the_same_experiment_gives_the_same_bits_whatever_ran_before(tmp_path: Path, small: dict[str, Any]) -> None:
    first = fr.run(small, out=tmp_path / "a")
    before = torch.get_rng_state()
    fr.run({**small, "seed": 5, "rounds": 1}, out=tmp_path / "b")
    second = fr.run(small, out=tmp_path / "c")
    assert torch.equal(before, torch.get_rng_state())
    for a, b in zip(first.model().state_dict().values(), second.model().state_dict().values(), strict=True):
        assert torch.equal(a, b)


def test_a_batch_at_or_above_a_client_is_one_full_batch(tmp_path: Path) -> None:
    """60 examples, 3 clients, 18 each for training: batch 18 and batch 1000 are the same single step per epoch."""
    given: dict[str, Any] = {"rounds": 2, "partition": {"kind": "iid", "clients": 3}, "forgetting": {"every": 0}}
    runs = [
        fr.run({**given, "local": {"batch_size": size, "epochs": 3}}, out=tmp_path / str(size), data=vectors())
        for size in (18, 1000)
    ]
    assert runs[0].metrics[0]["clients"]["steps"] == [3, 3, 3]
    assert runs[0].metrics["test_loss"] == runs[1].metrics["test_loss"]


def test_uniform_weights(tmp_path: Path) -> None:
    owners = np.repeat([0, 1, 2], [10, 20, 30])
    data = vectors(columns={"owner": (owners, owners[:20])})
    given: dict[str, Any] = {"rounds": 1, "partition": {"kind": "by_column", "column": "owner", "validation": 0.0}}
    for kind, weights in (("uniform", [1 / 3] * 3), ("examples", [1 / 6, 2 / 6, 3 / 6])):
        run = fr.run({**given, "server": {"weights": kind}}, out=tmp_path / kind, data=data)
        assert run.metrics[0]["clients"]["weight"] == pytest.approx(weights)


def test_default_directories_are_numbered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, small: dict[str, Any]
) -> None:
    monkeypatch.chdir(tmp_path)
    given = {**small, "rounds": 0}
    key = make_experiment(given).key
    assert [str(fr.run(given).path) for _ in range(2)] == [f"runs/small-{key}", f"runs/small-{key}-2"]
    assert str(fr.run(given, resume=True).path) == f"runs/small-{key}-2"


def test_watchers_see_every_round(tmp_path: Path, small: dict[str, Any]) -> None:
    seen: list[int] = []
    fr.run(small, out=tmp_path / "run", watch=lambda experiment, row: seen.append(row["round"]))
    assert seen == [1, 2, 3, 4, 5]


# ------------------------------------------------------------------ bad luck


@pytest.mark.parametrize(("clients", "examples"), [(10_001, 10_001), (1, 60), (60, 60)])
def test_ten_thousand_clients_with_one_example_and_one_client(clients: int, examples: int, tmp_path: Path) -> None:
    """With one example a client has no validation data, and with one client there are no others: no forgetting."""
    run = fr.run(
        {
            "rounds": 2,
            "participation": min(5, clients),
            "partition": {"kind": "iid", "clients": clients},
            "forgetting": {"every": 1},
        },
        out=tmp_path / "run",
        data=vectors(examples),
    )
    for row in lines(run):
        assert not {"forgetting_by_model", "forgetting_by_data"} & row.keys()
        assert set(row["clients"]["forgetting_by_model"]) == {None}
        assert "forgettable_examples" in row
    assert run.summary["mean_forgetting"] is None
    assert "NaN" not in (run.path / "summary.json").read_text()
    with np.load(run.path / "partition.npz") as kept:
        if clients > 2_000:
            assert kept["train_offsets"].tolist() == list(range(clients + 1))
            assert sorted(kept["train_indices"].tolist()) == list(range(examples))
        else:
            assert {f"train_{k}" for k in range(clients)} <= set(kept.files)


def test_no_validation_data_anywhere(tmp_path: Path, small: dict[str, Any]) -> None:
    small["partition"]["validation"] = 0.0
    run = fr.run({**small, "forgetting": {"every": 1, "clients": "all"}}, out=tmp_path / "run")
    assert all("forgetting_by_model" not in row for row in lines(run))


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"partition": {"kind": "iid", "clients": 61}}, PartitionError, "61 is more than the 60 examples"),
        ({"participation": 11}, ConfigError, "11 of only 10 clients; use 10 or fewer"),
        ({"participation": 0.01}, ConfigError, "selects nobody"),
        ({"local": {"batch_size": 50, "drop_last": True}}, ConfigError, "drop_last drops its only batch"),
        ({"device": "cuda:99"}, ConfigError, "device: there is no 'cuda:99' here"),
        ({"data": "mnits"}, ConfigError, "did you mean 'mnist'"),
        ({"data": {"name": "npz", "path": "nowhere.npz"}}, DataError, "nowhere.npz: no such file"),
        ({"data": {"name": "mnist", "root": "nowhere"}}, DataError, "there is no folder nowhere/mnist"),
        ({"partition": {"kind": "by_column", "column": "source"}}, DataError, "unknown column 'source'"),
        ({"model": "cnn"}, ConfigError, "feature vectors need the model 'mlp'"),
    ],
)
def test_refused_before_anything_is_written(
    changes: dict[str, Any], error: type[Exception], words: str, tmp_path: Path
) -> None:
    given = {"partition": {"kind": "iid", "clients": 10}, **changes}
    with pytest.raises(error) as refusal:
        fr.run(given, out=tmp_path / "run", data=None if "data" in changes else vectors())
    assert words in str(refusal.value)
    assert not (tmp_path / "run").exists()


def test_a_client_without_data_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A partition of one's own that leaves client 1 empty."""
    (tmp_path / "lopsided_partition.py").write_text(
        "import numpy as np\n"
        "def lopsided(labels, *, seed):\n"
        '    """All to client 0."""\n'
        "    return [np.arange(len(labels)), np.arange(0)]\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(PartitionError, match="client 1 has no examples"):
        fr.run({"partition": "lopsided_partition:lopsided"}, out=tmp_path / "run", data=vectors())


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"x_train": np.full((60, 4), np.nan, np.float32)}, "example 0 holds NaN or infinity"),
        ({"y_train": np.full(60, -1)}, "example 0 has label -1"),
        ({"y_train": np.full(60, 7), "class_names": ["a", "b"]}, "has label 7, but with 2 classes"),
        ({"y_train": np.zeros(59, int)}, "lengths differ"),
    ],
)
def test_broken_data_is_refused_with_the_example(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(DataError, match=words):
        vectors(**changes)


@pytest.mark.parametrize(
    ("changes", "words", "kept"),
    [
        ({"local": {"lr": 1e30}}, "round 1, client 2: training diverged", 0),
        ({"server": {"lr": 1e38}}, "round 1: training diverged: the aggregated model overflowed", 0),
        ({"server": {"lr": 1e40}, "evaluate": {"every": 0}}, "round 1: training diverged: the aggregated model", 0),
        ({"local": {"lr": 1e18, "steps": 1}}, "diverged", None),
    ],
)
def test_divergence_says_where_and_keeps_the_last_good_state(
    changes: dict[str, Any], words: str, kept: int | None, tmp_path: Path, small: dict[str, Any]
) -> None:
    with pytest.raises(TrainingError) as error:
        fr.run({**small, **changes}, out=tmp_path / "run")
    assert words in str(error.value)
    run = fr.Run(tmp_path / "run")
    lines(run)
    state = run.checkpoint().state
    assert state.round == len(run.metrics)
    assert kept is None or state.round == kept
    assert all(bool(value.isfinite().all()) for value in state.params.values())
    with pytest.raises(RunError, match=r"has no summary\.json: the run is not finished"):
        _ = run.summary


def test_what_is_no_run(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="no run directory"):
        fr.Run(tmp_path)


def test_processes_start_before_trackers(
    tmp_path: Path, small: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tracker may start threads, beside which this process cannot be copied. A finished run starts no process."""
    order: list[str] = []
    start = WorkersEngine.start
    monkeypatch.setattr(WorkersEngine, "start", lambda engine: (order.append("processes"), start(engine))[1])

    class Noting:
        def open(self, facts: fr.RunFacts) -> None:
            order.append("tracker")

        def log(self, row: Mapping[str, Any]) -> None:
            pass

        def close(self, summary: Mapping[str, Any] | None) -> None:
            pass

    given = {**small, "rounds": 1, "engine": {"name": "workers", "workers": 2}}
    fr.run(given, out=tmp_path, trackers=[Noting()])
    assert order[:2] == ["processes", "tracker"]
    order.clear()
    fr.run(given, out=tmp_path, resume=True, trackers=[Noting()])
    assert "processes" not in order
