"""The graphed engine gives what the loop engine gives; needs a CUDA device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.agreement.conftest import dataset
from tests.agreement.conftest import settings as uneven

import fedretain
from fedretain.config import make_experiment
from fedretain.engines.graphed import GraphedEngine
from fedretain.engines.loop import LoopEngine
from fedretain.errors import ConfigError
from fedretain.experiment import build_world

pytestmark = pytest.mark.usefixtures("without_tf32")
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
TOLERANCE = 2e-4
"""Float32 with other orders of summation, over two rounds of some ten steps."""

METHODS: list[Any] = [
    "fedavg",
    "fednova",
    "scaffold",
    {"name": "fedprox", "mu": 0.1},
    {"name": "fedcurv", "lam": 0.1},
    {"name": "fedreg", "gamma": 0.4, "eta_s": 0.01},
    {"name": "fedwavg", "alpha": 0.5},
]
LENET = {"name": "lenet"}


def settings(**changes: Any) -> dict[str, Any]:
    """Uneven clients, a partial last batch, float32 on the GPU."""
    local = {"lr": 0.05, **changes.pop("local", {})}
    return uneven(**{"precision": "float32", "device": "cuda", "local": local, **changes})


def images(side: int) -> fedretain.Dataset:
    """Random images whose class can be read off their mean."""
    return dataset(shape=(2, side, side))


def agree(trained: Callable[..., Any], given: dict[str, Any], side: int = 8, **options: Any) -> None:
    engines: list[GraphedEngine] = []

    def graphed(world: Any) -> GraphedEngine:
        engines.append(GraphedEngine(world, **{"compile_after": float("inf"), **options}))
        return engines[0]

    one = trained(graphed, given, images(side))
    other = trained(LoopEngine, given, images(side))
    assert not engines[0].plain, "the step was played, not replayed"
    for kind in ("params", "buffers", "server"):
        close(getattr(one, kind), getattr(other, kind))
    assert one.states.keys() == other.states.keys()
    for client, state in one.states.items():
        close(state, other.states[client])
    for a, b in zip(one.rows, other.rows, strict=True):
        assert a["train_loss"] == pytest.approx(b["train_loss"], rel=TOLERANCE, abs=TOLERANCE)
        assert a["clients"]["steps"] == b["clients"]["steps"]


def close(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    assert list(a) == list(b)
    for name, value in a.items():
        torch.testing.assert_close(value, b[name], rtol=TOLERANCE, atol=TOLERANCE, msg=lambda m, n=name: f"{n}: {m}")


@needs_cuda
@pytest.mark.parametrize("method", METHODS, ids=str)
@pytest.mark.parametrize(("model", "side"), [({"name": "mlp", "hidden": [8]}, 8), (LENET, 12)], ids=["mlp", "lenet"])
def test_methods(trained: Callable[..., Any], method: Any, model: Any, side: int) -> None:
    """Every method, on uneven clients: padded batches and clients that are done before others."""
    agree(trained, settings(method=method, model=model), side)


@needs_cuda
@pytest.mark.parametrize("loss", ["tce", "wsm", {"name": "fedrs", "alpha": 0.5}], ids=str)
def test_losses(trained: Callable[..., Any], loss: Any) -> None:
    """Losses that read a client's class counts."""
    agree(trained, settings(loss=loss, model=LENET), 12)


@needs_cuda
@pytest.mark.parametrize("local", [{"momentum": 0.9, "nesterov": True}, {"optimizer": "adam", "lr": 0.01}], ids=str)
def test_optimizers(trained: Callable[..., Any], local: dict[str, Any]) -> None:
    """Optimisers with memory, which starts fresh every round, and Adam's count of steps."""
    agree(trained, settings(local=local, model=LENET), 12)


@needs_cuda
@pytest.mark.parametrize(("norm", "precision"), [("batch", "float64"), ("group", "float32")])
def test_norms(trained: Callable[..., Any], norm: str, precision: str) -> None:
    """Strided, padded and 1 × 1 convolutions; running statistics of each client.

    Batch norm over a few pixels magnifies rounding ten million times here (1e-16 becomes 1e-9), hence float64.
    """
    model = {"name": "resnet18", "norm": norm, "width": 4}
    agree(trained, settings(model=model, local={"batch_size": 8, "lr": 0.01}, precision=precision), 16)


@needs_cuda
def test_augmentation_and_small_stacks(trained: Callable[..., Any]) -> None:
    """Crops and flips inside the graph; two clients at a time."""
    agree(trained, settings(model=LENET, local={"augment": "crop_flip"}), 12, at_once=2)


@needs_cuda
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize(
    "method", ["scaffold", {"name": "fedreg", "gamma": 0.4, "eta_s": 0.01, "ascent_steps": 6}], ids=str
)
def test_compiled(trained: Callable[..., Any], method: Any) -> None:
    """The same once the steps are compiled; of FedReg's ascent one turn is."""
    agree(trained, settings(model=LENET, method=method), 12, compile_after=0.0)


def test_refuses_a_cpu() -> None:
    """The engine says what it needs."""
    world = build_world(make_experiment(settings(device="cpu")), images(8))
    with pytest.raises(ConfigError, match="needs a CUDA device"):
        GraphedEngine(world)
