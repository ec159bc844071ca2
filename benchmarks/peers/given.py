"""What every runner is given, and how it reports: ``python -m benchmarks.peers.RUNNER WORK_FOLDER OUT_FOLDER``.

Needs NumPy and PyTorch only, so that it runs in every peer's environment.
"""

from __future__ import annotations

import functools
import json
import sys
import time
from collections.abc import Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.peers.networks import NETWORKS


class Given:
    """A work as ``benchmarks.works.pack`` wrote it down."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        facts = json.loads((folder / "work.json").read_text())
        work = facts["work"]
        self.clients: int = work["clients"]
        self.participants: int = work["participants"]
        self.epochs: int = work["epochs"]
        self.batch_size: int = work["batch_size"]
        self.rounds: int = facts["rounds"]
        self.classes: int = facts["classes"]
        self.dtype: torch.dtype = getattr(torch, facts["precision"])
        self.variants: list[dict[str, Any]] = work["variants"]
        self._shape, self._model = work["shape"], work["model"]
        self._inputs = torch.from_numpy(np.load(folder / "inputs.npy"))
        self._labels = torch.from_numpy(np.load(folder / "labels.npy"))
        self._parts = torch.from_numpy(np.load(folder / "parts.npy"))

    def model(self, seed: int) -> torch.nn.Module:
        """The network with the initial parameters of this seed."""
        model = NETWORKS[self._model["name"]](self._shape, self.classes)
        with np.load(self.folder / f"initial-{seed}.npz") as initial:
            model.load_state_dict({name: torch.from_numpy(initial[name]) for name in initial.files})
        return model.to(self.dtype)

    @functools.cache  # noqa: B019 (lives as long as the process)
    def schedule(self, seed: int) -> tuple[np.ndarray, Tensor]:
        """Who takes part [rounds, participants], and in which order [rounds, participants, epochs, examples]."""
        orders = torch.from_numpy(np.load(self.folder / f"orders-{seed}.npy"))
        return np.load(self.folder / f"cohorts-{seed}.npy"), orders

    def cohort(self, seed: int, number: int) -> list[int]:
        """The participants of round ``number`` (from 1 on), ascending."""
        cohort: list[int] = self.schedule(seed)[0][number - 1].tolist()
        return cohort

    def order(self, seed: int, number: int, client: int) -> Tensor:
        """In which order a participant goes through its examples [epochs, examples]."""
        cohorts, orders = self.schedule(seed)
        return orders[number - 1, int(np.searchsorted(cohorts[number - 1], client))]

    def raw(self, client: int) -> tuple[Tensor, Tensor]:
        """A client's examples as they are stored: pixels 0 to 255 as bytes, and labels."""
        at = self._parts[client]
        return self._inputs[at], self._labels[at]

    def examples(self, client: int) -> tuple[Tensor, Tensor]:
        """A client's examples as the network takes them. Called once a round, as fedretain does."""
        pixels, labels = self.raw(client)
        return self.scaled(pixels), labels

    def scaled(self, pixels: Tensor) -> Tensor:
        """Bytes to numbers in [0, 1]."""
        return pixels.to(self.dtype) / 255

    def counts(self, client: int) -> Tensor:
        """How many examples of each class a client holds."""
        return torch.bincount(self._labels[self._parts[client]], minlength=self.classes)

    def batches(self, inputs: Tensor, labels: Tensor, order: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """The batches of one epoch."""
        for at in order.split(self.batch_size):
            yield inputs[at], labels[at]


class Objective(torch.nn.Module):
    """The local loss of one client: cross-entropy, or the re-weighted softmax −f_y + log Σ_c β_c exp f_c.

    β are the client's class proportions; wsm-paper Eq. 4.
    """

    def __init__(self, loss: str, counts: Tensor) -> None:
        super().__init__()
        shares = counts.double() / counts.sum()
        self.shift = shares.log() if loss == "wsm" else None

    def forward(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Mean over the batch."""
        if self.shift is None:
            return torch.nn.functional.cross_entropy(logits, labels)
        own = logits.gather(1, labels.unsqueeze(1)).squeeze(1)
        return (torch.logsumexp(logits + self.shift.to(logits.dtype), dim=1) - own).mean()


class Watch:
    """Notes when each round ended, and keeps the final parameters for the comparison of the runners."""

    def __init__(self, out: Path) -> None:
        self.out = out
        self.marks: list[list[float]] = []

    def variant(self) -> None:
        """A new training begins."""
        self.marks.append([])

    def round(self) -> None:
        """A round has ended: the server has its new model."""
        self.marks[-1].append(time.perf_counter())

    def keep(self, weights: Mapping[str, Tensor | np.ndarray], number: int | None = None) -> None:
        """The parameters at the end of a training: the latest, or the one with this number."""
        arrays = {name: np.asarray(torch.as_tensor(value).detach()) for name, value in weights.items()}
        np.savez(self.out / f"weights-{len(self.marks) - 1 if number is None else number}.npz", **arrays)

    def report(self) -> None:
        """Print the line that the benchmark reads. Times are those of ``perf_counter``, the same in all processes."""
        line = {
            "seconds": seconds_per_round(self.marks),
            "first_round_at": self.marks[0][0],
            "last_round_at": self.marks[-1][-1],
        }
        print("\n" + json.dumps(line), flush=True)


def seconds_per_round(marks: list[list[float]]) -> list[float]:
    """Each round after the first; the trainings of a sweep, done one after another, add up."""
    each = [[later - earlier for earlier, later in pairwise(times)] for times in marks]
    return [sum(together) for together in zip(*each, strict=True)]


def train_client(model: torch.nn.Module, given: Given, variant: Mapping[str, Any], number: int, client: int) -> None:
    """Local training as one writes it by hand; the model is trained in place."""
    objective = Objective(variant["loss"], given.counts(client))
    optimizer = torch.optim.SGD(model.parameters(), lr=variant["lr"])
    inputs, labels = given.examples(client)
    model.train()
    for order in given.order(variant["seed"], number, client):
        for batch_inputs, batch_labels in given.batches(inputs, labels, order):
            optimizer.zero_grad()
            objective(model(batch_inputs), batch_labels).backward()
            optimizer.step()


@functools.cache
def given_in(folder: str) -> Given:
    """The work in a folder, read once in a process."""
    return Given(Path(folder))


def from_command_line() -> tuple[Given, Watch]:
    """What a runner starts with."""
    return given_in(sys.argv[1]), Watch(Path(sys.argv[2]))
