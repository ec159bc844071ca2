"""A worker process: trains the clients it is told to, on one thread, and leaves the uploads in shared memory."""

from __future__ import annotations

import contextlib
import gc
import os
import pickle
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any, NoReturn, Protocol

import numpy as np
import torch

from fedretain.engines.engine import Uploads, World
from fedretain.engines.memory import keep_freed_memory
from fedretain.engines.recorded import RecordedEngine, engines_for_all
from fedretain.engines.shared import Layout, SharedFile, load
from fedretain.engines.stack import Work
from fedretain.engines.sums import Sums
from fedretain.engines.vectorised import VectorisedEngine
from fedretain.errors import TrainingError
from fedretain.methods import Received
from fedretain.tensors import Tensors

SLOTS = 2
"""Units that a worker has at a time: one in work, one waiting."""
NOBODY = np.empty(0, dtype=np.int64)
NOTHING: dict[int, Tensors] = {}
DICTIONARIES = ("params", "delta", "buffers", "extras", "state")
SUMMED = ("delta", "mean", "total", "buffers")
"""The dictionaries of ``Sums``."""


def main(line: int, world: int, broadcast: int, inboxes: Sequence[int], outboxes: Sequence[int]) -> None:
    """A process of its own: the experiment comes over the line. The numbers are those of open files."""
    keep_freed_memory()
    files = _files(broadcast, inboxes, outboxes)
    _serve(line, lambda connection: build(*load(connection.recv_bytes(), SharedFile(world))), files)


def copied_main(
    line: int, worlds: Sequence[World], inner: str, broadcast: int, inboxes: Sequence[int], outboxes: Sequence[int]
) -> None:
    """A copy of its parent, which holds the experiment already."""
    gc.freeze()  # what came with the copy stays in the memory that both have: the collector would write to it
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # what the parent does then is for the parent
    _close_all_but({0, 1, 2, line, broadcast, *inboxes, *outboxes})
    _serve(line, lambda connection: build(worlds, inner), _files(broadcast, inboxes, outboxes))


def _serve(
    line: int,
    trainer: Callable[[Connection], Trainer],
    files: tuple[SharedFile, list[SharedFile], list[SharedFile]],
) -> NoReturn:
    """Until the other end of the line is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # an interrupt is for the parent, whose end closes the line
    torch.set_num_threads(1)
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    connection = Connection(line)
    with contextlib.suppress(EOFError, ConnectionResetError, BrokenPipeError):
        made = trainer(connection)
        connection.send_bytes(pickle.dumps(("ready",)))
        Service(connection, made, *files).serve()
    os._exit(0)  # nothing to save: the parent holds everything, and it is waiting


class Trainer(Protocol):
    """What runs inside a worker."""

    def train_all(self, works: Sequence[Work]) -> Iterator[tuple[int, Uploads]]:
        """Train the clients of each experiment; yield which of them, and its uploads."""


@dataclass
class Service:
    """Takes orders off the line: the round's broadcast, then units of clients to train."""

    connection: Connection
    trainer: Trainer
    broadcast: SharedFile
    inboxes: list[SharedFile]
    outboxes: list[SharedFile]
    received: list[Received] = field(default_factory=list)
    told: list[Layout] = field(default_factory=lambda: [[] for _ in range(SLOTS)])
    """Where the last uploads of each slot lie, as the parent knows."""

    def serve(self) -> NoReturn:
        """Until the line is closed."""
        while True:
            number, orders, upcoming, opening = pickle.loads(self.connection.recv_bytes())
            if opening is not None:
                self.open(*opening)
            self.connection.send_bytes(pickle.dumps(self.train(number, orders), pickle.HIGHEST_PROTOCOL))
            if not self.connection.poll():
                look_ahead(self.trainer, self.received[0].round + 1, upcoming)

    def open(self, round: int, layouts: list[Layout] | None) -> None:
        """A round's broadcast lies where the last one's did, if nothing else is said."""
        if layouts is None:
            self.received = [Received(*before[:3], round) for before in self.received]
            return
        parts = iter([self.broadcast.read(layout) for layout in layouts])
        self.received = [Received(*three, round) for three in zip(parts, parts, parts, strict=True)]

    def train(self, number: int, orders: list[Any]) -> tuple[Any, ...]:
        """Train a unit; where its uploads are, or why it failed."""
        inbox, outbox = self.inboxes[number % SLOTS], self.outboxes[number % SLOTS]
        works = [Work(received, NOBODY, NOTHING.get, False) for received in self.received]
        for which, clients, states, local_models, weights in orders:
            kept = {client: inbox.read(layout) for client, layout in states.items()}
            by = None if weights is None else torch.from_numpy(weights)
            works[which] = Work(self.received[which], clients, kept.get, local_models, by)
        try:
            uploads = list(self.trainer.train_all(works))
        except TrainingError as error:
            return "failed", number, error.message, error.client, error.which
        tensors = {
            f"{index}/{kind}/{name}": value
            for index, (_, chunk) in enumerate(uploads)
            for kind, values in _tensors_of(chunk)
            for name, value in values.items()
        }
        layout, _ = outbox.write(tensors)
        slot = number % SLOTS
        told = None if layout == self.told[slot] else layout
        self.told[slot] = layout
        facts = [
            (which, chunk.clients, chunk.train_loss.numpy(), chunk.steps, chunk.sums and chunk.sums.bytes_up)
            for which, chunk in uploads
        ]
        return "done", number, told, facts


