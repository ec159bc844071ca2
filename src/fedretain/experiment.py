"""Where the parts meet: an experiment goes in, a run directory comes out. The round loop is ``train_rounds``."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedretain.components import find
from fedretain.config import Experiment, make_experiment, read_experiment
from fedretain.data import Dataset, load_dataset
from fedretain.data.federation import Federation, build_federation, split_examples
from fedretain.data.transforms import Normalise
from fedretain.engines import Engine, LoopEngine, Uploads, World
from fedretain.engines.schedule import local_steps, sample_cohort
from fedretain.errors import ConfigError, RunError, TrainingError
from fedretain.losses import LOSSES
from fedretain.methods import Received
from fedretain.models import build_model
from fedretain.probes import ForgettingRecord, evaluate, measure_forgetting
from fedretain.runs.checkpoint import Checkpoint
from fedretain.runs.directory import RunDirectory
from fedretain.runs.environment import describe_environment
from fedretain.runs.metrics import Row
from fedretain.runs.run import Run
from fedretain.runs.summary import summarise
from fedretain.server import (
    ServerState,
    advance,
    download_bytes,
    example_weights,
    receive,
    upload_bytes,
)
from fedretain.tensors import Tensors

Source = str | Path | Mapping[str, Any] | Experiment
Watcher = Callable[[Experiment, Row], None]
"""Called after every round with the experiment and the round's metrics."""


def run(
    source: Source,
    *,
    out: str | Path | None = None,
    resume: bool = False,
    overrides: Sequence[str] = (),
    data: Dataset | None = None,
    watch: Watcher | None = None,
) -> Run:
    """Run one experiment and return what it left behind.

    ``source`` is an experiment file, a mapping or an Experiment; ``overrides`` are ``key=value`` texts. Without ``out``
    a new directory below ``runs/`` is made. ``resume`` goes on where an earlier run of the same experiment stopped, to
    the same bits. ``data`` brings your own examples (``fedretain.from_arrays``) in place of ``data.name``.
    """
    experiment = make_experiment(read_experiment(source, overrides))
    path = Path(out) if out is not None else default_directory(experiment, resume)
    world = build_world(experiment, data)
    with RunDirectory.opened(path, experiment, resume=resume) as directory:
        _run_in(directory, experiment, world, watch)
        if find_spec("plotly") is not None:
            from fedretain.report import write_report

            write_report([path], path / "report.html")
    return Run(path)


def default_directory(experiment: Experiment, resume: bool) -> Path:
    """``runs/NAME-KEY``, numbered when that exists; to resume, the newest one there is."""
    stem = Path("runs") / f"{experiment.name}-{experiment.key}"
    tries = [stem, *(stem.with_name(f"{stem.name}-{number}") for number in range(2, 10_000))]
    free = next(index for index, path in enumerate(tries) if not path.exists())
    return tries[free - 1] if resume and free else tries[free]


def build_world(experiment: Experiment, data: Dataset | None = None) -> World:
    """Everything that stays the same from round to round; all that can be refused is refused here."""
    device, dtype = find_device(experiment.device), _dtype(experiment)
    if experiment.precision == "bfloat16" and device.type == "cpu":
        raise ConfigError(
            "precision: bfloat16 is for accelerators (some CPUs cannot run it at all); use float32 on cpu"
        )
    method = experiment.build_method()
    local = method.local(experiment.local)
    dataset = data if data is not None else load_data(experiment)
    train, validation = split_examples(dataset, experiment.partition, experiment.seed)
    experiment.cohort_size(len(train))
    for size in np.unique(train.sizes[train.sizes > 0]).tolist():
        local_steps(size, local)
    settings = experiment.data
    normalise = Normalise.fit(dataset, settings.normalise, mean=settings.mean, std=settings.std)
    federation = build_federation(dataset, train, validation, normalise, device=device, dtype=dtype)
    model = build_model(
        experiment.model.name,
        federation.shape,
        federation.classes,
        seed=experiment.seed,
        **experiment.model.parameters,
    )
    loss = partial(find("loss", LOSSES, experiment.loss.name), **experiment.loss.parameters)
    return World(
        model.to(device, dtype),
        loss,
        method,
        local,
        federation,
        experiment.seed,
        experiment.precision,
    )


