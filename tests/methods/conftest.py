"""Two clients and a linear model with two classes: small enough to work a round out by hand.

By symmetry the second row of the weights and the second bias are always minus the first, so a model is written as
(u, v; b): u and v the first row, b the first bias. The logits of x differ by 2·(u·x₁ + v·x₂ + b); where that is ln 3
the softmax is (¾, ¼). An example (x, y) has the gradient (p₀ − [y = 0])·(x₁, x₂; 1).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

import fedretain
from fedretain.config import make_experiment
from fedretain.engines import LoopEngine
from fedretain.experiment import build_world
from fedretain.rounds import initial_state, train_rounds
from fedretain.runs.checkpoint import Checkpoint
from fedretain.runs.clients import ClientStore
from fedretain.runs.metrics import Row
from fedretain.tensors import Tensors

Examples = Sequence[tuple[tuple[float, float], int]]


class Ended(NamedTuple):
    """Where the last round ended."""

    params: Tensors
    server: Tensors
    clients: dict[int, Tensors]
    rows: list[Row]


@pytest.fixture(scope="session")
def model() -> Callable[[float, float, float], Tensors]:
    """(u, v; b) written out."""

    def make(u: float, v: float, b: float) -> Tensors:
        weight = torch.tensor([[u, v], [-u, -v]], dtype=torch.float64)
        return {"classifier.weight": weight, "classifier.bias": torch.tensor([b, -b], dtype=torch.float64)}

    return make


@pytest.fixture(scope="session")
def play(model: Callable[[float, float, float], Tensors]) -> Callable[..., Ended]:
    """Rounds of an experiment on the examples of client a and client b, from (u, v; b), in float64."""

    def make(a: Examples, b: Examples, start: tuple[float, float, float] = (0, 0, 0), **keys: Any) -> Ended:
        inputs = np.array([x for x, _ in (*a, *b)], dtype=np.float32)
        labels = np.array([y for _, y in (*a, *b)])
        owners = np.array(["a"] * len(a) + ["b"] * len(b))
        data = fedretain.from_arrays(
            inputs, labels, inputs, labels, class_names=["0", "1"], columns={"owner": (owners, owners)}
        )
        experiment = make_experiment(
            {
                "rounds": 1,
                "data": {"name": "digits", "normalise": "unit"},
                "partition": {"kind": "by_column", "column": "owner", "validation": 0.0},
                "model": {"name": "mlp", "hidden": []},
                "precision": "float64",
                "forgetting": {"every": 0},
                **keys,
                "local": {"steps": 1, "batch_size": 100, **keys["local"]},
            }
        )
        world = build_world(experiment, data)
        state = initial_state(experiment, world)._replace(params=model(*start))
        store = ClientStore()
        rounds = list(train_rounds(experiment, world, LoopEngine(world), Checkpoint(state, {}, {}), store))
        end = rounds[-1][0]
        kept = {k: store.read((k, version), world.federation.inputs) for k, version in end.clients.items()}
        return Ended(end.state.params, end.state.server, kept, [row for _, row, _ in rounds])

    return make


@pytest.fixture(scope="session")
def assert_close() -> Callable[[Tensors, Tensors], None]:
    """Equal to rounding in float64."""

    def check(actual: Tensors, expected: Tensors) -> None:
        assert actual.keys() == expected.keys()
        for name, value in expected.items():
            torch.testing.assert_close(actual[name], value, rtol=1e-13, atol=1e-14, msg=lambda m, n=name: f"{n}: {m}")

    return check


@pytest.fixture(scope="session")
def refused() -> Callable[..., str]:
    """The message with which an experiment is refused."""

    def message(**keys: Any) -> str:
        with pytest.raises(fedretain.FedretainError) as caught:
            make_experiment(keys).build_method()
        return str(caught.value)

    return message
