"""``python -m benchmarks.probes``: what measuring costs beside training, on CIFAR-10 LeNet of the WSM paper's shape.

100 clients of 500 examples (450 to train on, 50 for validation), ten a round, three local epochs; pixels are random,
for the time does not depend on what is seen. First each measure alone, in one round; then whole runs in which the
client × client matrix with the forgettable examples is measured every ten rounds, the default; last the test of twelve
variants of a comparison, one after the other and together (``--parts variants``; ``--device cuda`` for a GPU).
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

import fedretain
from fedretain.config import make_experiment
from fedretain.engines import LoopEngine, World
from fedretain.evaluation import Model, evaluate, evaluate_all
from fedretain.experiment import build_world
from fedretain.methods import Received
from fedretain.probes import Moment, measure_classes, measure_drift, measure_forgetting, measure_loss_increase
from fedretain.randomness import stream
from fedretain.rounds import initial_state, train_rounds
from fedretain.runs.checkpoint import Checkpoint
from fedretain.runs.summary import cost

CLIENTS, PARTICIPANTS, TEST = 100, 10, 10_000
PARTS = ("measures", "runs", "variants")
VARIANTS = 12
TESTED: dict[str, tuple[Any, tuple[int, int, int]]] = {
    "MLP 64-64-10": ({"name": "mlp", "hidden": [64]}, (64, 1, 1)),
    "LeNet": ("lenet", (3, 32, 32)),
}
"""The models of W3 and W4 of ``benchmarks.works``, and the shape of what they see."""


def data() -> fedretain.Dataset:
    """As many random images as CIFAR-10 has."""
    rng = np.random.default_rng(0)
    inputs = rng.integers(0, 256, (500 * CLIENTS + TEST, 3, 32, 32), dtype=np.uint8)
    labels = rng.integers(0, 10, len(inputs))
    return fedretain.from_arrays(inputs[TEST:], labels[TEST:], inputs[:TEST], labels[:TEST])


def experiment(rounds: int, every: int, **forgetting: Any) -> fedretain.Experiment:
    """W2 of ``benchmarks.works`` with a validation split; the test set is used as often as forgetting is measured."""
    return make_experiment(
        {
            "rounds": rounds,
            "participation": PARTICIPANTS,
            "partition": {"kind": "iid", "clients": CLIENTS, "validation": 0.1},
            "model": "lenet",
            "local": {"lr": 0.05, "epochs": 3, "batch_size": 64, "drop_last": True},
            "evaluate": {"every": every},
            "forgetting": {"every": every, **forgetting},
            "device": "cpu",
        }
    )


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.probes", description=__doc__)
    parser.add_argument("--rounds", type=int, default=20, help="rounds of each whole run, a multiple of ten")
    parser.add_argument("--turns", type=int, default=3, help="how often each measure is taken, and each run done")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, help="what to measure")
    parser.add_argument("--device", default="cpu", help="where the variants are tested")
    options = parser.parse_args()
    console = Console(width=110)
    console.print(f"{torch.get_num_threads()} threads")
    examples = data() if {"measures", "runs"} & set(options.parts) else None
    if examples is not None and "measures" in options.parts:
        show_measures(console, examples, options.turns)
    if examples is not None and "runs" in options.parts:
        show_runs(console, examples, options.rounds, options.turns)
    if "variants" in options.parts:
        show_variants(console, options.device, options.turns)


def show_runs(console: Console, examples: fedretain.Dataset, rounds: int, turns: int) -> None:
    """Whole runs, and what measuring adds to training."""
    table = Table("run", "training (s a round)", "measuring (s a round)", "measuring / training")
    ratios = []
    for turn in range(turns):
        given = experiment(rounds, every=10)
        world = build_world(given, examples)
        start = Checkpoint(initial_state(given, world), {}, {})
        rows = [row for _, row, _ in train_rounds(given, world, LoopEngine(world), start)]
        spent = cost(rows)
        training, measuring = (spent[f"{kind}_seconds"] / len(rows) for kind in ("training", "measuring"))
        ratios.append(measuring / training)
        table.add_row(str(turn + 1), f"{training:.3f}", f"{measuring:.3f}", f"{ratios[-1]:.1%}")
    console.print(table)
    console.print(f"matrix every 10 rounds: {statistics.median(ratios):.1%} of a round's time (goal: below 10 %)")


def show_measures(console: Console, examples: fedretain.Dataset, turns: int) -> None:
    """Seconds of each measure in one round, the least of several turns."""
    given = experiment(1, every=1)
    world = build_world(given, examples)
    state = initial_state(given, world)
    received = Received(state.params, state.buffers, {}, 1)
    uploads = list(LoopEngine(world).train(received, np.arange(PARTICIPANTS), lambda client: None))
    size = given.evaluate.batch_size
    moment = Moment(world, received, uploads, state, [np.arange(PARTICIPANTS)], size)
    measures = {
        "test set, one model": lambda: evaluate(world, state.params, state.buffers, size),
        "matrix 10 × 10": lambda: measure_forgetting(
            world, received, uploads, state, everyone=False, count_examples=False, batch_size=size
        ),
        "matrix and forgettable examples": lambda: measure_forgetting(
            world, received, uploads, state, everyone=False, count_examples=True, batch_size=size
        ),
        "classes": lambda: measure_classes(moment),
        "drift": lambda: measure_drift(moment),
        "loss_increase": lambda: measure_loss_increase(moment),
    }
    table = Table("measure", "seconds in one round")
    for name, measure in measures.items():
        seconds = []
        for _ in range(turns):
            started = time.perf_counter()
            measure()
            seconds.append(time.perf_counter() - started)
        table.add_row(name, f"{min(seconds):.2f}")
    console.print(table)


def show_variants(console: Console, device: str, turns: int) -> None:
    """Milliseconds to test twelve variants: the least of ten times as many turns."""
    table = Table("model", "test examples", "one after the other", "one pass, each alone", "one stack")
    for name, (model, shape) in TESTED.items():
        if name == "LeNet" and device == "cpu":
            continue  # convolutions are not stacked there
        for count in (1000, TEST):
            world = build_world(make_experiment({"model": model, "device": device}), random_examples(shape, count))
            size = make_experiment({}).evaluate.batch_size
            rng = stream(0, "variants")
            models = [
                ({n: torch.from_numpy(0.1 * rng.normal(size=p.shape)).to(p) for n, p in named.items()}, {})
                for named in [dict(world.model.named_parameters())] * VARIANTS
            ]
            ways: dict[str, Callable[[], Any]] = {
                "one after the other": partial(_each, world, models, size),
                "one pass, each alone": partial(evaluate_all, world, models, size, stacked=False),
                "one stack": partial(evaluate_all, world, models, size),
            }
            seconds: dict[str, list[float]] = {way: [] for way in ways}
            for _ in range(10 * turns):
                for way, test in ways.items():
                    started = time.perf_counter()
                    test()
                    seconds[way].append(time.perf_counter() - started)
            table.add_row(name, f"{count:,}", *(f"{1000 * min(s):.1f}" for s in seconds.values()))
    console.print(table)


def _each(world: World, models: Sequence[Model], batch_size: int) -> None:
    for params, buffers in models:
        evaluate(world, params, buffers, batch_size)


def random_examples(shape: tuple[int, int, int], count: int) -> fedretain.Dataset:
    """As many test examples, and a few to train on."""
    rng = stream(0, "test examples", count)
    inputs, labels = rng.integers(0, 256, (count, *shape), dtype=np.uint8), np.arange(count) % 10
    return fedretain.from_arrays(inputs[:100], labels[:100], inputs, labels)


if __name__ == "__main__":
    main()
