"""Steps played from a recording are the loop engine's to the bit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from tests.agreement.conftest import Ended, dataset, settings
from torch import Tensor

from fedretain.config import make_experiment
from fedretain.engines import LoopEngine
from fedretain.engines.recorded import RecordedEngine, engines_for_all, recordable
from fedretain.experiment import build_world
from fedretain.methods import Method, Own, Received
from fedretain.tensors import Tensors

Trained = Callable[..., Ended]


def assert_same_bits(one: Ended, other: Ended) -> None:
    for name in ("params", "buffers", "server"):
        ours, theirs = getattr(one, name), getattr(other, name)
        assert list(ours) == list(theirs)
        assert all(torch.equal(value, theirs[key]) for key, value in ours.items()), name
    assert one.states.keys() == other.states.keys()
    for client, state in one.states.items():
        assert all(torch.equal(value, other.states[client][key]) for key, value in state.items())
    kept = [[{k: v for k, v in row.items() if "seconds" not in k} for row in ended.rows] for ended in (one, other)]
    assert kept[0] == kept[1]


def compared(trained: Trained, given: dict[str, Any], data: Any = None) -> None:
    """In single precision; and something must have been played."""
    given = {**given, "precision": "float32"}
    engines: list[RecordedEngine] = []

    def recorded(world: Any) -> RecordedEngine:
        engines.append(RecordedEngine(world))
        return engines[-1]

    assert_same_bits(trained(LoopEngine, given, data), trained(recorded, given, data))
    assert engines[0].recordings


FULL = {"epochs": None, "steps": 4, "batch_size": 5}
"""One shape of batch, so that one recording serves all clients."""


@pytest.mark.parametrize(
    "method",
    [
        "fedavg",
        {"name": "fedprox", "mu": 0.3},
        {"name": "scaffold", "option": "I"},
        "fednova",
        {"name": "fedcurv", "lam": 0.01},
        {"name": "fedwavg", "alpha": 0.5, "freeze_classifier": True},
        [{"name": "fedprox", "mu": 0.3}, {"name": "scaffold", "option": "II"}, {"name": "fedwavg", "alpha": 0.3}],
    ],
    ids=str,
)
def test_methods(method: Any, trained: Trained) -> None:
    """Even clients of sixteen: a hook that may read a client's data is recorded for their size."""
    given = settings(method=method, loss="wsm", participation=3, local=FULL)
    given["partition"] = {"kind": "iid", "clients": 6, "validation": 0.0}
    compared(trained, given)


@pytest.mark.parametrize("loss", ["ce", "tce", "wsm", "fedrs", "fedlc", "balanced", "ce_floor"])
def test_losses_with_partial_batches(loss: str, trained: Trained) -> None:
    compared(trained, settings(loss=loss))


@pytest.mark.parametrize(
    "local",
    [
        {"momentum": 0.9},
        {"momentum": 0.9, "nesterov": True, "weight_decay": 0.01},
        {"optimizer": "adam", "lr": 0.01, "weight_decay": 0.01},
        {"optimizer": "adamw", "lr": 0.01, "weight_decay": 0.1},
        {"lr_decay": 0.3},
        {"augment": "crop_flip"},
    ],
    ids=str,
)
def test_optimisers(local: dict[str, Any], trained: Trained) -> None:
    compared(trained, settings(local={**FULL, **local}))


@pytest.mark.parametrize("model", ["lenet", "fedavg_cnn"])
def test_models_with_pooling(model: str, trained: Trained) -> None:
    """Maxima of slices in place of max-pooling: the same bits forward and backward, after ReLU with its many ties."""
    given = settings(model=model, rounds=1, participation=2, local=FULL)
    compared(trained, given, dataset(40, (1, 16, 16)))


@dataclass(frozen=True)
class Fading(Method):
    """A direction that fades with the rounds."""

    def direction(self, gradient: Tensors, params: Tensors, received: Received, own: Own) -> Tensors:
        return {name: value / received.round for name, value in gradient.items()}


def test_a_hook_that_reads_the_round(trained: Trained) -> None:
    """It is recorded afresh and not kept."""
    given = settings(rounds=3, participation=2, method=Fading(), local=FULL, precision="float32")
    assert_same_bits(trained(LoopEngine, given), trained(RecordedEngine, given))


class Pooled(torch.nn.Module):
    """Max-pooling that rounds up: its windows are not all 2 × 2."""

    def __init__(self, shape: tuple[int, int, int], classes: int) -> None:
        super().__init__()
        self.layer = torch.nn.Conv2d(shape[0], 3, 2)
        self.pool = torch.nn.MaxPool2d(2, ceil_mode=True)
        self.classifier = torch.nn.Linear(3 * 16, classes)

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.classifier(self.pool(self.layer(images)).flatten(1))
        return logits


def test_other_kinds_of_pooling_are_left_alone(trained: Trained) -> None:
    compared(trained, settings(model={"name": f"{__name__}:Pooled"}, rounds=1, participation=2, local=FULL))


def test_what_is_not_recorded() -> None:
    """Running statistics and a step of the method's own are left to the loop engine."""
    for model, method, expected in (
        ("mlp", "fedavg", True),
        ({"name": "resnet18", "width": 1}, "fedavg", False),
        ("mlp", {"name": "fedreg", "gamma": 0.4, "eta_s": 0.1}, False),
    ):
        experiment = make_experiment(settings(model=model, method=method))
        assert recordable(build_world(experiment, dataset())) is expected


def test_experiments_share_the_recordings_of_like_steps(trained: Trained) -> None:
    """Seeds and rates are given to a step; another loss, momentum or a method's number makes another step.

    Played from the recordings of another experiment, a step still has the bits of the loop engine.
    """
    changes: list[dict[str, Any]] = [
        {},
        {"seed": 1, "local": {"lr": 0.03}},
        {"loss": "wsm"},
        {"local": {"momentum": 0.9}},
        {"method": {"name": "fedprox", "mu": 0.1}},
        {"method": {"name": "fedprox", "mu": 0.2}},
        {"model": {"name": "mlp", "hidden": [5]}},
    ]
    given = [settings(**{**change, "local": {**FULL, **change.get("local", {})}}) for change in changes]
    engines = engines_for_all([build_world(make_experiment(one), dataset()) for one in given], exact=True)
    assert [[a.recordings is b.recordings for b in engines].index(True) for a in engines] == [0, 0, 2, 3, 4, 5, 6]
    assert engines[1].world.seed == 1
    trained(lambda world: replace(engines[0], world=world), given[0])
    recordings = dict(engines[1].recordings)
    shared = trained(lambda world: replace(engines[1], world=world), given[1])
    assert recordings
    assert recordings.items() <= engines[1].recordings.items()
    assert_same_bits(trained(LoopEngine, given[1]), shared)


def test_a_step_of_its_own_runs_as_in_the_loop(trained: Trained) -> None:
    given = settings(rounds=1, method={"name": "fedreg", "gamma": 0.4, "eta_s": 0.1}, local=FULL)
    assert_same_bits(trained(LoopEngine, given), trained(RecordedEngine, given))
