"""A worker process: trains the clients it is told to, on one thread, and leaves the uploads in shared memory."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any, NoReturn, Protocol

import numpy as np
import torch

from fedretain.engines.engine import Uploads, World
from fedretain.engines.recorded import RecordedEngine
from fedretain.engines.shared import Layout, SharedFile, load
from fedretain.engines.stack import Work
from fedretain.engines.vectorised import VectorisedEngine
from fedretain.errors import TrainingError
from fedretain.methods import Received
from fedretain.tensors import Tensors

SLOTS = 2
"""Units that a worker has at a time: one in work, one waiting."""
NOBODY = np.empty(0, dtype=np.int64)
NOTHING: dict[int, Tensors] = {}
DICTIONARIES = ("params", "delta", "buffers", "extras", "state")


def main(line: int, world: int, broadcast: int, inboxes: Sequence[int], outboxes: Sequence[int]) -> None:
    """Serve until the other end of the line is closed; the numbers are those of open files."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # an interrupt is for the parent, whose end closes the line
    torch.set_num_threads(1)
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    connection = Connection(line)
    with contextlib.suppress(EOFError, ConnectionResetError, BrokenPipeError):
        trainer = build(*load(connection.recv_bytes(), SharedFile(world)))
        connection.send(("ready",))
        Service(connection, trainer, *_files(broadcast, inboxes, outboxes)).serve()
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

    def serve(self) -> NoReturn:
        """Until the line is closed."""
        while True:
            kind, *order = self.connection.recv()
            if kind == "round":
                round, layouts = order
                parts = iter([self.broadcast.read(layout) for layout in layouts])
                self.received = [Received(*three, round) for three in zip(parts, parts, parts, strict=True)]
            else:
                self.connection.send(self.train(*order))

    def train(self, number: int, orders: list[Any]) -> tuple[Any, ...]:
        """Train a unit; where its uploads are, or why it failed."""
        inbox, outbox = self.inboxes[number % SLOTS], self.outboxes[number % SLOTS]
        works = [Work(received, NOBODY, NOTHING.get, False) for received in self.received]
        for which, clients, states, local_models in orders:
            kept = {client: inbox.read(layout) for client, layout in states.items()}
            works[which] = Work(self.received[which], clients, kept.get, local_models)
        try:
            uploads = list(self.trainer.train_all(works))
        except TrainingError as error:
            return "failed", number, error.message, error.client, error.which
        tensors = {
            f"{index}/{kind}/{name}": value
            for index, (_, chunk) in enumerate(uploads)
            for kind in DICTIONARIES
            for name, value in getattr(chunk, kind).items()
        }
        layout, _ = outbox.write(tensors)
        facts = [(which, chunk.clients, chunk.train_loss.numpy(), chunk.steps) for which, chunk in uploads]
        return "done", number, layout, facts


def collect(outbox: SharedFile, layout: Layout, facts: list[Any]) -> list[tuple[int, Uploads]]:
    """The uploads that a worker left, in memory of their own, and the experiments that they belong to."""
    chunks: list[dict[str, Tensors]] = [{kind: {} for kind in DICTIONARIES} for _ in facts]
    for name, value in outbox.read(layout).items():
        index, kind, key = name.split("/", 2)
        chunks[int(index)][kind][key] = value.clone()
    return [
        (which, Uploads(clients=clients, **chunk, train_loss=torch.from_numpy(losses), steps=steps))
        for chunk, (which, clients, losses, steps) in zip(chunks, facts, strict=True)
    ]


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


def build(worlds: Sequence[World], inner: str) -> Trainer:
    """The engine that runs inside a worker."""
    return VectorisedEngine(*worlds) if inner == "vectorised" else OneByOne([RecordedEngine(w) for w in worlds])


def _end_with(parent: int) -> NoReturn:
    """A parent that was killed closes the line, but a worker in the middle of a long unit does not look at it."""
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(1)


def _files(
    broadcast: int, inboxes: Sequence[int], outboxes: Sequence[int]
) -> tuple[SharedFile, list[SharedFile], list[SharedFile]]:
    return SharedFile(broadcast), [SharedFile(n) for n in inboxes], [SharedFile(n) for n in outboxes]