def load_data(experiment: Experiment) -> Dataset:
    """The dataset that the experiment names."""
    settings = experiment.data
    return load_dataset(
        settings.name,
        root=settings.root,
        path=settings.path,
        image=settings.image,
        label=settings.label,
        size=settings.size,
        include_val=settings.include_val,
    )


def initial_state(experiment: Experiment, world: World) -> ServerState:
    """The server before the first round. The model's own tensors are never trained; copies of them are."""
    params = {name: p.detach().clone() for name, p in world.model.named_parameters()}
    buffers = {name: b.detach().clone() for name, b in world.model.named_buffers()}
    memory = experiment.server.build_optimizer().init(params)
    return ServerState(0, params, buffers, world.method.init_server(params), memory)


def train_rounds(
    experiment: Experiment, world: World, engine: Engine, start: Checkpoint
) -> Iterator[tuple[Checkpoint, Row, ForgettingRecord | None]]:
    """The round loop. Yields where each round ended, what was measured, and who forgot what when that was due.

    What was yielded is never changed afterwards: whatever interrupts a round, the one before it can be saved.
    """
    state, clients, facts = start
    method, federation = world.method, world.federation
    optimizer = experiment.server.build_optimizer()
    while state.round < experiment.rounds:
        round = state.round + 1
        started = time.perf_counter()

        cohort = sample_cohort(experiment.seed, round, federation.clients, experiment.cohort_size(federation.clients))
        received = Received(state.params, state.buffers, method.broadcast(state.server), round)
        weights = example_weights(
            federation.train.sizes[cohort],
            experiment.server.weights or method.averaging,
            next(iter(state.params.values())),
        )
        measuring = _due(experiment.forgetting.every, round, experiment.rounds)

        ledger = Ledger(keep=measuring)
        uploads = ledger.note(engine.train(received, cohort, clients.get))
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
        clients = clients | ledger.states if ledger.states else clients

        trained = time.perf_counter()
        row = ledger.row(cohort, weights.tolist(), federation) | {
            "download_bytes": len(cohort) * download_bytes(received),
            "seconds": trained - started,
        }
        record = None
        if _due(experiment.evaluate.every, round, experiment.rounds, always_last=True):
            row |= evaluate(world, state.params, state.buffers, experiment.evaluate.batch_size)
            _refuse_divergence(round, math.isfinite(row["test_loss"]))
        if measuring:
            record = measure_forgetting(
                world,
                received,
                ledger.kept,
                state,
                everyone=experiment.forgetting.clients == "all",
                count_examples=experiment.forgetting.examples,
                batch_size=experiment.evaluate.batch_size,
            )
            _add_forgetting(row, record)
        row["probe_seconds"] = time.perf_counter() - trained
        yield Checkpoint(state, clients, facts), {"round": round, **row}, record


@dataclass
class Ledger:
    """Notes what passes by on its way to the server; keeps the local models only when somebody will measure them."""

    keep: bool
    kept: list[Uploads] = field(default_factory=list)
    states: dict[int, Tensors] = field(default_factory=dict)
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
                    self.states[client] = {name: value[index] for name, value in chunk.state.items()}
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


