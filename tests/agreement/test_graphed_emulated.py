"""The graphed engine without a GPU: everything but CUDA itself and the kernels, against the loop engine.

A captured step is called again in place of being replayed, and the client-batched convolutions are PyTorch's own.
"""

from __future__ import annotations

import contextlib
import shutil
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.agreement.conftest import Ended, assert_agree, dataset, settings
from torch import Tensor, fx
from torch.nn import functional as F

from fedretain.engines import captured, convolution, folding, graphed, rolling
from fedretain.engines.graphed import GraphedEngine
from fedretain.engines.loop import LoopEngine

LENET = {"name": "lenet"}
Trained = Callable[..., Ended]


class Stream:
    """Nothing to wait for."""

    def wait_stream(self, other: Any) -> None:
        """At once."""


class Again:
    """Stands for a CUDA graph: capturing runs the function once, a replay once more."""

    def __init__(self, function: Callable[[], None], pool: Any) -> None:
        function()
        self.function = function

    def __call__(self) -> None:
        self.function()


@convolution.convolve.register_kernel("cpu")
def _convolve(x: Tensor, w: Tensor, stride: int, padding: Sequence[int], clients: int) -> Tensor:
    return _last(F.conv2d(x, w, None, stride, list(padding), 1, clients))


@convolution.input_gradient.register_kernel("cpu")
def _input_gradient(
    d: Tensor, w: Tensor, size: Sequence[int], stride: int, padding: Sequence[int], clients: int
) -> Tensor:
    shape = [len(d), clients * w.shape[1], *size]
    return _last(torch.nn.grad.conv2d_input(shape, w, d, stride, list(padding), 1, clients))


@convolution.weight_gradient.register_kernel("cpu")
def _weight_gradient(
    d: Tensor, x: Tensor, taps: Sequence[int], stride: int, padding: Sequence[int], clients: int
) -> Tensor:
    shape = [d.shape[1], x.shape[1] // clients, *taps]
    return _last(torch.nn.grad.conv2d_weight(x, shape, d, stride, list(padding), 1, clients))


@folding.folded_convolve.register_kernel("cpu")
def _folded_convolve(x: Tensor, w: Tensor, padding: Sequence[int]) -> Tensor:
    return torch.stack([F.conv2d(maps, taps, None, 1, list(padding)) for maps, taps in zip(x, w, strict=True)])


@folding.folded_weight_gradient.register_kernel("cpu")
def _folded_weight_gradient(d: Tensor, x: Tensor, taps: Sequence[int], padding: Sequence[int]) -> Tensor:
    shape = [d.shape[2], x.shape[2], *taps]
    gradients = [
        torch.nn.grad.conv2d_weight(maps, shape, gradient, 1, list(padding))
        for maps, gradient in zip(x, d, strict=True)
    ]
    return torch.stack(gradients).permute(0, 1, 3, 4, 2).contiguous().permute(0, 1, 4, 2, 3)


def _last(maps: Tensor) -> Tensor:
    return maps.contiguous(memory_format=torch.channels_last)


@pytest.fixture(autouse=True)
def _emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphed, "_check_device", lambda device: None)
    monkeypatch.setattr(graphed, "Replay", Again)
    monkeypatch.setattr(convolution, "TYPES", (torch.float32, torch.float64))
    monkeypatch.setattr("fedretain.engines.captured.TYPES", (torch.float32, torch.float64))
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: None)
    for name, stand_in in {
        "Stream": Stream,
        "current_stream": Stream,
        "stream": lambda stream: contextlib.nullcontext(),
        "synchronize": lambda: None,
        "graph_pool_handle": lambda: None,
        "mem_get_info": lambda device: (2**34, 2**34),
    }.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)


def agree(trained: Trained, given: dict[str, Any], side: int = 8, **options: Any) -> GraphedEngine:
    """Train with both engines, in float64."""
    engines: list[GraphedEngine] = []

    def build(world: Any) -> GraphedEngine:
        engines.append(GraphedEngine(world, **{"compile_after": float("inf"), **options}))
        return engines[0]

    data = dataset(shape=(2, side, side))
    assert_agree(trained(build, given, data), trained(LoopEngine, given, data), 1e-9)
    assert not engines[0].plain, "the step was played, not replayed"
    return engines[0]


