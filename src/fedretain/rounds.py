"""The round loop: sample clients, train them, combine their uploads, measure. Read this file first."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from fedretain.config import Experiment
from fedretain.data.federation import Federation
from fedretain.engines import Engine, Uploads, World
from fedretain.engines.schedule import sample_cohort
from fedretain.engines.sums import Sums
from fedretain.errors import TrainingError
from fedretain.evaluation import evaluate_all
from fedretain.methods import Received
from fedretain.probes import (
    EARLIER_ROUNDS,
    MEASURES,
    ForgettingRecord,
    Moment,
    check_measures,
    means,
    measure_forgetting,
    measure_personalised,
)
from fedretain.runs.checkpoint import Checkpoint
from fedretain.runs.clients import ClientStore
from fedretain.runs.metrics import Row
from fedretain.server import ServerState, advance, download_bytes, example_weights, receive
from fedretain.tensors import Tensors, all_finite

DRAWN_AHEAD = 2000
"""Participants that are drawn at once, of one round or of several."""
Records = dict[str, dict[str, np.ndarray]]
"""Arrays measured in a round, by the folder of the run directory that they go to."""


class Ended(NamedTuple):
    """A round that is over."""

    reached: Checkpoint
    row: Row
    records: Records


def initial_state(experiment: Experiment, world: World) -> ServerState:
    """The server before the first round. The model's own tensors are never trained; copies of them are."""
    params = {name: p.detach().clone() for name, p in world.model.named_parameters()}
    buffers = {name: b.detach().clone() for name, b in world.model.named_buffers()}
    memory = experiment.server.build_optimizer().init(params)
    return ServerState(0, params, buffers, world.method.init_server(params), memory)


def train_rounds(
    experiment: Experiment, world: World, engine: Engine, start: Checkpoint, store: ClientStore | None = None
) -> Iterator[Ended]:
    """The round loop. Yields where each round ended, its metrics, and the larger measurements that were due.

    What was yielded is never changed afterwards: whatever interrupts a round, the one before it can be saved. What a
    stateful method keeps for each client goes to the ``store``, by default one in memory.
    """
    rounds = Rounds(experiment, world, start, store)
    while not rounds.over:
        order = rounds.open()
        uploads = engine.train(
            order.received,
            order.cohort,
            order.states,
            local_models=order.measuring,
            weights=order.summed_by,
            upcoming=order.upcoming,
        )
        yield rounds.close(order, uploads)


class Order(NamedTuple):
    """What an engine is to do in a round."""

    received: Received
    cohort: np.ndarray
    weights: Tensor
    states: Callable[[int], Tensors | None]
    measuring: bool
    summed_by: Tensor | None
    """The weights, where the method does not weigh anew."""
    upcoming: np.ndarray | None
    """Who takes part in the next round, where that is drawn already."""
    started: float


