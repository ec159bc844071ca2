"""The works, and how one is written down so that every runner does the same: model, data, clients, batches and steps.

``pack`` writes a folder that a runner in another environment reads with NumPy alone (``peers/given.py``): the examples,
who holds them, the initial parameters, and for every round who takes part and in which order each client goes through
its examples. Nothing random is left to the runners.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

import fedretain
from fedretain.config import make_experiment
from fedretain.engines.schedule import local_batches, sample_cohort
from fedretain.experiment import build_world
from fedretain.randomness import stream

CLASSES = 10


@dataclass(frozen=True)
class Variant:
    """One training of a work: what the members of a sweep differ in."""

    seed: int = 0
    lr: float = 0.05
    loss: str = "ce"


@dataclass(frozen=True)
class Work:
    """FedAvg with equal clients; nothing is evaluated."""

    name: str
    clients: int
    examples: int
    participants: int
    epochs: int
    batch_size: int
    shape: tuple[int, int, int]
    model: dict[str, Any]
    variants: tuple[Variant, ...] = (Variant(),)
    usual_rounds: int = 3
    """Timed rounds per turn, unless asked for another number; short rounds need more of them."""
    at_most_rounds: int | None = None
    """A long work is timed for fewer rounds than asked for."""

    def rounds(self, asked: int | None = None) -> int:
        """Timed rounds per turn."""
        wanted = self.usual_rounds if asked is None else asked
        return wanted if self.at_most_rounds is None else min(wanted, self.at_most_rounds)

    def data(self) -> tuple[np.ndarray, np.ndarray]:
        """Random pixels and labels: the time of a step does not depend on what is seen."""
        rng = stream(0, "benchmark", self.clients, self.examples)
        count = self.clients * self.examples
        inputs = rng.integers(0, 256, (count, *self.shape), dtype=np.uint8)
        labels = rng.integers(0, CLASSES, count)
        labels[:CLASSES] = np.arange(CLASSES)
        return inputs, labels

    def small(self) -> Work:
        """The same with fewer examples a client, enough for two whole batches and a partial one."""
        return replace(self, examples=min(self.examples, 2 * self.batch_size + self.batch_size // 2))

    def experiment(
        self, variant: Variant, rounds: int, *, engine: str = "loop", precision: str = "float32"
    ) -> dict[str, Any]:
        """The same as an experiment file."""
        return {
            "name": self.name,
            "seed": variant.seed,
            "rounds": rounds,
            "participation": self.participants,
            "data": {"normalise": "unit"},
            "partition": {"kind": "iid", "clients": self.clients, "validation": 0.0, "seed": 0},
            "model": self.model,
            "loss": variant.loss,
            "local": {"lr": variant.lr, "epochs": self.epochs, "batch_size": self.batch_size},
            "evaluate": {"every": 0},
            "forgetting": {"every": 0},
            "engine": engine,
            "device": "cpu",
            "precision": precision,
        }


SWEEP = tuple(Variant(seed, lr, loss) for loss, lr, seed in product(("ce", "wsm"), (0.02, 0.05, 0.1), (0, 1)))

WORKS = {
    work.name: work
    for work in (
        Work("W1-mnist-cnn", 100, 600, 10, 1, 32, (1, 28, 28), {"name": "fedavg_cnn"}),
        Work("W2-cifar-lenet", 100, 450, 10, 3, 64, (3, 32, 32), {"name": "lenet"}),
        Work("W3-tiny-many", 1000, 20, 100, 5, 10, (64, 1, 1), {"name": "mlp", "hidden": [64]}, usual_rounds=30),
        Work("W4-sweep", 100, 450, 10, 3, 64, (3, 32, 32), {"name": "lenet"}, variants=SWEEP, at_most_rounds=1),
    )
}


def pack(work: Work, rounds: int, folder: Path, precision: str = "float32") -> None:
    """Write everything that a runner is given for this many rounds."""
    inputs, labels = work.data()
    np.save(folder / "inputs.npy", inputs)
    np.save(folder / "labels.npy", labels)
    dataset = dataset_of(inputs, labels)
    for seed in {variant.seed for variant in work.variants}:
        experiment = make_experiment(work.experiment(Variant(seed), rounds))
        world = build_world(experiment, dataset)
        np.save(folder / "parts.npy", np.stack([world.federation.train[client] for client in range(work.clients)]))
        np.savez(folder / f"initial-{seed}.npz", **{n: p.detach().numpy() for n, p in world.model.named_parameters()})
        cohorts, orders = [], []
        for number in range(1, rounds + 1):
            cohort = sample_cohort(seed, number, work.clients, work.participants)
            cohorts.append(cohort)
            orders.append(
                [np.concatenate(local_batches(seed, number, k, work.examples, experiment.local)) for k in cohort]
            )
        passes = (rounds, work.participants, work.epochs, work.examples)
        np.save(folder / f"cohorts-{seed}.npy", np.stack(cohorts))
        np.save(folder / f"orders-{seed}.npy", np.array(orders).reshape(passes))
    how = {"rounds": rounds, "classes": CLASSES, "precision": precision}
    (folder / "work.json").write_text(json.dumps({"work": asdict(work), **how}))


def unpack(folder: Path) -> tuple[Work, int, str]:
    """What ``pack`` wrote: the work, the number of rounds, the precision."""
    facts = json.loads((folder / "work.json").read_text())
    work = facts["work"]
    work |= {"shape": tuple(work["shape"]), "variants": tuple(Variant(**variant) for variant in work["variants"])}
    return Work(**work), facts["rounds"], facts["precision"]


def dataset_of(inputs: np.ndarray, labels: np.ndarray) -> fedretain.Dataset:
    """The examples as fedretain takes them; the test set is too small to cost anything."""
    return fedretain.from_arrays(inputs, labels, inputs[:CLASSES], labels[:CLASSES])
