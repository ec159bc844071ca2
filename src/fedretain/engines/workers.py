"""Several processes, each training its share of the cohort; the same numbers whatever their number.

The data go to shared memory once, the broadcast once a round, and every upload comes back through it. A worker runs the
loop engine's steps on one thread (``inner: loop``, the same bits as the loop engine), or trains its share as one stack
(``inner: vectorised``).
"""

from __future__ import annotations

import os
import pickle
import socket
import subprocess
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any

import numpy as np

from fedretain.engines.engine import Uploads, World
from fedretain.engines.schedule import local_steps
from fedretain.engines.shared import SharedFile, dump
from fedretain.engines.vectorised import clients_in_memory, in_order
from fedretain.engines.worker import SLOTS, collect
from fedretain.errors import ConfigError, TrainingError
from fedretain.methods import Received
from fedretain.tensors import Tensors

MEMORY = {
    "MALLOC_MMAP_THRESHOLD_": str(2**30),
    "MALLOC_TRIM_THRESHOLD_": str(2**30),
    "MALLOC_TOP_PAD_": str(2**26),
}
"""Keep freed memory: fetching fresh pages for every activation costs more than some convolutions (glibc only)."""


class WorkersEngine:
    """Trains the participants of a round in worker processes."""

    def __init__(self, world: World, workers: int | None = None, inner: str = "loop") -> None:
        if world.federation.device.type != "cpu":
            raise ConfigError("engine: workers is for the CPU; use auto, vectorised or graphed on an accelerator")
        self.world, self.inner = world, inner
        self.count = workers if workers is not None else processors()
        self.pool: list[Worker] = []
        self.broadcast = SharedFile()

    def train(
        self,
        received: Received,
        cohort: np.ndarray,
        states: Callable[[int], Tensors | None],
        *,
        local_models: bool = True,
    ) -> Iterator[Uploads]:
        """Yield the uploads of the cohort in its order, as soon as those before them are there."""
        self._start()
        layouts, end = [], 0
        for tensors in (received.params, received.buffers, received.server):
            layout, end = self.broadcast.write(tensors, end)
            layouts.append(layout)
        for worker in self.pool:
            worker.send(("round", received.round, layouts), received.round)
        if self.inner == "vectorised":
            room = self.count * clients_in_memory(self.world, received)
            for start in range(0, len(cohort), room):
                part = cohort[start : start + room]
                shares = [share for share in _even_shares(self._steps(part), self.count) if len(share)]
                ended = self._run(received.round, part, shares, states, local_models)
                yield from in_order([chunk for _, chunks in sorted(ended) for chunk in chunks], np.concatenate(shares))
        else:
            yield from self._one_by_one(received.round, cohort, states, local_models)

    def close(self) -> None:
        """End the worker processes."""
        for worker in self.pool:
            worker.close()
        self.pool = []

    def _one_by_one(
        self, round: int, cohort: np.ndarray, states: Callable[[int], Tensors | None], local_models: bool
    ) -> Iterator[Uploads]:
        """Every client is a unit; the longest first, so that no worker is left with a long one at the end."""
        order = np.argsort(-self._steps(cohort), kind="stable")
        waiting: dict[int, list[Uploads]] = {}
        position = 0
        units = [order[index : index + 1] for index in range(len(order))]
        for number, uploads in self._run(round, cohort, units, states, local_models):
            waiting[int(order[number])] = uploads
            while position in waiting:
                yield from waiting.pop(position)
                position += 1

    def _run(
        self,
        round: int,
        cohort: np.ndarray,
        units: Sequence[np.ndarray],
        states: Callable[[int], Tensors | None],
        local_models: bool,
    ) -> Iterator[tuple[int, list[Uploads]]]:
        """Hand units (positions in the cohort) to whoever is free; yield them by their number as they end."""
        todo = iter(enumerate(units))
        busy = 0
        for _ in range(SLOTS):
            for worker in self.pool:
                if (unit := next(todo, None)) is not None:
                    worker.order(*unit, cohort, states, local_models, round)
                    busy += 1
        lines = {worker.line: worker for worker in self.pool}
        while busy:
            for line in wait(list(lines)):
                worker = lines[line]  # type: ignore[index]
                number, uploads = worker.result(round)
                busy -= 1
                if (unit := next(todo, None)) is not None:
                    worker.order(*unit, cohort, states, local_models, round)
                    busy += 1
                yield number, uploads

    def _steps(self, cohort: np.ndarray) -> np.ndarray:
        sizes = self.world.federation.train.sizes[cohort]
        return np.array([local_steps(size, self.world.local) for size in sizes.tolist()])

    def _start(self) -> None:
        if self.pool:
            return
        shared = SharedFile()
        try:
            message = dump((self.world, self.inner), shared)
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise ConfigError(f"engine: workers cannot be sent this experiment ({error}); use engine: loop") from error
        if b"__main__" in message:
            raise ConfigError(
                "engine: workers are other processes and cannot see what is defined in the script itself; "
                "move your method, loss or model to a module of its own, or use engine: loop"
            )
        self.pool = [Worker(shared, self.broadcast) for _ in range(self.count)]
        for worker in self.pool:
            worker.begin(message)