class Rounds:
    """The rounds of one experiment: each is opened, trained by an engine, and closed."""

    def __init__(
        self, experiment: Experiment, world: World, start: Checkpoint, store: ClientStore | None = None
    ) -> None:
        check_measures(experiment.forgetting.measures, world.method)
        self.experiment, self.world = experiment, world
        self.state, self.clients, self.facts = start
        self.store = store if store is not None else ClientStore()
        self.optimizer = experiment.server.build_optimizer()
        self.size = experiment.cohort_size(world.federation.clients)
        self.upcoming: dict[int, tuple[np.ndarray, Tensor]] = {}

    @property
    def over(self) -> bool:
        """Whether all rounds are done."""
        return self.state.round >= self.experiment.rounds

    def open(self) -> Order:
        """Who takes part in the next round, and what they receive."""
        experiment, method, state = self.experiment, self.world.method, self.state
        round = state.round + 1
        cohort, weights = self._invited(round)
        measuring = _due(experiment.forgetting.every, round, experiment.rounds)
        return Order(
            Received(state.params, state.buffers, method.broadcast(state.server), round),
            cohort,
            weights,
            partial(_state_of, self.clients, self.store, weights),
            measuring,
            None if method.uses("weigh") else weights,
            self.upcoming[round + 1][0] if round + 1 in self.upcoming else None,
            time.perf_counter(),
        )

    def close(self, order: Order, uploads: Iterable[Uploads]) -> Ended:
        """Combine the uploads, test and measure."""
        moved = self.move(order, self.gather(order, uploads))
        (tested,) = evaluate_moved([(self, moved)])
        return self.end(moved, tested)

    def gather(self, order: Order, uploads: Iterable[Uploads]) -> Gathered:
        """Add the uploads up as they arrive; the server does not move yet."""
        ledger = Ledger(order.received.round, self.store, keep=order.measuring)
        return Gathered(*receive(self.world.method, ledger.note(uploads), order.weights), ledger)

    def move(self, order: Order, gathered: Gathered, *, sharing: int = 1) -> Moved:
        """The server's next state. ``sharing`` experiments that train together share the time that it took."""
        world, received = self.world, order.received
        sums, weights, ledger = gathered
        state = advance(
            self.state,
            sums,
            received,
            world.method,
            self.optimizer,
            participants=len(order.cohort),
            population=world.federation.clients,
        )
        _refuse_divergence(received.round, all_finite(state.params))
        row = ledger.row(order.cohort, weights.tolist(), world.federation) | {
            "upload_bytes": sums.bytes_up,
            "download_bytes": len(order.cohort) * download_bytes(received),
            "seconds": (time.perf_counter() - order.started) / sharing,
        }
        return Moved(order, state, ledger, row)

    def end(self, moved: Moved, tested: Tested) -> Ended:
        """Look at what came of the round, and make its state the one that the next begins with."""
        order, state, ledger, trained = moved
        evaluate = self.experiment.evaluate
        started = time.perf_counter()
        row, records = trained | tested.metrics, Records()
        if tested.metrics:
            _refuse_divergence(state.round, math.isfinite(row["test_loss"]))
            if evaluate.personalised:
                personal = measure_personalised(self.world, state, evaluate.batch_size)
                row |= means(client_accuracy=personal.plain, personalised_accuracy=personal.personalised)
                records["personalised"] = personal.arrays()
        evaluated = time.perf_counter()
        if order.measuring:
            self._measure(order.received, ledger.kept, state, row, records)
        row["evaluate_seconds"] = tested.seconds + evaluated - started
        row["measure_seconds"] = time.perf_counter() - evaluated
        self.state = state
        self.clients = self.clients | ledger.versions if ledger.versions else self.clients
        return Ended(Checkpoint(state, self.clients, self.facts), {"round": state.round, **row}, records)

    def _measure(
        self, received: Received, uploads: list[Uploads], state: ServerState, row: dict[str, Any], records: Records
    ) -> None:
        """Forgetting, and whatever else the experiment file asks for."""
        settings, batch_size = self.experiment.forgetting, self.experiment.evaluate.batch_size
        forgetting = measure_forgetting(
            self.world,
            received,
            uploads,
            state,
            everyone=settings.clients == "all",
            count_examples=settings.examples,
            batch_size=batch_size,
        )
        _add_forgetting(row, forgetting)
        records["forgetting"] = forgetting.arrays()
        earlier = range(max(1, received.round - EARLIER_ROUNDS), received.round)
        moment = Moment(
            self.world, received, uploads, state, [self._participants(round) for round in earlier], batch_size
        )
        for name in settings.measures:
            measured = MEASURES[name](moment)
            if measured is not None:
                row |= measured.numbers
                records[name] = measured.arrays

    def _invited(self, round: int) -> tuple[np.ndarray, Tensor]:
        """The participants and their weights p_k; those of some rounds are drawn at once, which is faster."""
        if round not in self.upcoming:
            kind = self.experiment.server.weights or self.world.method.averaging
            like, sizes = next(iter(self.state.params.values())), self.world.federation.train.sizes
            last = min(round + max(1, DRAWN_AHEAD // self.size) - 1, self.experiment.rounds)
            cohorts = {number: self._participants(number) for number in range(round, last + 1)}
            self.upcoming = {n: (cohort, example_weights(sizes[cohort], kind, like)) for n, cohort in cohorts.items()}
        return self.upcoming.pop(round)

    def _participants(self, round: int) -> np.ndarray:
        return sample_cohort(self.experiment.seed, round, self.world.federation.clients, self.size)


@dataclass
class Ledger:
    """Notes what passes by on its way to the server; keeps the local models only when somebody will measure them."""

    round: int
    store: ClientStore
    keep: bool
    kept: list[Uploads] = field(default_factory=list)
    versions: dict[int, int] = field(default_factory=dict)
    losses: list[float] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)

    def note(self, chunks: Iterable[Uploads]) -> Iterator[Uploads]:
        """Pass the chunks on."""
        for chunk in chunks:
            if self.keep:
                self.kept.append(chunk)
            if chunk.state:
                for index, client in enumerate(chunk.clients.tolist()):
                    self.store.write((client, self.round), {name: value[index] for name, value in chunk.state.items()})
                    self.versions[client] = self.round
            self.losses += chunk.train_loss.tolist()
            self.steps += chunk.steps.tolist()
            yield chunk

    def row(self, cohort: np.ndarray, weights: list[float], federation: Federation) -> dict[str, Any]:
        """The round's training metrics; train_loss is the local objective, averaged by weight."""
        total = sum(weights)
        return {
            "train_loss": sum(w * loss for w, loss in zip(weights, self.losses, strict=True)) / total,
            "clients": {
                "id": cohort.tolist(),
                "examples": federation.train.sizes[cohort].tolist(),
                "steps": self.steps,
                "weight": weights,
                "train_loss": self.losses,
            },
        }


class Gathered(NamedTuple):
    """The uploads of a round, added up, and what was noted of them."""

    sums: Sums
    weights: Tensor
    ledger: Ledger


class Moved(NamedTuple):
    """A round whose server has moved on: what is left is to look at it."""

    order: Order
    state: ServerState
    ledger: Ledger
    row: dict[str, Any]


class Tested(NamedTuple):
    """Accuracy and loss of a new global model, where they were due, and its share of the time."""

    metrics: dict[str, float]
    seconds: float


def evaluate_moved(moved: Sequence[tuple[Rounds, Moved]], *, stacked: bool = True) -> list[Tested]:
    """Test the new global models that are due; those of experiments that train together look at each batch together.

    ``stacked=False`` keeps the bits that each has alone.
    """
    found = [Tested({}, 0.0)] * len(moved)
    due: dict[int, list[int]] = {}
    for index, (rounds, (_, state, _, _)) in enumerate(moved):
        experiment = rounds.experiment
        if _due(experiment.evaluate.every, state.round, experiment.rounds, always_last=True):
            due.setdefault(experiment.evaluate.batch_size, []).append(index)
    for batch_size, group in due.items():
        started = time.perf_counter()
        states = [moved[index][1].state for index in group]
        world = moved[group[0]][0].world
        metrics = evaluate_all(world, [(state.params, state.buffers) for state in states], batch_size, stacked=stacked)
        seconds = (time.perf_counter() - started) / len(group)
        for index, its_metrics in zip(group, metrics, strict=True):
            found[index] = Tested(its_metrics, seconds)
    return found


def _state_of(clients: Mapping[int, int], store: ClientStore, like: Tensor, client: int) -> Tensors | None:
    """What a client kept from its last round; None when it is seen for the first time."""
    return store.read((client, clients[client]), like) if client in clients else None


def _add_forgetting(row: dict[str, Any], record: ForgettingRecord) -> None:
    """The means over the cohort at top level, the single clients' values beside their numbers."""
    row |= means(forgetting_by_model=record.clients.by_model, forgetting_by_data=record.clients.by_data)
    by_data = dict(zip(record.data.tolist(), _plain(record.clients.by_data), strict=True))
    row["clients"]["forgetting_by_model"] = _plain(record.clients.by_model)
    row["clients"]["forgetting_by_data"] = [by_data[client] for client in record.models.tolist()]
    if record.forgettable is not None:
        row["forgettable_examples"] = int(record.forgettable.sum())
        row["clients"]["forgettable_examples"] = record.forgettable.tolist()


def _plain(values: np.ndarray) -> list[float | None]:
    """JSON has no NaN."""
    return [float(v) if np.isfinite(v) else None for v in values]


def _due(every: int, round: int, rounds: int, *, always_last: bool = False) -> bool:
    return (every > 0 and round % every == 0) or (always_last and round == rounds)


def _refuse_divergence(round: int, sound: bool) -> None:
    """Stop before a global model that is no longer made of numbers, or gives none, takes the place of a good one."""
    if not sound:
        raise TrainingError(
            "training diverged: the aggregated model overflowed; lower server.lr or local.lr", round=round
        )
