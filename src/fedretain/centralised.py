"""Centralised training: one model on all clients' data, the yardstick for what federated training forgets.

``training: centralised`` makes a run of it beside the federated ones (fedwavg-paper §3.1, Table 1). It is the one
measure that has to train a model, so it stands apart from the pure functions in ``forgetting/``.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedretain.config import Experiment, LocalSettings
from fedretain.data.transforms import crop_flip, draw_crop_flip
from fedretain.engines import World
from fedretain.engines.engine import forward
from fedretain.engines.schedule import local_batches, local_steps
from fedretain.errors import ConfigError, TrainingError
from fedretain.evaluation import evaluate
from fedretain.forgetting import ForgettingEvents, margin_error
from fedretain.randomness import stream
from fedretain.rounds import Ended, Records
from fedretain.runs.checkpoint import Checkpoint
from fedretain.server import ServerState
from fedretain.tensors import Tensors

EVERYBODY = 0
"""The one client that holds all data, in the names of the random streams."""


class CentralisedForgetting(NamedTuple):
    """What one model forgot while it was trained on all clients' data."""

    examples: np.ndarray
    """The numbers of the examples within the training set: the union of the clients' training data."""
    events: np.ndarray
    """Forgetting events of each of them; their sum is the entry of the paper's Table 1."""
    margin_events: np.ndarray
    """How often the margin error of each had grown since it was last seen."""
    test_accuracy: float
    """Accuracy of the trained model on the test set."""


def centralised_forgetting(experiment: Experiment, world: World) -> CentralisedForgetting:
    """Train one model on the union of the clients' data and count what it forgets (fedwavg-paper §3.1).

    ``world`` is what ``build_world`` made of the experiment. The same as a run with ``training: centralised``, without
    a run directory.
    """
    if experiment.rounds < 1:
        raise ConfigError("rounds: centralised training takes rounds × local.epochs epochs; set rounds to 1 or more")
    start = Checkpoint(centralised_start(experiment, world), {}, {})
    *_, (reached, row, _) = train_centralised(experiment, world, start)
    counted = _restored(reached.state.server)
    union = np.unique(world.federation.train.indices)
    return CentralisedForgetting(union, counted["wrong"].counts, counted["margin"].counts, row["test_accuracy"])


def check_centralised(experiment: Experiment) -> None:
    """Refuse settings that have no counterpart in ordinary training."""
    if experiment.local.epochs is None:
        raise ConfigError("local.steps: centralised training counts the clients' epochs; give local.epochs instead")


def centralised_start(experiment: Experiment, world: World) -> ServerState:
    """The initial model, that of the federated runs, with an optimiser that has seen nothing."""
    params = {name: p.detach().clone() for name, p in world.model.named_parameters()}
    buffers = {name: b.detach().clone() for name, b in world.model.named_buffers()}
    examples = len(np.unique(world.federation.train.indices))
    nothing_seen = {kind: ForgettingEvents(examples) for kind in ("wrong", "margin")}
    memory = experiment.local.build_optimizer().init(params)
    return ServerState(0, params, buffers, _kept(nothing_seen, world.federation.device), memory)


