"""A worker process: trains the clients it is told to, on one thread, and leaves the uploads in shared memory."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, NoReturn

import numpy as np
import torch

from fedretain.engines.engine import Engine, Uploads, World
from fedretain.engines.recorded import RecordedEngine
from fedretain.engines.shared import Layout, SharedFile, load
from fedretain.engines.vectorised import VectorisedEngine
from fedretain.errors import TrainingError
from fedretain.methods import Received
from fedretain.tensors import Tensors

SLOTS = 2
"""Units that a worker has at a time: one in work, one waiting."""
DICTIONARIES = ("params", "delta", "buffers", "extras", "state")


def main(line: int, world: int, broadcast: int, inboxes: Sequence[int], outboxes: Sequence[int]) -> None:
    """Serve until the other end of the line is closed; the numbers are those of open files."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # an interrupt is for the parent, whose end closes the line
    torch.set_num_threads(1)
    connection = Connection(line)
    with contextlib.suppress(EOFError, ConnectionResetError, BrokenPipeError):
        engine = build(*load(connection.recv_bytes(), SharedFile(world)))
        connection.send(("ready",))
        Service(connection, engine, *_files(broadcast, inboxes, outboxes)).serve()
    os._exit(0)  # nothing to save: the parent holds everything, and it is waiting


@dataclass
class Service:
    """Takes orders off the line: the round's broadcast, then units of clients to train."""

    connection: Connection
    engine: Engine
    broadcast: SharedFile
    inboxes: list[SharedFile]
    outboxes: list[SharedFile]
    received: Received | None = None

    def serve(self) -> NoReturn:
        """Until the line is closed."""
        while True:
            kind, *order = self.connection.recv()
            if kind == "round":
                round, layouts = order
                params, buffers, server = (self.broadcast.read(layout) for layout in layouts)
                self.received = Received(params, buffers, server, round)
            else:
                self.connection.send(self.train(*order))

    def train(self, number: int, cohort: np.ndarray, states: dict[int, Layout], local_models: bool) -> tuple[Any, ...]:
        """Train a unit; where its uploads are, or why it failed."""
        assert self.received is not None
        inbox, outbox = self.inboxes[number % SLOTS], self.outboxes[number % SLOTS]
        kept = {client: inbox.read(layout) for client, layout in states.items()}
        try:
            uploads = list(self.engine.train(self.received, cohort, kept.get, local_models=local_models))
        except TrainingError as error:
            return "failed", number, error.message, error.client
        tensors = {
            f"{index}/{kind}/{name}": value
            for index, chunk in enumerate(uploads)
            for kind in DICTIONARIES
            for name, value in getattr(chunk, kind).items()
        }
        layout, _ = outbox.write(tensors)
        facts = [(chunk.clients, chunk.train_loss.numpy(), chunk.steps) for chunk in uploads]
        return "done", number, layout, facts


def collect(outbox: SharedFile, layout: Layout, facts: list[Any]) -> list[Uploads]:
    """The uploads that a worker left, in memory of their own."""
    chunks: list[dict[str, Tensors]] = [{kind: {} for kind in DICTIONARIES} for _ in facts]
    for name, value in outbox.read(layout).items():
        index, kind, key = name.split("/", 2)
        chunks[int(index)][kind][key] = value.clone()
    return [
        Uploads(clients=clients, **chunk, train_loss=torch.from_numpy(losses), steps=steps)
        for chunk, (clients, losses, steps) in zip(chunks, facts, strict=True)
    ]


def build(world: World, inner: str) -> Engine:
    """The engine that runs inside a worker."""
    return VectorisedEngine(world) if inner == "vectorised" else RecordedEngine(world)


def _files(
    broadcast: int, inboxes: Sequence[int], outboxes: Sequence[int]
) -> tuple[SharedFile, list[SharedFile], list[SharedFile]]:
    return SharedFile(broadcast), [SharedFile(n) for n in inboxes], [SharedFile(n) for n in outboxes]
