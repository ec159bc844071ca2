"""Several processes, each training its share of the cohort; the same numbers whatever their number.

The data go to shared memory once, the broadcast once a round, and every upload comes back through it. A worker runs the
loop engine's steps on one thread (``inner: loop``, the same bits as the loop engine), with kernels of our own and fewer
operations (``inner: native``, other last bits), or trains its share as one stack (``inner: vectorised``).
"""

from __future__ import annotations

import logging
import pickle
import socket
import subprocess
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import zip_longest
from multiprocessing.connection import Connection, wait
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedretain.engines.chunks import in_order
from fedretain.engines.engine import Uploads, World
from fedretain.engines.loop import one_thread
from fedretain.engines.memory import clients_in_memory, keep_freed_memory
from fedretain.engines.native import available, uses_kernels
from fedretain.engines.processes import Process, can_copy_this_process, copy_of_this_process, new_process
from fedretain.engines.schedule import steps_of
from fedretain.engines.shared import Layout, SharedFile, dump, dump_names
from fedretain.engines.stack import Work, like_costs
from fedretain.engines.worker import SLOTS, Trainer, build, collect, look_ahead
from fedretain.errors import ConfigError, TrainingError
from fedretain.methods import Received
from fedretain.tensors import Tensors

LOG = logging.getLogger("fedretain")

Unit = list[tuple[int, np.ndarray]]
"""Clients that a worker trains in one go: which experiment, and their positions in its cohort."""


