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
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from multiprocessing.connection import Connection, wait
from typing import Any

import numpy as np

from fedretain.engines.engine import Uploads, World
from fedretain.engines.loop import one_thread
from fedretain.engines.memory import keep_freed_memory
from fedretain.engines.schedule import local_steps
from fedretain.engines.shared import SharedFile, dump
from fedretain.engines.stack import Work
from fedretain.engines.vectorised import clients_in_memory, in_order
from fedretain.engines.worker import SLOTS, Trainer, build, collect
from fedretain.errors import ConfigError, TrainingError
from fedretain.methods import Received
from fedretain.tensors import Tensors

Place = tuple[int, int]
"""Which experiment, and the position in its cohort."""


class WorkersEngine:
    """Trains the participants of a round in worker processes; those of several experiments side by side."""

    def __init__(self, *worlds: World, workers: int, inner: str = "loop", pool: WorkerPool | None = None) -> None:
        if worlds[0].federation.device.type != "cpu":
            raise ConfigError("engine: workers is for the CPU; use auto, vectorised or graphed on an accelerator")
        self.worlds, self.inner, self.count = worlds, inner, workers
        self.pool = pool if pool is not None else WorkerPool(workers)
        self.trainer: Trainer | None = None

    def train(
        self,
        received: Received,
        cohort: np.ndarray,
        states: Callable[[int], Tensors | None],
        *,
        local_models: bool = True,
    ) -> Iterator[Uploads]:
        """Yield the uploads of the cohort in its order, as soon as those before them are there."""
        for _, uploads in self.train_all([Work(received, cohort, states, local_models)]):
            yield uploads

    def train_all(self, works: Sequence[Work]) -> Iterator[tuple[int, Uploads]]:
        """The same for several experiments; yields which of them, and its uploads."""
        # Until the cohort is done: this process is one of the workers, and a second thread would wait for a processor.
        with one_thread(self.worlds[0].federation.device):
            self._start()
            yield from self._trained(works)

    def _trained(self, works: Sequence[Work]) -> Iterator[tuple[int, Uploads]]:
        """Broadcast, then the uploads."""
        round = works[0].received.round
        layouts, end = [], 0
        for work in works:
            for tensors in (work.received.params, work.received.buffers, work.received.server):
                layout, end = self.pool.broadcast.write(tensors, end)
                layouts.append(layout)
        for worker in self.pool.workers:
            worker.send(("round", round, layouts), round)
        places = [(which, at) for which, work in enumerate(works) for at in range(len(work.cohort))]
        if self.inner == "loop":
            yield from self._one_by_one(works, places)
            return
        room = self.count * clients_in_memory(self.worlds[0], works[0].received)
        for start in range(0, len(places), room):
            yield from self._in_shares(works, places[start : start + room])

    def close(self) -> None:
        """End the worker processes."""
        self.pool.close()

    def _one_by_one(self, works: Sequence[Work], places: list[Place]) -> Iterator[tuple[int, Uploads]]:
        """Every client is a unit; the longest first, so that no worker is left with a long one at the end."""
        order = np.argsort(-self._steps(works, places), kind="stable").tolist()
        waiting: dict[int, Uploads] = {}
        position = 0
        for number, ((_, uploads),) in self._run(works, [[places[at]] for at in order]):
            waiting[order[number]] = uploads
            while position in waiting:
                yield places[position][0], waiting.pop(position)
                position += 1

    def _in_shares(self, works: Sequence[Work], places: list[Place]) -> Iterator[tuple[int, Uploads]]:
        """Every worker gets a share of like work."""
        steps = self._steps(works, places)
        if (steps == steps[0]).all():
            shares = [share.tolist() for share in np.array_split(np.arange(len(places)), self.count)]
        else:
            order = np.argsort(-steps, kind="stable")
            shares = [np.sort(order[start :: self.count]).tolist() for start in range(self.count)]
        units = [[places[at] for at in share] for share in shares if share]
        chunks: dict[int, list[Uploads]] = {}
        positions: dict[int, list[int]] = {}
        for number, uploads in sorted(self._run(works, units), key=lambda ended: ended[0]):
            for which, chunk in uploads:
                chunks.setdefault(which, []).append(chunk)
            for which, at in units[number]:
                positions.setdefault(which, []).append(at)
        for which, parts in chunks.items():
            offset = np.array(positions[which])
            for uploads_in_order in in_order(parts, offset - offset.min()):
                yield which, uploads_in_order

    def _run(
        self, works: Sequence[Work], units: Sequence[list[Place]]
    ) -> Iterator[tuple[int, list[tuple[int, Uploads]]]]:
        """Hand units to whoever is free; yield them by their number as they end."""
        assert self.trainer is not None
        round = works[0].received.round
        todo = deque(enumerate(units))
        lines: dict[Any, Worker] = {worker.line: worker for worker in self.pool.workers}
        while todo or any(worker.numbers for worker in lines.values()):
            for worker in lines.values():
                # The last unit is for this process, which is free now, and not for a queue.
                while todo and len(worker.numbers) < SLOTS and (len(todo) > 1 or not worker.numbers):
                    worker.order(*todo.popleft(), works)
            mine = todo.popleft() if todo else None
            if mine is not None:
                yield mine[0], self._train_here(mine[1], works)
            busy = [line for line, worker in lines.items() if worker.numbers]
            for line in wait(busy, timeout=None if mine is None else 0):
                yield lines[line].result(round)

    def _train_here(self, unit: list[Place], works: Sequence[Work]) -> list[tuple[int, Uploads]]:
        """This process trains a unit like any worker."""
        assert self.trainer is not None
        shares = [work._replace(cohort=work.cohort[:0]) for work in works]
        for which, group in groupby(unit, key=lambda place: place[0]):
            shares[which] = works[which]._replace(cohort=works[which].cohort[[at for _, at in group]])
        return list(self.trainer.train_all(shares))

    def _steps(self, works: Sequence[Work], places: list[Place]) -> np.ndarray:
        sizes = [self.worlds[which].federation.train.sizes[works[which].cohort[at]] for which, at in places]
        local = self.worlds[0].local
        steps = {size: local_steps(size, local) for size in {int(size) for size in sizes}}
        return np.array([steps[int(size)] for size in sizes])

    def _start(self) -> None:
        if self.trainer is not None:
            return
        keep_freed_memory()
        if self.count > 1:
            self.pool.start()
            message = self._message()
            for worker in self.pool.workers:
                worker.begin(message)
        self.trainer = build(self.worlds, self.inner)

    def _message(self) -> bytes:
        """The experiments as other processes can read them."""
        try:
            message = dump((self.worlds, self.inner), self.pool.world)
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise ConfigError(f"engine: workers cannot be sent this experiment ({error}); use engine: loop") from error
        if b"__main__" in message:
            raise ConfigError(
                "engine: workers are other processes and cannot see what is defined in the script itself; "
                "move your method, loss or model to a module of its own, or use engine: loop"
            )
        return message