def _tensors_of(uploads: Uploads) -> Iterator[tuple[str, Tensors]]:
    for kind in DICTIONARIES:
        yield kind, getattr(uploads, kind)
    if uploads.sums is not None:
        for kind in SUMMED:
            yield f"sums.{kind}", getattr(uploads.sums, kind)


def collect(outbox: SharedFile, layout: Layout, facts: list[Any]) -> list[tuple[int, Uploads]]:
    """The uploads that a worker left, in memory of their own, and the experiments that they belong to."""
    kinds = (*DICTIONARIES, *(f"sums.{kind}" for kind in SUMMED))
    chunks: list[dict[str, Tensors]] = [{kind: {} for kind in kinds} for _ in facts]
    for name, value in outbox.read(layout).items():
        index, kind, key = name.split("/", 2)
        chunks[int(index)][kind][key] = value.clone()
    found = []
    for chunk, (which, clients, losses, steps, bytes_up) in zip(chunks, facts, strict=True):
        summed = [chunk.pop(f"sums.{kind}") for kind in SUMMED]
        sums = None if bytes_up is None else Sums(**dict(zip(SUMMED, summed, strict=True)), bytes_up=bytes_up)
        found.append((which, Uploads(clients, **chunk, train_loss=torch.from_numpy(losses), steps=steps, sums=sums)))
    return found


@dataclass
class OneByOne:
    """The loop engine's steps, for the clients of several experiments."""

    engines: list[RecordedEngine]

    def train_all(self, works: Sequence[Work]) -> Iterator[tuple[int, Uploads]]:
        """One client after another."""
        for which, work in enumerate(works):
            try:
                for uploads in self.engines[which].train(
                    work.received, work.cohort, work.states, local_models=work.local_models
                ):
                    yield which, uploads
            except TrainingError as error:
                error.which = which
                raise


def look_ahead(trainer: Trainer, round: int, upcoming: np.ndarray | None) -> None:
    """Prepare what this process will most likely train next, if it is told and trains in stacks."""
    if upcoming is not None and isinstance(trainer, VectorisedEngine):
        trainer.look_ahead(upcoming, round)


def build(worlds: Sequence[World], inner: str) -> Trainer:
    """The engine that runs inside a worker."""
    if inner == "vectorised":
        return VectorisedEngine(*worlds)
    return OneByOne(engines_for_all(worlds, exact=inner == "loop"))


def _end_with(parent: int) -> NoReturn:
    """A parent that was killed closes the line, but a worker in the middle of a long unit does not look at it."""
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(1)


def _close_all_but(kept: set[int]) -> None:
    """Let go of the parent's files: its lock on the run directory and its ends of the lines must end with it."""
    numbers = [int(entry.name) for entry in os.scandir("/proc/self/fd")]
    for number in set(numbers) - kept:
        with contextlib.suppress(OSError):
            os.close(number)


def _files(
    broadcast: int, inboxes: Sequence[int], outboxes: Sequence[int]
) -> tuple[SharedFile, list[SharedFile], list[SharedFile]]:
    return SharedFile(broadcast), [SharedFile(n) for n in inboxes], [SharedFile(n) for n in outboxes]