@pytest.mark.parametrize(
    "method",
    [
        "fedavg",
        "fednova",
        "scaffold",
        {"name": "fedprox", "mu": 0.1},
        {"name": "fedcurv", "lam": 0.1},
        {"name": "fedreg", "gamma": 0.4, "eta_s": 0.01, "ascent_steps": 2},
        {"name": "fedwavg", "alpha": 0.5},
    ],
    ids=str,
)
@pytest.mark.parametrize(("model", "side"), [({"name": "mlp", "hidden": [8]}, 8), (LENET, 12)], ids=["mlp", "lenet"])
def test_methods(trained: Trained, method: Any, model: Any, side: int) -> None:
    """Every method, on uneven clients: padded batches and clients that are done before others."""
    engine = agree(trained, settings(method=method, model=model), side)
    # FedWAvg's looks at the round's number: it does something every few rounds only.
    assert engine.plain_preparation == ("fedwavg" in str(method))


@pytest.mark.parametrize("norm", ["batch", "group"])
def test_norms(trained: Trained, norm: str) -> None:
    """Maps side by side, strided and 1 × 1 convolutions, norms written out, running statistics of each client."""
    model = {"name": "resnet18", "norm": norm, "width": 20, **({"groups": 2} if norm == "group" else {})}
    given = settings(model=model, local={"batch_size": 8, "lr": 0.01}, rounds=1, participation=2)
    agree(trained, given, 16)


@pytest.mark.parametrize("local", [{"momentum": 0.9, "nesterov": True}, {"optimizer": "adam", "lr": 0.01}], ids=str)
def test_optimizers(trained: Trained, local: dict[str, Any]) -> None:
    """Optimisers with memory, which starts fresh every round, and Adam's count of steps."""
    agree(trained, settings(local=local, model=LENET), 12)


def test_pooling_between_maps_side_by_side(trained: Trained) -> None:
    """FedReg on ResNet-9: pooled maps of many channels, scalars whose gradient sums over all of them."""
    given = settings(
        model={"name": "resnet9", "width": 20},
        method={"name": "fedreg", "gamma": 0.4, "eta_s": 0.01, "ascent_steps": 1},
        local={"steps": 2, "epochs": None, "lr": 0.01},
        participation=2,
        rounds=1,
    )
    agree(trained, given, 8)


def test_augmentation_and_small_stacks(trained: Trained) -> None:
    """Crops and flips inside the graph; two clients at a time."""
    agree(trained, settings(model=LENET, local={"augment": "crop_flip"}), 12, at_once=2)


class Meeting(torch.nn.Module):
    """Maps of many channels whose gradients meet, a norm before a ReLU, pooling, a stride."""

    def __init__(self, shape: tuple[int, int, int], classes: int) -> None:
        super().__init__()
        self.first = torch.nn.Conv2d(shape[0], 20, 3, padding=1)
        self.second = torch.nn.Conv2d(20, 20, 3, padding=1, bias=False)
        self.norm = torch.nn.BatchNorm2d(20)
        self.third = torch.nn.Conv2d(20, 24, 3, stride=2)
        self.classifier = torch.nn.Linear(24, classes)

    def forward(self, images: Tensor) -> Tensor:
        """Logits."""
        maps = self.first(images).relu()
        maps = (self.norm(self.second(maps)).relu() + maps).relu()
        logits: Tensor = self.classifier(self.third(F.max_pool2d(maps, 2)).flatten(2).amax(-1))
        return logits


@pytest.fixture
def in_this_process() -> Iterator[None]:
    """Threads of the compiler that stay would keep later tests from forking."""
    from torch._inductor import config

    with config.patch(compile_threads=1):
        yield