class WorkersEngine:
    """Trains the participants of a round in worker processes; those of several experiments side by side."""

    def __init__(self, *worlds: World, workers: int, inner: str = "loop", pool: WorkerPool | None = None) -> None:
        if worlds[0].federation.device.type != "cpu":
            raise ConfigError("engine: workers is for the CPU; use auto, vectorised or graphed on an accelerator")
        self.worlds, self.inner, self.count = worlds, inner, workers
        self.pool = pool if pool is not None else WorkerPool(workers)
        self.trainer: Trainer | None = None
        self.room: int | None = None
        self.even_units: dict[tuple[int, int], list[Unit]] = {}
        self.cuts: dict[tuple[int, int], list[int]] = {}
        """Where uneven clients, those with most steps first, are cut into shares; kept, as recordings are for sizes."""
        self.stateful = any(world.method.uses("init_client") for world in worlds)

    def train(
        self,
        received: Received,
        cohort: np.ndarray,
        states: Callable[[int], Tensors | None],
        *,
        local_models: bool = True,
        weights: Tensor | None = None,
        upcoming: np.ndarray | None = None,
    ) -> Iterator[Uploads]:
        """Yield the uploads of the cohort in its order, as soon as those before them are there."""
        for _, uploads in self.train_all([Work(received, cohort, states, local_models, weights, upcoming)]):
            yield uploads

    def train_all(self, works: Sequence[Work]) -> Iterator[tuple[int, Uploads]]:
        """The same for several experiments; yields which of them, and its uploads."""
        # Until the cohort is done: this process is one of the workers, and a second thread would wait for a processor.
        with one_thread(self.worlds[0].federation.device):
            self.start()
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
            worker.open(round, layouts)
        which = np.repeat(np.arange(len(works)), [len(work.cohort) for work in works])
        at = np.concatenate([np.arange(len(work.cohort)) for work in works])
        if self.inner != "vectorised":
            yield from self._one_by_one(works, which, at)
            return
        if self.room is None:
            self.room = self.count * clients_in_memory(self.worlds[0], works[0].received)
        room = self.room
        for start in range(0, len(at), room):
            here = slice(start, start + room)
            yield from self._in_shares(works, which[here], at[here])

    def close(self) -> None:
        """End the worker processes."""
        self.pool.close()

    def _one_by_one(self, works: Sequence[Work], which: np.ndarray, at: np.ndarray) -> Iterator[tuple[int, Uploads]]:
        """Every client is a unit; the longest first, so that no worker is left with a long one at the end."""
        order = np.argsort(-self._steps(works, which, at), kind="stable").tolist()
        experiments = which.tolist()
        waiting: dict[int, Uploads] = {}
        position = 0
        for number, ((_, uploads),) in self._run(works, [[(experiments[n], at[n : n + 1])] for n in order]):
            waiting[order[number]] = uploads
            while position in waiting:
                yield experiments[position], waiting.pop(position)
                position += 1

    def _in_shares(self, works: Sequence[Work], which: np.ndarray, at: np.ndarray) -> Iterator[tuple[int, Uploads]]:
        """Every worker gets a share of like work."""
        units = self._units(works, which, at)
        chunks: dict[int, list[Uploads]] = {}
        positions: dict[int, list[np.ndarray]] = {}
        upcoming = self._upcoming(works, which, at)
        for number, uploads in sorted(self._run(works, units, upcoming), key=lambda ended: ended[0]):
            for experiment, chunk in uploads:
                chunks.setdefault(experiment, []).append(chunk)
            for experiment, own in units[number]:
                positions.setdefault(experiment, []).append(own)
        for experiment, parts in chunks.items():
            offset = np.concatenate(positions[experiment])
            for uploads_in_order in in_order(parts, offset - offset.min()):
                yield experiment, uploads_in_order

    def _units(self, works: Sequence[Work], which: np.ndarray, at: np.ndarray) -> list[Unit]:
        """As many units of like work as there are processes; for equal clients the same in every round.

        A step takes its time whoever takes part in it, so that few clients with many steps are one share and many with
        few steps another one.
        """
        even = len(works) == 1 and self.worlds[0].federation.train.even
        key = (int(at[0]), len(at))
        if even and key in self.even_units:
            return self.even_units[key]
        steps = self._steps(works, which, at)
        if (steps == steps[0]).all():
            shares = np.array_split(np.arange(len(at)), self.count)
        else:
            order = np.argsort(-steps, kind="stable")
            if key not in self.cuts:
                self.cuts[key] = like_costs(steps[order], self.count)
            shares = [np.sort(share) for share in np.split(order, self.cuts[key])]
        experiments = range(len(works))
        units = [[(w, own) for w in experiments if len(own := at[share[which[share] == w]])] for share in shares]
        units = [unit for unit in units if unit]
        if even:
            self.even_units[key] = units
        return units

    def _upcoming(self, works: Sequence[Work], which: np.ndarray, at: np.ndarray) -> list[np.ndarray]:
        """Whom the units of the next round will train; nothing where that is not known."""
        work = works[0]
        if len(works) > 1 or work.upcoming is None:
            return []
        units = self._units([work._replace(cohort=work.upcoming)], which, at)
        return [work.upcoming[own] for ((_, own),) in units]

    def _run(
        self, works: Sequence[Work], units: Sequence[Unit], upcoming: Sequence[np.ndarray] = ()
    ) -> Iterator[tuple[int, list[tuple[int, Uploads]]]]:
        """Hand units to whoever is free; yield them by their number as they end.

        Whoever trains a unit will most likely train the one of the same number among the ``upcoming``.
        """
        assert self.trainer is not None
        round = works[0].received.round
        todo = deque(enumerate(zip_longest(units, upcoming[: len(units)])))
        lines: dict[Any, Worker] = {worker.line: worker for worker in self.pool.workers}
        while todo or any(worker.numbers for worker in lines.values()):
            # Nobody gets a second unit to wait for it before everybody has one. The last one is for this process, which
            # is free now, and not for a queue.
            for worker, slot in ((worker, slot) for slot in range(SLOTS) for worker in lines.values()):
                if todo and len(worker.numbers) <= slot and (len(todo) > 1 or not worker.numbers):
                    number, (unit, after) = todo.popleft()
                    worker.order(number, unit, works, after, stateful=self.stateful)
            mine = todo.popleft() if todo else None
            if mine is not None:
                yield mine[0], self._train_here(*mine[1], works)
            busy = [line for line, worker in lines.items() if worker.numbers]
            for line in wait(busy, timeout=None if mine is None else 0):
                yield lines[line].result(round)

    def _train_here(self, unit: Unit, upcoming: np.ndarray | None, works: Sequence[Work]) -> list[tuple[int, Uploads]]:
        """This process trains a unit like any worker."""
        assert self.trainer is not None
        shares = [work._replace(cohort=work.cohort[:0]) for work in works]
        for which, at in unit:
            weights = works[which].weights
            own = None if weights is None else weights[torch.from_numpy(at)]
            shares[which] = works[which]._replace(cohort=works[which].cohort[at], weights=own)
        uploads = list(self.trainer.train_all(shares))
        look_ahead(self.trainer, works[0].received.round + 1, upcoming)
        return uploads

    def _steps(self, works: Sequence[Work], which: np.ndarray, at: np.ndarray) -> np.ndarray:
        steps = np.empty(len(at), dtype=np.int64)
        for experiment, (work, world) in enumerate(zip(works, self.worlds, strict=True)):
            here = which == experiment
            if here.any():
                steps[here] = steps_of(world.federation.train.sizes[work.cohort[at[here]]], world.local)
        return steps

    def start(self) -> None:
        """Start the processes, if that is not done; the first round does it else."""
        if self.trainer is not None:
            return
        keep_freed_memory()
        if uses_kernels(model := self.worlds[0].model):
            found = available(next(model.parameters()).dtype)  # compiled once, before there are copies of this process
            if self.inner == "native" and not found:
                LOG.info("engine: native has no kernels here and trains like loop; fedretain doctor says why")
        if self.count > 1:
            self._refuse_strangers()
            if not self.pool.workers and can_copy_this_process():
                self.pool.start_copies(self.worlds, self.inner)
            else:
                self.pool.start()
                examples = [tensor for world in self.worlds for tensor in world.federation.tensors]
                message = dump((self.worlds, self.inner), self.pool.world, moved=examples)
                for worker in self.pool.workers:
                    worker.begin(message)
        self.trainer = build(self.worlds, self.inner)

    def _refuse_strangers(self) -> None:
        """The experiment must be one that other processes can read, whichever way they are started."""
        try:
            names = dump_names((self.worlds, self.inner))
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise ConfigError(f"engine: workers cannot be sent this experiment ({error}); use engine: loop") from error
        if b"__main__" in names:
            raise ConfigError(
                "engine: workers are other processes and cannot see what is defined in the script itself; "
                "move your method, loss or model to a module of its own, or use engine: loop"
            )


