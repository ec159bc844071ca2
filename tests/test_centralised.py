"""Centralised example forgetting against plain PyTorch: a module, an optimiser, and a list of answers."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fedretain
from fedretain.centralised import centralised_forgetting
from fedretain.config import expand_variants, make_experiment
from fedretain.config.reading import read_yaml
from fedretain.data import Dataset, from_arrays
from fedretain.engines.schedule import local_batches
from fedretain.errors import ConfigError, TrainingError
from fedretain.experiment import build_world

TABLE_1 = Path(__file__).parents[1] / "examples" / "forgetting-table1.yaml"


def noisy_data() -> Dataset:
    """Three overlapping classes, and labels that are partly wrong: something is always forgotten."""
    rng = np.random.default_rng(0)
    y = rng.integers(0, 3, 60)
    x = (rng.normal(size=(60, 4)) + 1.5 * np.eye(3, 4)[y]).astype(np.float32)
    y[:8] = rng.integers(0, 3, 8)
    return from_arrays(x, y, x[:20], y[:20])


def settings(**local: Any) -> dict[str, Any]:
    return {
        "rounds": 4,
        "partition": {"kind": "iid", "clients": 3, "validation": 0.1},
        "model": {"name": "mlp", "hidden": [8]},
        "local": {"optimizer": "adam", "lr": 0.05, "epochs": 3, "batch_size": 7, **local},
        "precision": "float64",
    }


def test_equals_plain_training() -> None:
    """4 rounds of 3 epochs are 12 epochs of one Adam, whose moments are never reset, on the 54 training examples.

    The slow way: a module, torch.optim, and for each example the list of its errors as its batches came by.
    """
    experiment = make_experiment(settings())
    data = noisy_data()
    found = centralised_forgetting(experiment, build_world(experiment, data))

    world = build_world(experiment, data)
    federation, model = world.federation, world.model
    union = sorted(number for client in range(3) for number in federation.train[client].tolist())
    assert found.examples.tolist() == union
    assert len(union) == 54
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    margins: dict[int, list[float]] = {number: [] for number in union}
    batches = [at for round in range(1, 5) for at in local_batches(experiment.seed, round, 0, 54, experiment.local)]
    assert len(batches) == 12 * 8
    for batch in batches:
        numbers = [union[position] for position in batch.tolist()]
        inputs, labels = federation.examples(np.array(numbers))
        logits = model.train()(inputs)
        for number, row, label in zip(numbers, logits.detach().numpy(), labels.tolist(), strict=True):
            margins[number].append(float(max(f for c, f in enumerate(row) if c != label) - row[label]))
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(logits, labels).backward()
        optimizer.step()
    assert all(len(history) == 12 for history in margins.values())

    def events(errors: list[float]) -> int:
        return sum(b > a for a, b in pairwise(errors))

    expected = [events([float(margin > 0) for margin in margins[n]]) for n in union]
    assert found.events.tolist() == expected
    assert sum(expected) > 0
    assert found.margin_events.tolist() == [events(margins[n]) for n in union]
    with torch.no_grad():
        answers = model.eval()(federation.normalise(federation.test.inputs)).argmax(-1)
    assert found.test_accuracy == (answers == federation.test.labels).double().mean().item()


def test_events_by_hand(tmp_path: Path) -> None:
    """Two examples with the same input x = 1 and opposite labels, one in each batch: each step unlearns the other.

    With z = f_1 − f_0 a step of η = 100 on label y moves z by 4 · 100 · σ(∓z) towards y: past zero whatever z was. So
    the model says the label of the example that it saw last, and an example is right only if it comes twice in a row,
    at the end of one epoch and the start of the next. An event is a wrong sight after a right one. The order of each
    epoch is drawn, the rule is followed through it by hand.
    """
    x, y = np.ones((2, 1), dtype=np.float32), np.array([0, 1])
    given = {
        "rounds": 6,
        "partition": {"kind": "iid", "clients": 1, "validation": 0.0},
        "data": {"normalise": "unit"},
        "model": {"name": "mlp", "hidden": []},
        "local": {"lr": 100.0, "epochs": 1, "batch_size": 1},
        "training": "centralised",
        "forgetting": {"every": 1},
        "precision": "float64",
    }
    run = fedretain.run(given, data=from_arrays(x, y, x, y), out=tmp_path / "run")
    world = build_world(run.experiment, from_arrays(x, y, x, y))
    with torch.no_grad():
        said = int(world.model(torch.ones(1, 1, 1, 1, dtype=torch.float64)).argmax())
    right_before: dict[int, bool] = {}
    expected = []
    for round in range(1, 7):
        count = 0
        for (example,) in (at.tolist() for at in local_batches(0, round, 0, 2, run.experiment.local)):
            right = said == y[example]
            count += right_before.get(example, False) and not right
            right_before[example], said = right, int(y[example])
        expected.append(count)
    assert run.metrics["forgettable_examples"] == expected
    assert sum(expected) > 0
    assert run.summary["forgetting_events"] == sum(expected)


def test_the_world_is_left_as_it_was() -> None:
    experiment = make_experiment(settings())
    world = build_world(experiment, noisy_data())
    before = {name: value.clone() for name, value in world.model.state_dict().items()}
    first = centralised_forgetting(experiment, world)
    assert all(torch.equal(value, before[name]) for name, value in world.model.state_dict().items())
    assert centralised_forgetting(experiment, world).events.tolist() == first.events.tolist()


@pytest.mark.parametrize(
    ("given", "key"),
    [
        ({**settings(), "rounds": 0}, "rounds"),
        ({**settings(), "local": {"steps": 5}}, "local.steps"),
    ],
)
def test_settings_without_an_ordinary_counterpart_are_refused(given: dict[str, Any], key: str) -> None:
    experiment = make_experiment(given)
    with pytest.raises(ConfigError, match=f"^{key}: "):
        centralised_forgetting(experiment, build_world(experiment, noisy_data()))


def test_steps_are_refused_before_anything_is_written(tmp_path: Path) -> None:
    given = {**settings(), "local": {"steps": 5}, "training": "centralised"}
    with pytest.raises(ConfigError, match=r"^local\.steps: "):
        fedretain.run(given, data=noisy_data(), out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_diverging_model_stops_with_its_round(tmp_path: Path) -> None:
    given = {**settings(lr=1e300), "training": "centralised"}
    with pytest.raises(TrainingError, match=r"^round 1: training diverged"):
        fedretain.run(given, data=noisy_data(), out=tmp_path / "run")


def test_a_run_is_the_function_round_by_round(tmp_path: Path) -> None:
    given = {**settings(augment="none"), "training": "centralised", "forgetting": {"every": 1}}
    run = fedretain.run(given, data=noisy_data(), out=tmp_path / "run")
    found = centralised_forgetting(run.experiment, build_world(run.experiment, noisy_data()))
    assert sum(run.metrics["forgettable_examples"]) == run.summary["forgetting_events"] == found.events.sum()
    assert sum(run.metrics["margin_events"]) == found.margin_events.sum()
    assert run.summary["final_accuracy"]["last"] == found.test_accuracy
    assert run.summary["upload_bytes"] == run.summary["download_bytes"] == 0
    with np.load(run.path / "events" / "round-000004.npz") as record:
        np.testing.assert_array_equal(record["examples"], found.examples)
        np.testing.assert_array_equal(record["events"], found.events)
        np.testing.assert_array_equal(record["margin_events"], found.margin_events)
    assert fedretain.Run(run.path).model() is not None
    assert (run.path / "report.html").exists()


def test_only_due_rounds_are_counted(tmp_path: Path) -> None:
    """Every second round, as in federated runs; what an example was when last seen is followed all the same."""
    whole = {**settings(), "training": "centralised", "forgetting": {"every": 1}}
    every = fedretain.run(whole, data=noisy_data(), out=tmp_path / "every").metrics["forgettable_examples"]
    some = fedretain.run({**whole, "forgetting": {"every": 2}}, data=noisy_data(), out=tmp_path / "some").metrics
    assert some["forgettable_examples"] == [None, every[1], None, every[3]]
    none = fedretain.run(
        {**whole, "forgetting": {"every": 1, "examples": False}}, data=noisy_data(), out=tmp_path / "none"
    )
    assert none.summary["forgetting_events"] is None
    assert not (none.path / "events").exists()


@pytest.mark.parametrize("local", [{"optimizer": "adam"}, {"optimizer": "sgd", "momentum": 0.9, "lr_decay": 0.9}])
def test_an_interrupted_run_goes_on_to_the_same_bits(tmp_path: Path, local: dict[str, Any]) -> None:
    """Moments, learning rate, batches and what was right when last seen all cross the interruption."""
    given = {**settings(**local), "training": "centralised", "forgetting": {"every": 1}}
    whole = fedretain.run(given, data=noisy_data(), out=tmp_path / "whole")
    fedretain.run({**given, "rounds": 2}, data=noisy_data(), out=tmp_path / "cut")
    cut = fedretain.run(given, data=noisy_data(), out=tmp_path / "cut", resume=True)

    def numbers(run: fedretain.Run) -> list[dict[str, Any]]:
        return [{k: v for k, v in row.items() if "seconds" not in k} for row in run.metrics]

    assert numbers(cut) == numbers(whole)
    ours, theirs = whole.checkpoint().state, cut.checkpoint().state
    for section in ("params", "server", "optimizer"):
        a, b = getattr(ours, section), getattr(theirs, section)
        assert a.keys() == b.keys()
        assert all(torch.equal(a[name], b[name]) for name in a)


def test_augmented_batches_are_trained_on(tmp_path: Path) -> None:
    base = {"rounds": 1, "partition": {"kind": "iid", "clients": 2}, "training": "centralised"}
    plain = fedretain.run({**base, "local": {"lr": 0.01}}, out=tmp_path / "plain")
    moved = fedretain.run({**base, "local": {"lr": 0.01, "augment": "crop_flip"}}, out=tmp_path / "moved")
    assert plain.metrics[-1]["train_loss"] != moved.metrics[-1]["train_loss"]


def test_the_experiment_file_of_the_comparison_has_the_settings_of_the_paper() -> None:
    """Table 1: 5 clients, 40 rounds of 5 epochs, DenseNet-121; every round counted, on all the training data."""
    variants = expand_variants(read_yaml(TABLE_1))
    assert [(variant.experiment.data.name, variant.experiment.training) for variant in variants] == [
        (data, training) for data in ("mnist", "fashion_mnist", "cifar10") for training in ("centralised", "federated")
    ]
    for variant in variants:
        experiment = variant.experiment
        assert (experiment.rounds, experiment.local.epochs, experiment.model.name) == (40, 5.0, "densenet121")
        assert (experiment.partition.parameters["clients"], experiment.partition.validation) == (5, 0.0)
        assert (experiment.forgetting.every, experiment.forgetting.examples) == (1, True)
        assert experiment.method[0].name == "fedavg"


def test_one_comparison_gives_both_rows_of_the_table(tmp_path: Path) -> None:
    """The file's settings on small data: both counts, their ratio, and both runs in the same table and report."""
    given = {
        **read_yaml(TABLE_1),
        "rounds": 3,
        "model": {"name": "mlp", "hidden": [8]},
        "variants": {"training": ["centralised", "federated"]},
    }
    comparison = fedretain.compare(given, data=noisy_data(), out=tmp_path)
    assert [row["label"] for row in comparison.rows] == ["training=centralised", "training=federated"]
    totals = {name: sum(run.metrics["forgettable_examples"]) for name, run in comparison.runs.items()}
    (pair,) = comparison.training_pairs
    assert pair.centralised.mean == totals["training=centralised"] > 0
    assert pair.federated.mean == totals["training=federated"]
    assert pair.increase == pytest.approx(100 * (pair.federated.mean / pair.centralised.mean - 1))
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "Forgetting events, centralised and federated" in page
    assert pair.texts[2] in page
