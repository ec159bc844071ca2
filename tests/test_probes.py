"""Probes against a slow, plain second implementation: one model, one client, one example after another."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from fedretain.config import make_experiment
from fedretain.data import Dataset, from_arrays
from fedretain.data.federation import Parts, build_federation
from fedretain.data.transforms import Normalise
from fedretain.engines import LoopEngine, Uploads, World
from fedretain.experiment import build_world
from fedretain.methods import Received
from fedretain.probes import ForgettingRecord, evaluate, measure_forgetting, measure_personalised
from fedretain.rounds import initial_state
from fedretain.server import ServerState, advance, example_weights, receive

COHORT = np.array([0, 2, 3, 5])


def tiny_data() -> Dataset:
    """Clients of 1, 9, 10, 15, 20 and 25 examples: with 10 % for validation the first two have none."""
    rng = np.random.default_rng(0)
    owners = np.repeat(np.arange(6), [1, 9, 10, 15, 20, 25])
    x, y = rng.normal(size=(80, 4)).astype(np.float32), rng.integers(0, 3, 80)
    x[:, 0] += 2 * y
    return from_arrays(x, y, x[:30], y[:30], columns={"owner": (owners, owners[:30])})


def one_round() -> tuple[World, Received, list[Uploads], ServerState]:
    given: dict[str, Any] = {
        "partition": {"kind": "by_column", "column": "owner", "validation": 0.1},
        "model": {"name": "mlp", "hidden": [5]},
        "local": {"lr": 0.5, "epochs": 3, "batch_size": 4},
        "precision": "float64",
    }
    experiment = make_experiment(given)
    world = build_world(experiment, tiny_data())
    state = initial_state(experiment, world)
    received = Received(state.params, state.buffers, {}, 1)
    uploads = list(LoopEngine(world).train(received, COHORT, lambda client: None))
    weights = example_weights(world.federation.train.sizes[COHORT], "examples", torch.zeros(1, dtype=torch.float64))
    reception, _ = receive(world.method, uploads, weights)
    optimizer = experiment.server.build_optimizer()
    after = advance(state, reception, received, world.method, optimizer, participants=4, population=6)
    return world, received, uploads, after


def right(world: World, params: dict[str, torch.Tensor], numbers: np.ndarray) -> list[bool]:
    """One example after another through the plain module."""
    world.model.load_state_dict(params)
    world.model.eval()
    answers = []
    with torch.no_grad():
        for number in numbers.tolist():
            inputs = world.federation.normalise(world.federation.inputs[number : number + 1])
            answers.append(int(world.model(inputs).argmax()) == int(world.federation.labels[number]))
    return answers


@pytest.mark.parametrize("everyone", [False, True])
@pytest.mark.parametrize("batch_size", [1, 7, 1000])
def test_forgetting_equals_the_slow_way(everyone: bool, batch_size: int) -> None:
    world, received, uploads, after = one_round()
    record = measure_forgetting(
        world, received, uploads, after, everyone=everyone, count_examples=True, batch_size=batch_size
    )
    data = list(range(6)) if everyone else COHORT.tolist()
    locals_ = [{n: v[0] for n, v in chunk.params.items()} for chunk in uploads]
    validation, train = world.federation.validation, world.federation.train
    assert [len(validation[k]) for k in range(6)] == [0, 0, 1, 1, 2, 2]

    def accuracy(params: dict[str, torch.Tensor], k: int) -> float:
        answers = right(world, params, validation[k])
        return sum(answers) / len(answers) if answers else float("nan")

    before = np.array([accuracy(received.params, k) for k in data])
    matrix = np.array([[accuracy(params, k) for params in locals_] for k in data])
    np.testing.assert_array_equal(record.before, before)
    np.testing.assert_array_equal(record.after, matrix)
    np.testing.assert_array_equal(record.clients.matrix, before[:, None] - matrix)
    for column, i in enumerate(COHORT.tolist()):
        others = [before[row] - matrix[row, column] for row, k in enumerate(data) if k != i and len(validation[k])]
        assert record.clients.by_model[column] == pytest.approx(np.mean(others))
    for row, k in enumerate(data):
        others = [before[row] - matrix[row, column] for column, i in enumerate(COHORT.tolist()) if i != k]
        assert record.clients.by_data[row] == pytest.approx(np.mean(others), nan_ok=True)
    assert record.forgettable is not None
    for column, i in enumerate(COHORT.tolist()):
        was, now = right(world, locals_[column], train[i]), right(world, after.params, train[i])
        assert record.forgettable[column] == sum(a and not b for a, b in zip(was, now, strict=True))
    assert record.examples.tolist() == [len(train[i]) for i in COHORT.tolist()]


def test_something_is_forgotten_in_this_world() -> None:
    """The comparison above would mean little if all were zero."""
    world, received, uploads, after = one_round()
    record: ForgettingRecord = measure_forgetting(
        world, received, uploads, after, everyone=True, count_examples=True, batch_size=10
    )
    assert np.nanmax(np.abs(record.clients.matrix)) > 0
    assert record.forgettable is not None
    assert record.forgettable.sum() > 0
    without = measure_forgetting(world, received, uploads, after, everyone=True, count_examples=False, batch_size=10)
    assert without.forgettable is None


@pytest.mark.parametrize("batch_size", [1, 7, 1000])
def test_evaluate_equals_a_direct_computation(batch_size: int) -> None:
    """Accuracy and mean −log softmax(f)_y over the test set, in float64."""
    world, received, _, _ = one_round()
    found = evaluate(world, received.params, received.buffers, batch_size)
    world.model.load_state_dict(received.params)
    inputs = world.federation.normalise(world.federation.test_inputs)
    with torch.no_grad():
        logits = world.model.eval()(inputs).numpy()
    labels = world.federation.test_labels.numpy()
    exact = np.log(np.exp(logits).sum(1)) - logits[np.arange(len(labels)), labels]
    assert found["test_accuracy"] == (logits.argmax(1) == labels).mean()
    assert found["test_loss"] == pytest.approx(exact.mean(), rel=1e-12)


def test_probes_leave_the_round_alone() -> None:
    world, received, uploads, after = one_round()
    tensors = [*received.params.values(), *after.params.values(), *(v for c in uploads for v in c.params.values())]
    copies = [value.clone() for value in tensors]
    measure_forgetting(world, received, uploads, after, everyone=True, count_examples=True, batch_size=10)
    evaluate(world, after.params, after.buffers, 10)
    assert all(torch.equal(a, b) for a, b in zip(tensors, copies, strict=True))


def test_personalised_accuracy_by_hand() -> None:
    """A linear model that shows its input as logits: f = x, three classes, two clients.

    Client a trained on classes 0, 0, 1 (β = ⅔, ⅓, 0) and is tested on x = (1, 1.5, 9), y = 1: plain says 2 (wrong);
    with log β the logits are 1 − 0.405 = 0.595, 1.5 − 1.099 = 0.401 and −∞, so it says 0 (wrong as well).
    Client b trained on classes 2, 2, 1 and is tested on x = (5, 0, 1), y = 2: plain says 0 (wrong); with log β −∞,
    −1.099 and 0.595, so it says 2 (right).
    """
    x = np.array([[0, 0, 0]] * 6 + [[1, 1.5, 9], [5, 0, 1]], dtype=np.float32)
    y = np.array([0, 0, 1, 2, 2, 1, 1, 2])
    data = from_arrays(x, y, x, y)
    given = {"partition": {"kind": "iid", "clients": 2}, "model": {"name": "mlp", "hidden": []}}
    experiment = make_experiment(given)
    normalise = Normalise.fit(data, "unit")
    federation = build_federation(
        data,
        Parts.of([np.array([0, 1, 2]), np.array([3, 4, 5])]),
        Parts.of([np.array([6]), np.array([7])]),
        normalise,
        device=torch.device("cpu"),
        dtype=torch.float32,
    )
    world = build_world(experiment, data)
    world = replace(world, federation=federation)
    state = initial_state(experiment, world)
    identity = {"classifier.weight": torch.eye(3), "classifier.bias": torch.zeros(3)}
    record = measure_personalised(world, state._replace(params=identity), batch_size=1)
    assert record.plain.tolist() == [0, 0]
    assert record.personalised.tolist() == [0, 1]