class WorkerPool:
    """Processes that wait for an experiment; started early, they import while their parent still reads the data.

    ``count`` includes the parent, which trains too.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self.world, self.broadcast = SharedFile(), SharedFile()
        self.workers: list[Worker] = []
        self.closed = False

    def start(self) -> WorkerPool:
        """Start the processes, if that is not done."""
        if not self.workers:
            self.workers = [Worker(self.world, self.broadcast) for _ in range(self.count - 1)]
        return self

    def close(self) -> None:
        """End the processes and let go of the files; once is enough."""
        if self.closed:
            return
        self.closed = True
        for worker in self.workers:
            worker.close()
        self.world.close()
        self.broadcast.close()
        self.workers = []


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
            env={**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"},
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

    def order(self, number: int, unit: list[Place], works: Sequence[Work]) -> None:
        """Hand over the unit with this number."""
        slot = self.given % SLOTS
        orders, end = [], 0
        for which, group in groupby(unit, key=lambda place: place[0]):
            clients = works[which].cohort[[at for _, at in group]]
            layouts = {}
            for client in clients.tolist():
                if (state := works[which].states(client)) is not None:
                    layouts[client], end = self.inboxes[slot].write(state, end)
            orders.append((which, clients, layouts, works[which].local_models))
        self.numbers[self.given] = number
        self.send(("train", self.given, orders), works[0].received.round)
        self.given += 1

    def result(self, round: int) -> tuple[int, list[tuple[int, Uploads]]]:
        """The next result on the line: the unit's number and its uploads, by experiment."""
        while True:
            kind, *message = self._guarded(self.line.recv, round)
            if kind == "ready":
                continue
            if kind == "failed":
                _, text, client, which = message
                raise TrainingError(text, round=round, client=client, which=which)
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


def _end(process: subprocess.Popen[bytes], line: Connection, files: list[SharedFile]) -> None:
    line.close()
    try:
        process.wait(5)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    for file in files:
        file.close()
