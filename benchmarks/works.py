"""The work that every runner does: same model, data, clients, batches and steps; FedAvg; nothing evaluated."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

import fedretain


@dataclass(frozen=True)
class Work:
    name: str
    clients: int
    examples: int
    participants: int
    epochs: int
    batch_size: int
    shape: tuple[int, int, int]
    model: dict[str, Any]
    lr: float = 0.05

    def data(self) -> fedretain.Dataset:
        """Random pixels: the time of a step does not depend on what is seen."""
        rng = np.random.default_rng(0)
        count = self.clients * self.examples
        inputs = rng.integers(0, 256, (count, *self.shape), dtype=np.uint8)
        labels = rng.integers(0, 10, count)
        labels[:10] = np.arange(10)
        return fedretain.from_arrays(inputs, labels, inputs[:10], labels[:10])

    def experiment(self, rounds: int) -> dict[str, Any]:
        """The same as an experiment file."""
        return {
            "name": self.name,
            "rounds": rounds,
            "participation": self.participants,
            "data": {"normalise": "unit"},
            "partition": {"kind": "iid", "clients": self.clients, "validation": 0.0},
            "model": self.model,
            "local": {"lr": self.lr, "epochs": self.epochs, "batch_size": self.batch_size},
            "evaluate": {"every": 0},
            "forgetting": {"every": 0},
            "device": "cpu",
        }


WORKS = {
    work.name: work
    for work in (
        Work("W1-mnist-cnn", 100, 600, 10, 1, 32, (1, 28, 28), {"name": "fedavg_cnn"}),
        Work("W2-cifar-lenet", 100, 450, 10, 3, 64, (3, 32, 32), {"name": "lenet"}),
        Work("W3-tiny-many", 1000, 20, 100, 5, 10, (64, 1, 1), {"name": "mlp", "hidden": [64]}),
    )
}
