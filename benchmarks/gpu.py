"""Absolute times of the engines on one GPU: ``python -m benchmarks.gpu [--json FILE] [--profile] [work ...]``."""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

import fedretain
from fedretain.config import make_experiment
from fedretain.engines import Engine, World
from fedretain.engines.graphed import GraphedEngine
from fedretain.engines.loop import LoopEngine
from fedretain.engines.vectorised import VectorisedEngine
from fedretain.experiment import build_world
from fedretain.methods import Received
from fedretain.randomness import stream

CLASSES = 10
IMAGE = (3, 32, 32)


class Work(NamedTuple):
    """A round in which every client takes part."""

    clients: int
    examples: int
    batch_size: int
    epochs: int
    model: dict[str, Any]
    method: Any
    precision: str
    goal: float
    """Milliseconds a round."""
    loss: str = "ce"

    def world(self) -> World:
        """On the GPU, with random images: the time of a step does not depend on what is seen."""
        rng = stream(0, "benchmark", self.clients, self.examples)
        count = self.clients * self.examples
        inputs = rng.integers(0, 256, (count, *IMAGE), dtype=np.uint8)
        labels = rng.integers(0, CLASSES, count)
        labels[:CLASSES] = np.arange(CLASSES)
        given = {
            "rounds": 1,
            "participation": self.clients,
            "partition": {"kind": "iid", "clients": self.clients, "validation": 0.0, "seed": 0},
            "model": self.model,
            "method": self.method,
            "loss": self.loss,
            "local": {"lr": 0.01, "epochs": self.epochs, "batch_size": self.batch_size},
            "evaluate": {"every": 0},
            "forgetting": {"every": 0},
            "device": "cuda",
            "precision": self.precision,
        }
        data = fedretain.from_arrays(inputs, labels, inputs[:CLASSES], labels[:CLASSES])
        return build_world(make_experiment(given), data)


FEDREG = {"name": "fedreg", "gamma": 0.5, "eta_s": 0.1}
WORKS = {
    "lenet": Work(180, 450, 64, 3, {"name": "lenet"}, "fedavg", "float32", 60),
    "lenet-bf16": Work(180, 450, 64, 3, {"name": "lenet"}, "fedavg", "bfloat16", 60),
    "fedreg": Work(100, 5, 5, 30, {"name": "resnet9"}, FEDREG, "bfloat16", 750, "ce_floor"),
    "resnet18-batch": Work(10, 1344, 64, 1, {"name": "resnet18"}, "fedavg", "bfloat16", 120),
    "resnet18-group": Work(10, 1344, 64, 1, {"name": "resnet18", "norm": "group"}, "fedavg", "bfloat16", 140),
}
"""LeNet: 18 experiments of W2's shape. FedReg: its CIFAR-10 setting, 240 rounds in 3 minutes. ResNet-18: 21 steps."""

RUNNERS: dict[str, Callable[[World], Engine]] = {
    "loop": LoopEngine,
    "vectorised": VectorisedEngine,
    "graphed": lambda world: GraphedEngine(world, compile_after=float("inf")),
    "graphed, compiled": lambda world: GraphedEngine(world, compile_after=0.0),
}


def one_round(engine: Engine, world: World, number: int) -> None:
    """A round of all clients, until the GPU is done."""
    params = {name: value.detach() for name, value in world.model.named_parameters()}
    received = Received(params, dict(world.model.named_buffers()), {}, number)
    everyone = np.arange(world.federation.clients)
    for _ in engine.train(received, everyone, lambda client: None, local_models=False, upcoming=everyone):
        pass
    torch.cuda.synchronize()


def measure(work: Work, runner: str, rounds: int) -> tuple[dict[str, Any], Engine, World]:
    """Start-up and the median round."""
    world = work.world()
    engine = RUNNERS[runner](world)
    start = time.perf_counter()
    one_round(engine, world, 1)
    startup = time.perf_counter() - start
    times = []
    for number in range(2, rounds + 2):
        start = time.perf_counter()
        one_round(engine, world, number)
        times.append(time.perf_counter() - start)
    row = {
        "runner": runner,
        "seconds_per_round": statistics.median(times),
        "spread": max(times) - min(times),
        "startup_seconds": startup,
        "peak_gpu_mb": torch.cuda.max_memory_allocated() / 2**20,
    }
    return row, engine, world


def print_profile(engine: Engine, world: World, rows: int = 45) -> None:
    """The kernels that a round spends its time in."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as found:
        one_round(engine, world, 99)
    kernels = sorted(found.key_averages(), key=lambda row: -row.self_device_time_total)
    print(f"    kernels {sum(row.self_device_time_total for row in kernels) / 1e3:.1f} ms in all")
    for row in kernels[:rows]:
        print(f"    {row.self_device_time_total / 1e3:8.2f} ms {row.count:6d} × {row.key[:80]}")


def main() -> None:
    """Measure, print a table, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("works", nargs="*", metavar="work", help=f"of {', '.join(WORKS)}; all of them if none is named")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--runners", nargs="*", choices=list(RUNNERS), default=list(RUNNERS))
    parser.add_argument("--profile", action="store_true", help="the kernels of a compiled round")
    arguments = parser.parse_args()
    unknown = set(arguments.works) - set(WORKS)
    if unknown:
        parser.error(f"unknown work {', '.join(sorted(unknown))}; choose from {', '.join(WORKS)}")
    table = []
    for name in arguments.works or WORKS:
        work = WORKS[name]
        for runner in arguments.runners:
            torch.cuda.reset_peak_memory_stats()
            row, engine, world = measure(work, runner, arguments.rounds)
            table.append({"work": name, **row})
            milliseconds = 1000 * row["seconds_per_round"]
            print(f"{name:15} {runner:18} {milliseconds:8.1f} ms, goal {work.goal:g}", end="")
            print(f", first round {row['startup_seconds']:.1f} s, {row['peak_gpu_mb'] / 1024:.1f} GB", flush=True)
            if arguments.profile and runner == "graphed, compiled":
                print_profile(engine, world)
            engine.close()
            del engine, world
            torch.cuda.empty_cache()
    if arguments.json:
        arguments.json.write_text(json.dumps(table, indent=1))


if __name__ == "__main__":
    main()