def train_centralised(experiment: Experiment, world: World, start: Checkpoint) -> Iterator[Ended]:
    """Ordinary training in the shape of ``train_rounds``: a round is ``local.epochs`` epochs on the union of all data.

    So after the same number of rounds every example has been seen as often as by a client that takes part in each.
    Initial model, loss and local settings are the experiment's; the optimiser's state is never reset. An example is
    looked at when a batch brings it, before the step. ``forgettable_examples`` counts those that are wrong and were
    right when last seen, ``margin_events`` those whose margin error has grown since (fedwavg-paper §3.1).
    """
    check_centralised(experiment)
    state = start.state
    federation, local, settings = world.federation, experiment.local, experiment.forgetting
    optimizer = local.build_optimizer()
    union = np.unique(federation.train.indices)
    labels = federation.labels[federation.on_device(union)]
    class_counts = torch.bincount(labels, minlength=federation.classes)
    steps_a_round = local_steps(len(union), local)
    while state.round < experiment.rounds:
        round = state.round + 1
        started = time.perf_counter()
        params, memory = state.params, state.optimizer
        buffers = {name: value.clone() for name, value in state.buffers.items()}
        events = _restored(state.server)
        forgotten, losses = dict.fromkeys(events, 0), []
        watching = 0.0
        batches = local_batches(world.seed, round, EVERYBODY, len(union), local)
        for index, (at, inputs) in enumerate(_inputs(world, local, round, union, batches)):
            chosen = labels[federation.on_device(at)]
            logits, loss, gradient = _gradient(world, params, buffers, inputs, chosen, class_counts)
            losses.append(loss)
            watched = time.perf_counter()
            for kind, errors in _errors(logits, chosen).items():
                forgotten[kind] += events[kind].see(at, errors)
            watching += time.perf_counter() - watched
            step = state.round * steps_a_round + index
            params, memory = optimizer.update(params, gradient, memory, local.lr_of_round(round), step)
        train_loss = torch.stack(losses).mean().item()
        _refuse_divergence(round, train_loss, params)
        state = ServerState(round, params, buffers, _kept(events, federation.device), memory)
        trained = time.perf_counter()
        row: dict[str, Any] = {"round": round, "train_loss": train_loss, "upload_bytes": 0, "download_bytes": 0}
        if (experiment.evaluate.every and round % experiment.evaluate.every == 0) or round == experiment.rounds:
            row |= evaluate(world, params, buffers, experiment.evaluate.batch_size)
        row["seconds"] = trained - started - watching
        row["evaluate_seconds"], row["measure_seconds"] = time.perf_counter() - trained, watching
        if settings.examples and settings.every and round % settings.every == 0:
            row |= {"forgettable_examples": forgotten["wrong"], "margin_events": forgotten["margin"]}
        records: Records = {}
        if round == experiment.rounds and settings.examples and settings.every:
            counts = {"events": events["wrong"].counts, "margin_events": events["margin"].counts}
            records["events"] = {"examples": union, **counts}
        yield Ended(Checkpoint(state, {}, start.facts), {**row, "clients": {"id": []}}, records)


def _inputs(
    world: World, local: LocalSettings, round: int, union: np.ndarray, batches: list[np.ndarray]
) -> Iterator[tuple[np.ndarray, Tensor]]:
    """Each batch of a round: positions within the union, and inputs as the model sees them."""
    federation = world.federation
    augment = local.augment == "crop_flip"
    rng = stream(world.seed, "augment", round, EVERYBODY)
    draws = draw_crop_flip(rng, len(batches), max(map(len, batches))) if augment else None
    for step, at in enumerate(batches):
        raw = federation.inputs[federation.on_device(union[at])]
        if draws is not None:
            raw = crop_flip(raw, torch.from_numpy(draws[step, : len(at)]).to(federation.device))
        yield at, federation.normalise(raw)


def _gradient(
    world: World, params: Tensors, buffers: Tensors, inputs: Tensor, labels: Tensor, class_counts: Tensor
) -> tuple[Tensor, Tensor, Tensors]:
    """Logits before the step, mean loss of the batch, and its gradient; running statistics follow in place."""
    leaves = {name: value.detach().requires_grad_() for name, value in params.items()}
    logits = forward(world, leaves, buffers, inputs, training=True)
    loss = world.loss(logits, labels, class_counts).mean()
    gradients = torch.autograd.grad(loss, tuple(leaves.values()), materialize_grads=True)
    return logits.detach(), loss.detach(), dict(zip(leaves, gradients, strict=True))


def _errors(logits: Tensor, labels: Tensor) -> dict[str, np.ndarray]:
    """The two errors of each example that a forgetting event may be told by."""
    wrong = (logits.argmax(-1) != labels).cpu().numpy()
    return {"wrong": wrong, "margin": margin_error(logits.double().cpu().numpy(), labels.cpu().numpy())}


def _kept(events: dict[str, ForgettingEvents], device: torch.device) -> Tensors:
    """What was seen of each example, for the checkpoint. As integers: some devices know no float64."""
    arrays: dict[str, np.ndarray] = {}
    for kind, one in events.items():
        arrays |= {f"{kind}/last": one.last_error.view(np.int64), f"{kind}/counts": one.counts}
    return {name: torch.from_numpy(value.copy()).to(device) for name, value in arrays.items()}


def _restored(kept: Tensors) -> dict[str, ForgettingEvents]:
    """The inverse of ``_kept``; the tensors are left alone."""
    events = {}
    for kind in ("wrong", "margin"):
        counts = kept[f"{kind}/counts"].cpu().numpy().copy()
        events[kind] = ForgettingEvents(len(counts))
        events[kind].last_error = kept[f"{kind}/last"].cpu().numpy().view(np.float64).copy()
        events[kind].counts = counts
    return events


def _refuse_divergence(round: int, train_loss: float, params: Tensors) -> None:
    """Stop before a model that is no longer made of numbers takes the place of a good one."""
    sound = np.isfinite(train_loss) and all(bool(value.isfinite().all()) for value in params.values())
    if not sound:
        raise TrainingError("training diverged: loss or parameters are not finite; lower local.lr", round=round)