def find_device(name: str) -> torch.device:
    """The device that was asked for, or the best there is."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    device = torch.device(name)
    found = ["cpu"]
    if torch.cuda.is_available():
        found += ["cuda", *(f"cuda:{index}" for index in range(torch.cuda.device_count()))]
    if torch.backends.mps.is_available():
        found.append("mps")
    if name not in found:
        raise ConfigError(f"device: there is no {name!r} here (found: {', '.join(found)}); use one of these or auto")
    return device


def _run_in(directory: RunDirectory, experiment: Experiment, world: World, watch: Watcher | None) -> None:
    """Start or go on, save on the way and whatever happens, and finish with a summary."""
    found, rows = directory.last_good()
    _describe(directory, experiment, world, fresh=found is None)
    if found is None:
        state = initial_state(experiment, world)
        first = evaluate(world, state.params, state.buffers, experiment.evaluate.batch_size)
        last = Checkpoint(state, {}, {"initial_accuracy": first["test_accuracy"]})
    else:
        last = found.to(str(world.federation.device))
    try:
        directory.save(last)
        for reached, row, record in train_rounds(experiment, world, LoopEngine(world), last):
            if record is not None:
                _store_forgetting(directory, reached.state.round, record)
            directory.append(row)
            rows.append(row)
            last = reached
            if directory.checkpoint_is_due(last.state.round):
                directory.save(last)
            if watch is not None:
                watch(experiment, row)
    except BaseException:
        if last.state.round == len(rows):
            with contextlib.suppress(RunError):
                directory.save(last)
        raise
    directory.save(last)
    directory.write_json("summary.json", summarise(rows, last.facts["initial_accuracy"], world.federation.clients))


def _describe(directory: RunDirectory, experiment: Experiment, world: World, *, fresh: bool) -> None:
    """Record environment and partition; when going on, the data must be the same."""
    federation = world.federation
    facts = {
        "fingerprint": federation.fingerprint,
        "shape": list(federation.shape),
        "classes": federation.classes,
        "train_examples": len(federation.labels),
        "test_examples": len(federation.test_labels),
    }
    if not fresh:
        held = Run(directory.path).environment["data"]
        if held["fingerprint"] != facts["fingerprint"]:
            raise RunError(
                f"{directory.path}: was made with other examples (data.name is {experiment.data.name!r}); "
                "bring back the same data or choose another --out"
            )
        return
    directory.write_json("environment.json", {**describe_environment(federation.device), "data": facts})
    directory.write_partition(
        federation.train, federation.validation, federation.all_class_counts(), federation.class_names
    )


def _add_forgetting(row: dict[str, Any], record: ForgettingRecord) -> None:
    """The means over the cohort at top level, the single clients' values beside their numbers."""
    for name, values in (
        ("forgetting_by_model", record.clients.by_model),
        ("forgetting_by_data", record.clients.by_data),
    ):
        if np.isfinite(values).any():
            row[name] = float(np.nanmean(values))
    by_data = dict(zip(record.data.tolist(), _plain(record.clients.by_data), strict=True))
    row["clients"]["forgetting_by_model"] = _plain(record.clients.by_model)
    row["clients"]["forgetting_by_data"] = [by_data[client] for client in record.models.tolist()]
    if record.forgettable is not None:
        row["forgettable_examples"] = int(record.forgettable.sum())
        row["clients"]["forgettable_examples"] = record.forgettable.tolist()


def _store_forgetting(directory: RunDirectory, round: int, record: ForgettingRecord) -> None:
    arrays = {
        "models": record.models,
        "data": record.data,
        "before": record.before,
        "after": record.after,
        "forgetting": record.clients.matrix,
        "examples": record.examples,
    }
    if record.forgettable is not None:
        arrays["forgettable_examples"] = record.forgettable
    directory.write_arrays(f"forgetting/round-{round:06d}.npz", **arrays)


def _plain(values: np.ndarray) -> list[float | None]:
    """JSON has no NaN."""
    return [float(v) if np.isfinite(v) else None for v in values]


def _refuse_divergence(round: int, sound: bool) -> None:
    """Stop before a global model that is no longer made of numbers, or gives none, takes the place of a good one."""
    if not sound:
        raise TrainingError(
            "training diverged: the aggregated model overflowed; lower server.lr or local.lr", round=round
        )


def _due(every: int, round: int, rounds: int, *, always_last: bool = False) -> bool:
    return (every > 0 and round % every == 0) or (always_last and round == rounds)


def _dtype(experiment: Experiment) -> torch.dtype:
    return torch.float64 if experiment.precision == "float64" else torch.float32
