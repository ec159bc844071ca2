"""What kernels of our own buy on a CPU, one thread: ``python -m benchmarks.kernels``.

A local step of W1 and W2 without them, with pooling and updates (``inner: loop``, the same bits) and with convolutions
too (``inner: native``); a test of their models without and with pooling; the steps of a stack of W3's clients; and
LeNet's operations one by one. They take turns, the quickest turn counts.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial

import numpy as np
import torch
from torch import Tensor

import fedretain
from benchmarks.works import WORKS, Variant
from fedretain.config import make_experiment
from fedretain.engines.engine import World
from fedretain.engines.functional import Carry
from fedretain.engines.fusing import halve, halve_backward
from fedretain.engines.memory import keep_freed_memory
from fedretain.engines.native import kernels
from fedretain.engines.native.building import library
from fedretain.engines.recorded import RecordedEngine
from fedretain.engines.stack import Stack
from fedretain.engines.steps import Each
from fedretain.engines.vectorised import VectorisedEngine
from fedretain.evaluation import evaluate
from fedretain.experiment import build_world
from fedretain.methods import Received

aten = torch.ops.aten

EXAMPLES = 5000


@contextmanager
def without_kernels() -> Iterator[None]:
    """A block in which nothing of our own is found."""
    os.environ["FEDRETAIN_NATIVE"] = "0"
    library.cache_clear()
    yield
    del os.environ["FEDRETAIN_NATIVE"]
    library.cache_clear()


def step_of(world: World, *, exact: bool) -> Callable[[], float]:
    """Trains a client; milliseconds a step. It is called once here, so that its steps are recorded now."""
    engine = RecordedEngine(world, exact)
    received = Received({name: p.detach() for name, p in world.model.named_parameters()}, {}, {}, 1)

    def train() -> float:
        started = time.perf_counter()
        (uploads,) = engine.train(received, np.array([0]), lambda client: None, local_models=False)
        return 1000 * (time.perf_counter() - started) / int(uploads.steps[0])

    train()
    return train


class Timed(VectorisedEngine):
    """Knows how long its last stack's steps took."""

    spent = 0.0

    def _steps(self, each: Each, clients: Stack, carry: Carry) -> tuple[Carry, Tensor]:
        started = time.perf_counter()
        result = super()._steps(each, clients, carry)
        self.spent = time.perf_counter() - started
        return result


def stack_of(world: World, clients: int) -> Callable[[], float]:
    """Trains so many clients as one stack; milliseconds a step, fetching its batches included."""
    engine = Timed(world)
    received = Received({name: p.detach() for name, p in world.model.named_parameters()}, {}, {}, 1)

    def train() -> float:
        (uploads,) = engine.train(received, np.arange(clients), lambda client: None, local_models=False)
        return 1000 * engine.spent / int(uploads.steps[0])

    train()
    return train


def show_stack(turns: int, clients: int = 50) -> None:
    """Half of a cohort of W3: what one of two workers trains."""
    work = WORKS["W3-tiny-many"]
    inputs, labels = work.data()
    data = fedretain.from_arrays(inputs, labels, inputs[:EXAMPLES], labels[:EXAMPLES])
    world = build_world(make_experiment(work.experiment(Variant(), 1)), data)
    with without_kernels():
        steps = {"PyTorch": stack_of(world, clients)}
    steps["ours"] = stack_of(world, clients)
    times = [[step() for step in steps.values()] for _ in range(20 * turns)]
    for kind, found in zip(steps, zip(*times, strict=True), strict=True):
        print(f"W3-tiny-many, {clients} clients, ms a step, {kind}: {min(found):.3f}, median {np.median(found):.3f}")


def evaluation_of(world: World) -> float:
    """Milliseconds of looking at the test set."""
    params = {name: p.detach() for name, p in world.model.named_parameters()}
    started = time.perf_counter()
    evaluate(world, params, {}, 500)
    return 1000 * (time.perf_counter() - started)


