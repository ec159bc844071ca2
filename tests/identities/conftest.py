"""Rounds to look into: a small federation with unequal clients, played in float64, every message kept."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
import torch

import fedretain
from fedretain.config import make_experiment
from fedretain.data import Dataset
from fedretain.engines import LoopEngine, Uploads, World
from fedretain.experiment import build_world
from fedretain.methods import Method, Received
from fedretain.rounds import initial_state, train_rounds
from fedretain.runs.checkpoint import Checkpoint
from fedretain.runs.metrics import Row
from fedretain.server import ServerState
from fedretain.tensors import Tensors

SIZES = (23, 17, 12, 9, 5)


@dataclass
class Played:
    """What happened: entry t − 1 of each list belongs to round t."""

    world: World
    start: ServerState
    ends: list[Checkpoint] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)
    received: list[Received] = field(default_factory=list)
    uploads: list[dict[int, Uploads]] = field(default_factory=list)

    @property
    def params(self) -> Tensors:
        """The last global model."""
        return self.ends[-1].state.params

    def states(self, rounds: int) -> dict[int, Tensors]:
        """What each client seen so far keeps after that many rounds."""
        latest = {k: upload.state for uploads in self.uploads[:rounds] for k, upload in uploads.items()}
        return {k: {name: value[0] for name, value in state.items()} for k, state in latest.items()}


@dataclass(frozen=True)
class Overheard:
    """The loop engine, and a note of everything that goes in and out."""

    engine: LoopEngine
    played: Played

    def train(
        self, received: Received, cohort: np.ndarray, states: Any, *, local_models: bool = True, **hints: Any
    ) -> Iterator[Uploads]:
        self.played.received.append(received)
        self.played.uploads.append({})
        for uploads in self.engine.train(received, cohort, states):
            self.played.uploads[-1][int(uploads.clients[0])] = uploads
            yield uploads


@pytest.fixture(scope="session")
def five_clients() -> Dataset:
    """Five clients of 23, 17, 12, 9 and 5 examples; six features, four classes, not all of them everywhere."""
    rng = np.random.default_rng(2)
    owners = np.repeat(np.arange(len(SIZES)), SIZES)
    labels = np.where(rng.random(len(owners)) < 0.6, owners % 4, rng.integers(0, 4, len(owners)))
    inputs = (rng.normal(size=(len(owners), 6)) + np.eye(4, 6)[labels]).astype(np.float32)
    names = owners.astype(str)
    return fedretain.from_arrays(inputs, labels, inputs, labels, columns={"owner": (names, names)})


@pytest.fixture(scope="session")
def settings() -> Callable[..., dict[str, Any]]:
    """The experiment that plays on them; keywords replace keys, ``local`` is merged."""

    def make(**keys: Any) -> dict[str, Any]:
        return {
            "rounds": 3,
            "data": {"name": "digits", "normalise": "unit"},
            "partition": {"kind": "by_column", "column": "owner", "validation": 0.0},
            "model": {"name": "mlp", "hidden": [5]},
            "precision": "float64",
            "evaluate": {"every": 0},
            "forgetting": {"every": 0},
            **keys,
            "local": {"lr": 0.2, "batch_size": 6, **keys.get("local", {})},
        }

    return make


@pytest.fixture(scope="session")
def play(five_clients: Dataset, settings: Callable[..., dict[str, Any]]) -> Callable[..., Played]:
    """Play the rounds of an experiment given by keywords; ``use`` is a method of the test's own."""

    def make(on: Dataset | None = None, use: Method | None = None, **keys: Any) -> Played:
        experiment = make_experiment(settings(**keys))
        world = build_world(experiment, on or five_clients)
        world = world if use is None else replace(world, method=use)
        played = Played(world, initial_state(experiment, world))
        engine = Overheard(LoopEngine(world), played)
        for end, row, _ in train_rounds(experiment, world, engine, Checkpoint(played.start, {}, {})):
            played.ends.append(end)
            played.rows.append(row)
        return played

    return make


@pytest.fixture(scope="session")
def assert_close() -> Callable[..., None]:
    """Two models agree to rounding; a relative error of 1e-12 is some thousand units in the last place of float64."""

    def check(actual: Tensors, expected: Tensors, *, rtol: float = 1e-12, atol: float = 1e-14) -> None:
        assert actual.keys() == expected.keys()
        for name, value in expected.items():
            assert actual[name].dtype == value.dtype
            torch.testing.assert_close(actual[name], value, rtol=rtol, atol=atol, msg=lambda m, n=name: f"{n}: {m}")

    return check


@pytest.fixture(scope="session")
def assert_same_bits() -> Callable[[Tensors, Tensors], None]:
    """Two models agree to the last bit."""

    def check(actual: Tensors, expected: Tensors) -> None:
        assert actual.keys() == expected.keys()
        assert [name for name, value in expected.items() if not torch.equal(actual[name], value)] == []

    return check
