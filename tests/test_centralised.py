"""Centralised example forgetting against plain PyTorch: a module, an optimiser, and a list of answers."""

from __future__ import annotations

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
from fedretain.errors import ConfigError
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


@pytest.mark.parametrize("criterion", ["correct", "margin"])
def test_equals_plain_training(criterion) -> None:
    """4 rounds of 3 epochs are 12 epochs of one Adam, whose moments are never reset, on the 54 training examples."""
    experiment = make_experiment(settings())
    data = noisy_data()
    found = centralised_forgetting(experiment, build_world(experiment, data), criterion=criterion)

    world = build_world(experiment, data)
    federation, model = world.federation, world.model
    union = sorted(number for client in range(3) for number in federation.train[client].tolist())
    assert found.examples.tolist() == union
    assert len(union) == 54
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    errors: dict[int, list[float]] = {number: [] for number in union}
    long = experiment.local.model_copy(update={"epochs": 12.0})
    batches = local_batches(experiment.seed, 1, 0, 54, long)
    assert len(batches) == 12 * 8
    for batch in batches:
        numbers = [union[position] for position in batch.tolist()]
        inputs, labels = federation.examples(np.array(numbers))
        logits = model.train()(inputs)
        for number, row, label in zip(numbers, logits.detach().numpy(), labels.tolist(), strict=True):
            margin = max(f for c, f in enumerate(row) if c != label) - row[label]
            errors[number].append(float(margin) if criterion == "margin" else float(margin > 0))
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(logits, labels).backward()
        optimizer.step()
    assert all(len(history) == 12 for history in errors.values())
    expected = [sum(b > a for a, b in zip(errors[n][:-1], errors[n][1:], strict=True)) for n in union]
    assert found.events.tolist() == expected
    assert sum(expected) > 0
    with torch.no_grad():
        answers = model.eval()(federation.normalise(federation.test_inputs)).argmax(-1)
    assert found.test_accuracy == (answers == federation.test_labels).double().mean().item()


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
        (settings(lr_decay=0.9), "local.lr_decay"),
    ],
)
def test_settings_without_an_ordinary_counterpart_are_refused(given: dict[str, Any], key: str) -> None:
    experiment = make_experiment(given)
    with pytest.raises(ConfigError, match=f"^{key}: "):
        centralised_forgetting(experiment, build_world(experiment, noisy_data()))


def test_the_experiment_file_of_the_comparison_has_the_settings_of_the_paper() -> None:
    """Table 1: 5 clients, 40 rounds of 5 epochs, DenseNet-121; every round counted, on all the training data."""
    variants = expand_variants(read_yaml(TABLE_1))
    assert [variant.experiment.data.name for variant in variants] == ["mnist", "fashion_mnist", "cifar10"]
    for variant in variants:
        experiment = variant.experiment
        assert (experiment.rounds, experiment.local.epochs, experiment.model.name) == (40, 5.0, "densenet121")
        assert (experiment.partition.parameters["clients"], experiment.partition.validation) == (5, 0.0)
        assert (experiment.forgetting.every, experiment.forgetting.examples) == (1, True)
        assert experiment.method[0].name == "fedavg"


def test_both_sides_of_the_comparison_come_from_one_experiment(tmp_path: Path) -> None:
    """The file's settings on small data: the union is all 60 examples, and every round has its federated count."""
    given = {**read_yaml(TABLE_1), "rounds": 3, "model": {"name": "mlp", "hidden": [8]}, "variants": None}
    experiment = make_experiment(given)
    found = centralised_forgetting(experiment, build_world(experiment, noisy_data()))
    assert found.examples.tolist() == list(range(60))
    run = fedretain.run(experiment, data=noisy_data(), out=tmp_path / "federated")
    assert all(0 <= count <= 60 for count in run.metrics["forgettable_examples"])
    assert len(run.metrics["forgettable_examples"]) == 3