def quickest(ways: Mapping[str, Callable[[], object]], turns: int) -> str:
    """Milliseconds of each way, which take turns."""
    times: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(turns):
        for way, call in ways.items():
            started = time.perf_counter()
            call()
            times[way].append(time.perf_counter() - started)
    return ", ".join(f"{way} {1000 * min(found):.2f}" for way, found in times.items())


def show_operations(turns: int) -> None:
    """LeNet's operations on a batch of 64 images of CIFAR-10's shape."""
    generator = torch.Generator().manual_seed(0)
    for inputs, side, outputs in ((3, 32, 6), (6, 14, 16)):
        maps = torch.randn(64, inputs, side, side, generator=generator)
        weights, bias = torch.randn(outputs, inputs, 5, 5, generator=generator), torch.zeros(outputs)
        how = ((1, 1), (0, 0), (1, 1), False, (0, 0), 1)
        out = aten.convolution(maps, weights, bias, *how)
        backward = partial(aten.convolution_backward, out, maps, weights, [outputs], *how)
        pairs: dict[str, tuple[Callable[[], object], Callable[[], object]]] = {
            "forward": (
                partial(aten.convolution, maps, weights, bias, *how),
                partial(kernels.convolve, maps, weights, bias, (0, 0)),
            ),
            "gradient of the maps": (
                partial(backward, [True, False, False]),
                partial(kernels.maps_gradient, out, maps, weights, (0, 0)),
            ),
            "gradient of the weights": (
                partial(backward, [False, True, True]),
                partial(kernels.weights_gradient, out, maps, weights, (0, 0)),
            ),
        }
        for name, (theirs, ours) in pairs.items():
            print(f"{inputs} → {outputs} channels, {name}, ms: {quickest({'PyTorch': theirs, 'ours': ours}, turns)}")
        pooled, indices = aten.max_pool2d_with_indices(out, [2, 2])
        _, rows = halve(out)
        _, places = kernels.pool(out)
        forward = {
            "PyTorch": partial(aten.max_pool2d_with_indices, out, [2, 2]),
            "slices": partial(halve, out),
            "ours": partial(kernels.pool, out),
        }
        window = ([2, 2], [2, 2], [0, 0], [1, 1], False, indices)
        gradient = {
            "PyTorch": partial(aten.max_pool2d_with_indices_backward, pooled, out, *window),
            "slices": partial(halve_backward, pooled, out, rows),
            "ours": partial(kernels.pool_backward, pooled, places),
        }
        print(f"{outputs} maps of {side - 4} × {side - 4}, pooling, ms: {quickest(forward, turns)}")
        print(f"  gradient: {quickest(gradient, turns)}")


def main() -> None:
    """Print everything."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=20)
    turns = parser.parse_args().turns
    torch.set_num_threads(1)
    keep_freed_memory()
    for name in ("W1-mnist-cnn", "W2-cifar-lenet"):
        work = WORKS[name]
        inputs, labels = work.data()
        data = fedretain.from_arrays(inputs, labels, inputs[:EXAMPLES], labels[:EXAMPLES])
        world = build_world(make_experiment(work.experiment(Variant(), 1)), data)
        with without_kernels():
            steps = {"without": step_of(world, exact=True)}
        steps |= {"loop": step_of(world, exact=True), "native": step_of(world, exact=False)}
        times = [[step() for step in steps.values()] for _ in range(turns)]
        best = dict(zip(steps, map(min, zip(*times, strict=True)), strict=True))
        print(f"{name}, ms a step: " + ", ".join(f"{kind} {ms:.2f}" for kind, ms in best.items()), flush=True)
        tested: dict[str, list[float]] = {"without": [], "with": []}
        for _ in range(max(2, turns // 4)):
            with without_kernels():
                tested["without"].append(evaluation_of(world))
            tested["with"].append(evaluation_of(world))
        print(f"  {EXAMPLES:,} test examples, ms: " + ", ".join(f"{k} {min(v):.0f}" for k, v in tested.items()))
    show_stack(turns)
    show_operations(20 * turns)


if __name__ == "__main__":
    main()