class Worker:
    """A worker process as its parent sees it."""

    def __init__(self, world: SharedFile, broadcast: SharedFile) -> None:
        ours, theirs = socket.socketpair()
        self.inboxes = [SharedFile() for _ in range(SLOTS)]
        self.outboxes = [SharedFile() for _ in range(SLOTS)]
        self.given = 0
        self.numbers: dict[int, int] = {}
        files = [file.number for file in (*self.inboxes, *self.outboxes)]
        arguments = (theirs.fileno(), world.number, broadcast.number, files[:SLOTS], files[SLOTS:])
        code = f"import sys; sys.path[:] = {sys.path!r}; import fedretain.engines.worker as w; w.main(*{arguments!r})"
        self.process = subprocess.Popen(
            [sys.executable, "-c", code],
            pass_fds=(theirs.fileno(), world.number, broadcast.number, *files),
            env={**MEMORY, **os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"},
            stdin=subprocess.DEVNULL,
        )
        theirs.close()
        self.line = Connection(ours.detach())
        self.finish = weakref.finalize(self, _end, self.process, self.line, [*self.inboxes, *self.outboxes])

    def begin(self, message: bytes) -> None:
        """Send the experiment; the worker imports and builds while others are started."""
        self._guarded(lambda: self.line.send_bytes(message), 0)

    def send(self, message: Any, round: int) -> None:
        """Send a message; a dead worker is an error with advice."""
        self._guarded(lambda: self.line.send(message), round)

    def order(
        self,
        number: int,
        unit: np.ndarray,
        cohort: np.ndarray,
        states: Callable[[int], Tensors | None],
        local_models: bool,
        round: int,
    ) -> None:
        """Hand over the unit with this number."""
        clients = cohort[unit]
        slot = self.given % SLOTS
        layouts, end = {}, 0
        for client in clients.tolist():
            if (state := states(client)) is not None:
                layouts[client], end = self.inboxes[slot].write(state, end)
        self.numbers[self.given] = number
        self.send(("train", self.given, clients, layouts, local_models), round)
        self.given += 1

    def result(self, round: int) -> tuple[int, list[Uploads]]:
        """The next result on the line: the unit's number and its uploads."""
        while True:
            kind, *message = self._guarded(self.line.recv, round)
            if kind == "ready":
                continue
            if kind == "failed":
                _, text, client = message
                raise TrainingError(text, round=round, client=client)
            number, layout, facts = message
            return self.numbers.pop(number), collect(self.outboxes[number % SLOTS], layout, facts)

    def close(self) -> None:
        """End the process."""
        self.finish()

    def _guarded(self, talk: Callable[[], Any], round: int) -> Any:
        try:
            return talk()
        except (EOFError, ConnectionResetError, BrokenPipeError) as error:
            code = self.process.wait()
            how = f"was killed by signal {-code}" if code < 0 else f"ended with exit status {code}"
            hint = "; signal 9 often means that memory ran out" if code == -9 else ""
            raise TrainingError(
                f"a worker process {how}{hint}; use fewer of them (engine.workers) or engine: loop", round=round
            ) from error


def processors() -> int:
    """How many processors this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _even_shares(steps: np.ndarray, count: int) -> list[np.ndarray]:
    """Positions dealt out by falling number of steps, so that every share has like work."""
    order = np.argsort(-steps, kind="stable")
    return [order[start::count] for start in range(count)]


def _end(process: subprocess.Popen[bytes], line: Connection, files: list[SharedFile]) -> None:
    line.close()
    try:
        process.wait(5)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    for file in files:
        file.close()
