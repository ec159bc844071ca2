"""The round loop: sample clients, train them, combine their uploads, measure. Read this file first."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
from torch import Tensor

from fedretain.config import Experiment
from fedretain.data.federation import Federation
from fedretain.engines import Engine, Uploads, World
from fedretain.engines.schedule import sample_cohort
from fedretain.errors import TrainingError
from fedretain.methods import Received
from fedretain.probes import (
    EARLIER_ROUNDS,
    MEASURES,
    ForgettingRecord,
    Moment,
    check_measures,
    evaluate,
    means,
    measure_forgetting,
    measure_personalised,
)
from fedretain.runs.checkpoint import Checkpoint
from fedretain.runs.clients import ClientStore
from fedretain.runs.metrics import Row
from fedretain.server import ServerState, advance, download_bytes, example_weights, receive, upload_bytes
from fedretain.tensors import Tensors

Records = dict[str, dict[str, np.ndarray]]
"""Arrays measured in a round, by the folder of the run directory that they go to."""


def initial_state(experiment: Experiment, world: World) -> ServerState:
    """The server before the first round. The model's own tensors are never trained; copies of them are."""
    params = {name: p.detach().clone() for name, p in world.model.named_parameters()}
    buffers = {name: b.detach().clone() for name, b in world.model.named_buffers()}
    memory = experiment.server.build_optimizer().init(params)
    return ServerState(0, params, buffers, world.method.init_server(params), memory)


def train_rounds(
    experiment: Experiment, world: World, engine: Engine, start: Checkpoint, store: ClientStore | None = None
) -> Iterator[tuple[Checkpoint, Row, Records]]:
    """The round loop. Yields where each round ended, its metrics, and the larger measurements that were due.

    What was yielded is never changed afterwards: whatever interrupts a round, the one before it can be saved. What a
    stateful method keeps for each client goes to the ``store``, by default one in memory.
    """
    state, clients, facts = start
    store = store if store is not None else ClientStore()
    method, federation = world.method, world.federation
    optimizer = experiment.server.build_optimizer()
    size = experiment.cohort_size(federation.clients)
    check_measures(experiment.forgetting.measures, method)

    def participants(round: int) -> np.ndarray:
        return sample_cohort(experiment.seed, round, federation.clients, size)

    while state.round < experiment.rounds:
        round = state.round + 1
        started = time.perf_counter()

        cohort = participants(round)
        received = Received(state.params, state.buffers, method.broadcast(state.server), round)
        weights = example_weights(
            federation.train.sizes[cohort],
            experiment.server.weights or method.averaging,
            next(iter(state.params.values())),
        )
        measuring = _due(experiment.forgetting.every, round, experiment.rounds)

        ledger = Ledger(round, store, keep=measuring)
        uploads = ledger.note(engine.train(received, cohort, partial(_state_of, clients, store, weights)))
        reception, weights = receive(method, uploads, weights)
        state = advance(
            state,
            reception,
            received,
            method,
            optimizer,
            participants=len(cohort),
            population=federation.clients,
        )
        _refuse_divergence(round, all(bool(value.isfinite().all()) for value in state.params.values()))
        clients = clients | ledger.versions if ledger.versions else clients

        trained = time.perf_counter()
        row = ledger.row(cohort, weights.tolist(), federation) | {
            "download_bytes": len(cohort) * download_bytes(received),
            "seconds": trained - started,
        }
        records: Records = {}
        if _due(experiment.evaluate.every, round, experiment.rounds, always_last=True):
            row |= evaluate(world, state.params, state.buffers, experiment.evaluate.batch_size)
            _refuse_divergence(round, math.isfinite(row["test_loss"]))
            if experiment.evaluate.personalised:
                personal = measure_personalised(world, state, experiment.evaluate.batch_size)
                row |= means(client_accuracy=personal.plain, personalised_accuracy=personal.personalised)
                records["personalised"] = personal.arrays()
        if measuring:
            forgetting = measure_forgetting(
                world,
                received,
                ledger.kept,
                state,
                everyone=experiment.forgetting.clients == "all",
                count_examples=experiment.forgetting.examples,
                batch_size=experiment.evaluate.batch_size,
            )
            _add_forgetting(row, forgetting)
            records["forgetting"] = forgetting.arrays()
            moment = Moment(
                world,
                received,
                ledger.kept,
                state,
                [participants(earlier) for earlier in range(max(1, round - EARLIER_ROUNDS), round)],
                experiment.evaluate.batch_size,
            )
            for name in experiment.forgetting.measures:
                measured = MEASURES[name](moment)
                if measured is not None:
                    row |= measured.numbers
                    records[name] = measured.arrays
        row["probe_seconds"] = time.perf_counter() - trained
        yield Checkpoint(state, clients, facts), {"round": round, **row}, records


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
    bytes_up: int = 0

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
            self.bytes_up += upload_bytes(chunk)
            yield chunk

    def row(self, cohort: np.ndarray, weights: list[float], federation: Federation) -> dict[str, Any]:
        """The round's training metrics; train_loss is the local objective, averaged by weight."""
        total = sum(weights)
        return {
            "train_loss": sum(w * loss for w, loss in zip(weights, self.losses, strict=True)) / total,
            "upload_bytes": self.bytes_up,
            "clients": {
                "id": cohort.tolist(),
                "examples": federation.train.sizes[cohort].tolist(),
                "steps": self.steps,
                "weight": weights,
                "train_loss": self.losses,
            },
        }


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