@pytest.mark.skipif(shutil.which("g++") is None, reason="PyTorch's compiler needs a C++ compiler")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.usefixtures("in_this_process")
def test_compiled(trained: Trained, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The same once the steps are compiled; the next run finds that they were."""
    threads = threading.enumerate()
    with contextlib.suppress(ImportError):
        monkeypatch.setattr("tqdm.tqdm.monitor_interval", 0)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "none")
    given = settings(model={"name": f"{__name__}:Meeting"}, local={"lr": 0.05, "batch_size": 4}, participation=2)
    given["partition"] = {"kind": "iid", "clients": 6, "validation": 0.0}
    agree(trained, given, compile_after=0.0)
    notes = list(tmp_path.glob("fedretain-*"))
    assert notes

    compiled: list[float] = []
    original = graphed.InPlace.compile
    monkeypatch.setattr(graphed, "COMPILE_AGAIN_AFTER", 0.0)
    monkeypatch.setattr(graphed.InPlace, "compile", lambda step, leaves: (compiled.append(1), original(step, leaves)))
    agree(trained, given, compile_after=1e9)
    assert len(compiled) == len(notes)
    assert set(tmp_path.glob("fedretain-*")) == set(notes)
    assert threading.enumerate() == threads


@pytest.mark.parametrize(
    ("model", "rounds"),
    [({"name": "mlp", "hidden": [8]}, 3), ({"name": "resnet9", "width": 20}, 1)],
    ids=["mlp", "resnet9"],
)
def test_a_loop_is_compiled_once(
    trained: Trained, monkeypatch: pytest.MonkeyPatch, model: dict[str, Any], rounds: int
) -> None:
    """FedReg's ascent is one turn to the compiler, played as often as before; here the compiler leaves it as it is."""
    sizes: list[int] = []

    def as_it_is(module: fx.GraphModule, given: Sequence[Any], options: dict[str, Any]) -> fx.GraphModule:
        sizes.append(len(module.graph.nodes))
        return module

    monkeypatch.setattr(captured, "_fused", as_it_is)
    monkeypatch.setattr(rolling, "LEAST_SAVED", 20)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "none")
    method = {"name": "fedreg", "gamma": 0.4, "eta_s": 0.01, "ascent_steps": 6}
    local = {"steps": 2, "epochs": None, "lr": 0.01}
    given = settings(model=model, method=method, local=local, participation=2, rounds=rounds)
    engine = agree(trained, given, 8, compile_after=0.0)
    preparations = list(engine.preparations.values())
    assert all(isinstance(preparation.whole.call, rolling.Rolled) for preparation in preparations)
    assert {preparation.whole.call.turns for preparation in preparations} <= {5, 6}
    whole = max(len(preparation.whole.module.graph.nodes) for preparation in preparations)
    assert sum(sizes[:3]) < whole, "compiled more than was recorded"


def test_a_compiler_that_fails(
    trained: Trained, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The captured steps go on as they are, and a line says why."""

    def fails(*given: Any, **options: Any) -> None:
        raise AttributeError("no such thing in this version\nand more")

    caplog.set_level("INFO", "fedretain")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "none")
    monkeypatch.setattr("torch._inductor.compile", fails)
    given = settings(model={"name": f"{__name__}:Meeting"}, local={"lr": 0.05, "batch_size": 4}, participation=2)
    engine = agree(trained, given, compile_after=0.0)
    assert "without PyTorch's compiler: no such thing in this version" in caplog.text
    assert "and more" not in caplog.text
    assert not engine.plain


def test_the_next_round_is_drawn_ahead(trained: Trained, monkeypatch: pytest.MonkeyPatch) -> None:
    """All stacks but the first round's are made before they are asked for, and none is left over."""
    made: list[int] = []
    original = graphed.Ahead.make

    def make(self: Any, groups: Any, round: int) -> None:
        made.append(round)
        original(self, groups, round)

    asked: list[bool] = []
    take = graphed.Ahead.take

    def noted(self: Any, members: Any, round: int) -> Any:
        asked.append(any(key[0] == round for key in self.made))
        return take(self, members, round)

    monkeypatch.setattr(graphed.Ahead, "make", make)
    monkeypatch.setattr(graphed.Ahead, "take", noted)
    even = {"kind": "iid", "clients": 6, "validation": 0.1}
    engine = agree(trained, settings(rounds=4) | {"partition": even})
    assert made == [2, 3, 4]
    assert asked == [False, True, True, True]
    assert not engine.ahead.made


def test_what_cannot_be_captured_is_played(trained: Trained, caplog: pytest.LogCaptureFixture) -> None:
    """A capture that fails is told, and the steps are played with the same result."""

    class Fails(Again):
        def __init__(self, function: Callable[[], None], pool: Any) -> None:
            raise RuntimeError("operation not permitted when stream is capturing")

    caplog.set_level("INFO", "fedretain")
    engines: list[GraphedEngine] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(graphed, "Replay", Fails)

        def build(world: Any) -> GraphedEngine:
            engines.append(GraphedEngine(world))
            return engines[0]

        found = trained(build, settings(), dataset())
    assert engines[0].plain
    assert "plays steps one by one" in caplog.text
    assert "not permitted" in caplog.text
    assert_agree(found, trained(LoopEngine, settings(), dataset()), 1e-9)
    assert np.isfinite(found.rows[-1]["train_loss"])
