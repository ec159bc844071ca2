"""``python -m benchmarks.client_states``: SCAFFOLD on thousands of clients; memory stays under its bound.

Every client that was seen keeps a control variate of the model's size. The table shows how many have been seen, what
their states take in all, and what of that is in memory.
"""

from __future__ import annotations

import argparse
import resource
import tempfile
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

import fedretain
from fedretain.config import make_experiment
from fedretain.engines import LoopEngine
from fedretain.experiment import build_world
from fedretain.rounds import initial_state, train_rounds
from fedretain.runs.checkpoint import Checkpoint
from fedretain.runs.clients import ClientStore


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.client_states", description=__doc__)
    parser.add_argument("--clients", type=int, default=4000)
    parser.add_argument("--participants", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--megabytes", type=int, default=50, help="engine.state_memory")
    options = parser.parse_args()
    rng = np.random.default_rng(0)
    inputs, labels = (
        rng.integers(0, 256, (2 * options.clients, 1, 28, 28), dtype=np.uint8),
        np.arange(2 * options.clients),
    )
    data = fedretain.from_arrays(inputs, labels % 10, inputs[:100], labels[:100] % 10)
    experiment = make_experiment(
        {
            "rounds": options.rounds,
            "participation": options.participants,
            "partition": {"kind": "tiny", "clients": options.clients, "examples": 2, "validation": 0.0},
            "model": {"name": "mlp", "hidden": [160]},
            "method": "scaffold",
            "local": {"steps": 1, "lr": 0.01},
            "evaluate": {"every": 0},
            "forgetting": {"every": 0},
            "device": "cpu",
        }
    )
    world = build_world(experiment, data)
    start = Checkpoint(initial_state(experiment, world), {}, {})
    state = sum(p.numel() * 4 for p in world.model.parameters())
    table = Table("round", "clients seen", "states in all (MB)", "in memory (MB)", "peak RSS (MB)", "seconds a round")
    with tempfile.TemporaryDirectory() as folder:
        store = ClientStore(Path(folder), memory=options.megabytes * 10**6)
        for reached, row, _ in train_rounds(experiment, world, LoopEngine(world), start, store):
            store.save(reached.clients)
            store.forget_all_but(set(reached.clients.items()))
            if row["round"] % (options.rounds // 6) == 0 or row["round"] == 1:
                peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
                numbers = (len(reached.clients) * state / 1e6, store.in_memory / 1e6, peak)
                cells = [f"{number:.0f}" for number in numbers]
                table.add_row(str(row["round"]), str(len(reached.clients)), *cells, f"{row['seconds']:.2f}")
    Console(width=110).print(table)


if __name__ == "__main__":
    main()
