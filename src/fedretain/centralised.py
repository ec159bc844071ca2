"""Centralised example forgetting: the yardstick beside which federated forgetting is large (fedwavg-paper §3.1).

This is the one measure that has to train a model, so it stands apart from the pure functions in ``forgetting/``.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal, NamedTuple

import numpy as np
from torch import Tensor

from fedretain.config import Experiment, LocalSettings
from fedretain.data.federation import Parts
from fedretain.engines import LoopEngine, World
from fedretain.engines.schedule import local_batches
from fedretain.errors import ConfigError
from fedretain.forgetting.examples import ForgettingEvents, margin_error
from fedretain.methods import FedAvg, Received
from fedretain.probes import evaluate

ROUND = 1
"""Ordinary training is a single, long round of a single client."""


class CentralisedForgetting(NamedTuple):
    """What one model forgot while it was trained on all clients' data."""

    examples: np.ndarray
    """The numbers of the examples within the training set: the union of the clients' training data."""
    events: np.ndarray
    """Forgetting events of each of them; their sum is the entry of the paper's Table 1."""
    test_accuracy: float
    """Accuracy of the trained model on the test set."""


def centralised_forgetting(
    experiment: Experiment, world: World, *, criterion: Literal["correct", "margin"] = "correct"
) -> CentralisedForgetting:
    """Train one model on the union of the clients' data for rounds × local.epochs epochs, and count what it forgets.

    ``world`` is what ``build_world`` made of the experiment. Initial model, loss and local settings are those of the
    experiment, so every example is seen as often as by a client that takes part in every round; the optimiser's state
    is never reset. An example is looked at when a batch brings it, before the step: a forgetting event has occurred
    when it is wrong and was right the last time, or (``margin``) when its margin error has grown since
    (fedwavg-paper §3.1).
    """
    local = _ordinary(experiment)
    federation = world.federation
    union = np.unique(federation.train.indices)
    events = ForgettingEvents(len(union))
    batches = iter(local_batches(world.seed, ROUND, 0, len(union), local))

    def watched(logits: Tensor, labels: Tensor, class_counts: Tensor) -> Tensor:
        """The experiment's loss, which is where each training batch passes by on its way to the gradient."""
        seen = logits.detach()
        if criterion == "margin":
            events.see(next(batches), margin_error(seen.cpu().numpy(), labels.cpu().numpy()))
        else:
            events.see(next(batches), (seen.argmax(-1) != labels).cpu().numpy())
        return world.loss(logits, labels, class_counts)

    pooled = replace(
        world,
        loss=watched,
        method=FedAvg(),
        local=local,
        federation=replace(federation, train=Parts.of([union]), validation=Parts.of([union[:0]])),
    )
    params = {name: p.detach().clone() for name, p in world.model.named_parameters()}
    buffers = {name: b.detach().clone() for name, b in world.model.named_buffers()}
    start = Received(params, buffers, {}, ROUND)
    (trained,) = LoopEngine(pooled).train(start, np.array([0]), lambda client: None)
    tested = evaluate(
        world,
        {name: value[0] for name, value in trained.params.items()},
        {name: value[0] for name, value in trained.buffers.items()},
        experiment.evaluate.batch_size,
    )
    return CentralisedForgetting(union, events.counts, tested["test_accuracy"])


def _ordinary(experiment: Experiment) -> LocalSettings:
    """The local settings, for as many epochs as the rounds of the experiment add up to."""
    if experiment.rounds < 1:
        raise ConfigError("rounds: centralised training takes rounds × local.epochs epochs; set rounds to 1 or more")
    if experiment.local.epochs is None:
        raise ConfigError("local.steps: centralised training counts the clients' epochs; give local.epochs instead")
    if experiment.local.lr_decay != 1:
        raise ConfigError(
            f"local.lr_decay: {experiment.local.lr_decay} is a decay by round, and centralised training has no rounds; "
            "set it to 1"
        )
    return experiment.local.model_copy(update={"epochs": experiment.rounds * experiment.local.epochs})
