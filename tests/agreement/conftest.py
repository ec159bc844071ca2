"""Small uneven federations, and a run of a few rounds on a given engine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import fedretain
from fedretain.config import make_experiment
from fedretain.engines import Engine, World
from fedretain.experiment import build_world
from fedretain.randomness import stream
from fedretain.rounds import initial_state, train_rounds
from fedretain.runs.checkpoint import Checkpoint
from fedretain.runs.clients import ClientStore
from fedretain.tensors import Tensors

IMAGES = (2, 8, 8)
CLASSES = 4


def dataset(examples: int = 96, shape: tuple[int, int, int] = IMAGES) -> fedretain.Dataset:
    """Random images whose class can be read off their mean, so that training does something."""
    rng = stream(7, "agreement data")
    labels = rng.integers(0, CLASSES, examples)
    labels[:CLASSES] = np.arange(CLASSES)
    inputs = rng.normal(labels[:, None, None, None] / CLASSES, 0.5, (examples, *shape)).astype(np.float32)
    return fedretain.from_arrays(inputs, labels, inputs[:16], labels[:16])


BY_OWNER = {"kind": "by_column", "column": "owner", "validation": 0.0}


def owned(sizes: list[int], shape: tuple[int, int, int] = IMAGES) -> fedretain.Dataset:
    """The same, held by clients of these sizes where the partition is ``BY_OWNER``."""
    data = dataset(sum(sizes), shape)
    train, test = data.train, data.test
    owners = np.repeat(np.arange(len(sizes)), sizes)
    columns = {"owner": (owners, owners[: len(test.labels)])}
    return fedretain.from_arrays(train.inputs, train.labels, test.inputs, test.labels, columns=columns)


def settings(**changes: Any) -> dict[str, Any]:
    """Uneven clients (Dirichlet by class), batches with a partial last one, float64."""
    given: dict[str, Any] = {
        "rounds": 2,
        "participation": 5,
        "partition": {"kind": "dirichlet_by_class", "clients": 6, "alpha": 0.8, "validation": 0.1, "minimum": 4},
        "data": {"normalise": "unit"},
        "model": {"name": "mlp", "hidden": [8]},
        "local": {"lr": 0.1, "epochs": 2, "batch_size": 5},
        "evaluate": {"every": 0},
        "forgetting": {"every": 0},
        "precision": "float64",
        "device": "cpu",
    }
    for key, value in changes.items():
        given[key] = {**given[key], **value} if key in ("local", "partition") else value
    return given


class Ended:
    """Where a few rounds ended."""

    def __init__(self, params: Tensors, buffers: Tensors, server: Tensors, states: dict[int, Tensors], rows: Any):
        self.params, self.buffers, self.server, self.states, self.rows = params, buffers, server, states, rows


@pytest.fixture
def trained() -> Callable[..., Ended]:
    def train(engine: Callable[[World], Engine], given: dict[str, Any], data: fedretain.Dataset | None = None) -> Ended:
        experiment = make_experiment(given)
        world = build_world(experiment, dataset() if data is None else data)
        store = ClientStore()
        start = Checkpoint(initial_state(experiment, world), {}, {})
        ends = list(train_rounds(experiment, world, engine(world), start, store))
        rows, reached = [end.row for end in ends], ends[-1].reached
        state = reached.state
        like = next(iter(state.params.values()))
        states = {client: store.read((client, round), like) for client, round in reached.clients.items()}
        return Ended(state.params, state.buffers, state.server, states, rows)

    return train


def assert_agree(one: Ended, other: Ended, tolerance: float = 1e-9) -> None:
    """Parameters, running statistics, server and client states, losses, weights and traffic are the same."""
    for name in ("params", "buffers", "server"):
        assert_close(getattr(one, name), getattr(other, name), tolerance)
    assert one.states.keys() == other.states.keys()
    for client, state in one.states.items():
        assert_close(state, other.states[client], tolerance)
    for a, b in zip(one.rows, other.rows, strict=True):
        assert a["upload_bytes"] == b["upload_bytes"]
        assert a["download_bytes"] == b["download_bytes"]
        assert a["train_loss"] == pytest.approx(b["train_loss"], rel=tolerance, abs=tolerance)
        for key in ("id", "examples", "steps"):
            assert a["clients"][key] == b["clients"][key]
        for key in ("weight", "train_loss"):
            assert a["clients"][key] == pytest.approx(b["clients"][key], rel=tolerance, abs=tolerance)


def assert_close(a: Tensors, b: Tensors, tolerance: float) -> None:
    assert list(a) == list(b)
    for name, value in a.items():
        assert value.shape == b[name].shape, name
        assert value.dtype == b[name].dtype, name
        torch.testing.assert_close(value, b[name], rtol=tolerance, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}")