class WorkerPool:
    """Processes that wait for an experiment, or copies of this one, which hold it already.

    New ones that are started early import while their parent still reads the data. ``count`` includes the parent, which
    trains too.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self.world, self.broadcast = SharedFile(), SharedFile()
        self.workers: list[Worker] = []
        self.closed = False

    def start(self) -> WorkerPool:
        """Start the processes, if that is not done."""
        if not self.workers:
            self.workers = [Worker(self.broadcast, partial(new_process, self.world)) for _ in range(self.count - 1)]
        return self

    def start_copies(self, worlds: Sequence[World], inner: str) -> None:
        """Copy this process, with the experiment: no imports, and its examples in the same memory."""
        for _ in range(self.count - 1):
            self.workers.append(Worker(self.broadcast, partial(copy_of_this_process, worlds, inner)))

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

    def __init__(self, broadcast: SharedFile, start: Callable[[int, int, list[int], list[int]], Process]) -> None:
        ours, theirs = socket.socketpair()
        self.inboxes = [SharedFile() for _ in range(SLOTS)]
        self.outboxes = [SharedFile() for _ in range(SLOTS)]
        self.layouts: list[Layout] = []
        self.opening: tuple[int, list[Layout] | None] | None = None
        """A round that has begun, and where its broadcast lies if that is new; until the worker is told."""
        self.uploaded: list[Layout] = [[] for _ in range(SLOTS)]
        """Where the last uploads of each slot lie."""
        self.given = 0
        self.numbers: dict[int, int] = {}
        files = [file.number for file in (*self.inboxes, *self.outboxes)]
        self.process = start(theirs.fileno(), broadcast.number, files[:SLOTS], files[SLOTS:])
        theirs.close()
        self.line = Connection(ours.detach())
        self.finish = weakref.finalize(self, _end, self.process, self.line, [*self.inboxes, *self.outboxes])

    def begin(self, message: bytes) -> None:
        """Send the experiment; the worker imports and builds while others are started."""
        self._guarded(lambda: self.line.send_bytes(message), 0)

    def send(self, message: Any, round: int) -> None:
        """Send a message; a dead worker is an error with advice."""
        data = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
        self._guarded(lambda: self.line.send_bytes(data), round)

    def open(self, round: int, layouts: list[Layout]) -> None:
        """A round begins; the worker hears of it with its first order.

        Where the broadcast lies is told when that is not where it lay in the last round.
        """
        untold = self.opening[1] if self.opening is not None else None
        self.opening = (round, layouts if layouts != self.layouts else untold)
        self.layouts = layouts

    def order(
        self, number: int, unit: Unit, works: Sequence[Work], upcoming: np.ndarray | None, *, stateful: bool
    ) -> None:
        """Hand over the unit with this number, and what its clients kept where the method is ``stateful``.

        ``upcoming`` are the clients that it will most likely train in the next round.
        """
        slot = self.given % SLOTS
        orders, end = [], 0
        for which, at in unit:
            work = works[which]
            clients = work.cohort[at]
            layouts = {}
            for client in clients.tolist() if stateful else ():
                if (state := work.states(client)) is not None:
                    layouts[client], end = self.inboxes[slot].write(state, end)
            weights = None if work.weights is None else work.weights.numpy()[at]
            orders.append((which, clients, layouts, work.local_models, weights))
        self.numbers[self.given] = number
        self.send((self.given, orders, upcoming, self.opening), works[0].received.round)
        self.opening = None
        self.given += 1

    def result(self, round: int) -> tuple[int, list[tuple[int, Uploads]]]:
        """The next result on the line: the unit's number and its uploads, by experiment."""
        while True:
            kind, *message = pickle.loads(self._guarded(self.line.recv_bytes, round))
            if kind == "ready":
                continue
            if kind == "failed":
                _, text, client, which = message
                raise TrainingError(text, round=round, client=client, which=which)
            number, layout, facts = message
            slot = number % SLOTS
            self.uploaded[slot] = self.uploaded[slot] if layout is None else layout
            return self.numbers.pop(number), collect(self.outboxes[slot], self.uploaded[slot], facts)

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


def _end(process: Process, line: Connection, files: list[SharedFile]) -> None:
    line.close()
    try:
        process.wait(5)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    for file in files:
        file.close()
