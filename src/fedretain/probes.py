"""Probes look at a round without touching it: who forgot what."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedretain.engines.engine import Uploads, World, own_of
from fedretain.engines.loop import LoopTask
from fedretain.errors import ConfigError
from fedretain.evaluation import Model, cross_entropies, is_right, logits_of, of_each
from fedretain.forgetting import (
    ClientForgetting,
    class_accuracy,
    class_forgetting,
    client_forgetting,
    drift_of_products,
    fisher_agreement,
    forgettable_examples,
    loss_increase,
    vanished,
)
from fedretain.methods import Batch, FedReg, Method, Received
from fedretain.methods.chain import parts
from fedretain.methods.fisher import fisher_diagonal
from fedretain.server import ServerState
from fedretain.tensors import Tensors, add_scaled, zeros_like

EARLIER_ROUNDS = 10
"""How many rounds before the measured one still count as previous data (fedreg-paper B.3)."""


class ForgettingRecord(NamedTuple):
    """What was measured in one round."""

    models: np.ndarray
    data: np.ndarray
    before: np.ndarray
    after: np.ndarray
    clients: ClientForgetting
    forgettable: np.ndarray | None
    examples: np.ndarray

    def arrays(self) -> dict[str, np.ndarray]:
        """What is kept of it: ``forgetting/round-*.npz``."""
        kept = {
            "models": self.models,
            "data": self.data,
            "before": self.before,
            "after": self.after,
            "forgetting": self.clients.matrix,
            "examples": self.examples,
        }
        return kept if self.forgettable is None else {**kept, "forgettable_examples": self.forgettable}


class PersonalRecord(NamedTuple):
    """Accuracy of the global model on every client's own validation data, without and with the client's proportions."""

    plain: np.ndarray
    personalised: np.ndarray

    def arrays(self) -> dict[str, np.ndarray]:
        """What is kept of it: ``personalised/round-*.npz``."""
        return self._asdict()


def measure_forgetting(
    world: World,
    received: Received,
    uploads: list[Uploads],
    after: ServerState,
    *,
    everyone: bool,
    count_examples: bool,
    batch_size: int,
) -> ForgettingRecord:
    """The client × client matrix on validation data, and the forgettable training examples of each participant."""
    federation = world.federation
    models = np.concatenate([chunk.clients for chunk in uploads])
    data = np.arange(federation.clients) if everyone else models
    parts = [federation.validation[k] for k in data.tolist()]
    numbers = np.concatenate(parts)
    sizes = np.array([len(part) for part in parts])
    owners = np.repeat(np.arange(len(parts)), sizes)

    global_model, local_models = (received.params, received.buffers), _one_by_one(uploads)
    right = of_each(world, [global_model, *local_models], _examples(world, numbers, batch_size), is_right)
    before, *columns = (_share(answers, owners, sizes) for answers in right)
    matrix = np.stack(columns, axis=1)
    forgettable = None
    if count_examples:
        counts = []
        for client, local in zip(models.tolist(), local_models, strict=True):
            own = _examples(world, federation.train[client], batch_size)
            counts.append(forgettable_examples(*of_each(world, [local, (after.params, after.buffers)], own, is_right)))
        forgettable = np.array(counts)
    return ForgettingRecord(
        models,
        data,
        before,
        matrix,
        client_forgetting(before, matrix, data=data, models=models),
        forgettable,
        federation.train.sizes[models],
    )


def measure_personalised(world: World, state: ServerState, batch_size: int) -> PersonalRecord:
    """WSM at inference (wsm-paper A.4): argmax_c f_c + log β_k,c on client k's data, beside the plain argmax_c f_c.

    β_k are the class proportions of the client's training split; a class that it does not hold is never predicted. A
    client without validation data has no accuracy (NaN).
    """
    federation = world.federation
    numbers = federation.validation.indices
    owners = np.repeat(np.arange(federation.clients), federation.validation.sizes)
    counts = torch.from_numpy(federation.all_class_counts()).to(federation.device)
    hits: dict[str, list[Tensor]] = {"plain": [], "personalised": []}
    for start in range(0, len(numbers), batch_size):
        here = slice(start, start + batch_size)
        inputs, labels = federation.examples(numbers[here])
        logits = logits_of(world, state.params, state.buffers, inputs)
        proportions = counts[federation.on_device(owners[here])].to(logits.dtype)
        log_proportions = (proportions / proportions.sum(-1, keepdim=True)).log()
        hits["plain"].append(is_right(logits, labels))
        hits["personalised"].append(is_right(logits + log_proportions, labels))
    sizes = federation.validation.sizes
    return PersonalRecord(
        **{
            kind: _share(torch.cat(right).cpu().numpy() if right else np.empty(0), owners, sizes)
            for kind, right in hits.items()
        }
    )


class Moment(NamedTuple):
    """What a measure may look at when a round has ended."""

    world: World
    received: Received
    uploads: list[Uploads]
    after: ServerState
    earlier: Sequence[np.ndarray]
    """The participants of up to ten rounds before this one, the latest last; empty in the first round."""
    batch_size: int

    @property
    def models(self) -> np.ndarray:
        """The participants, in the order of their local models."""
        return np.concatenate([chunk.clients for chunk in self.uploads])


class Measured(NamedTuple):
    """One measure of one round: numbers for ``metrics.jsonl``, arrays for ``<measure>/round-*.npz``."""

    numbers: dict[str, float]
    arrays: dict[str, np.ndarray]


def measure_classes(moment: Moment) -> Measured:
    """Test accuracy by class before the round, of each local model and after it, and who held which class."""
    world, received, after = moment.world, moment.received, moment.after
    federation = world.federation
    labels = federation.test.labels.cpu().numpy()
    models = [(received.params, received.buffers), *_one_by_one(moment.uploads), (after.params, after.buffers)]
    predictions = of_each(
        world, models, federation.test.batches(moment.batch_size), lambda logits, _: logits.argmax(-1)
    )
    before, *columns, aggregated = (class_accuracy(labels, answers, federation.classes) for answers in predictions)
    local = np.stack(columns, axis=1)
    held = torch.stack([federation.class_counts(client) > 0 for client in moment.models.tolist()], dim=1).cpu().numpy()
    lost = class_forgetting(before, local, held)
    numbers = {
        "absent_classes": int((~held.any(axis=1)).sum()),
        "vanished_classes": int(vanished(before, aggregated).sum()),
        **means(class_forgetting_held=lost.held, class_forgetting_absent=lost.absent),
    }
    arrays = {
        "models": moment.models,
        "before": before,
        "after": local,
        "aggregated": aggregated,
        "forgetting": lost.matrix,
        "held": held,
    }
    return Measured(numbers, arrays)


def measure_drift(moment: Moment) -> Measured:
    """Norms and pairwise cosines of the local models' changes w_t^i − w_{t−1}, before anything is done to uploads."""
    models = moment.models
    products = np.zeros((len(models), len(models)))
    for name, origin in sorted(moment.received.params.items()):
        local = torch.cat([chunk.params[name] for chunk in moment.uploads])
        update = (local.double() - origin.double()).reshape(len(models), -1)
        products += (update @ update.T).cpu().numpy()
    drift = drift_of_products(products)
    numbers = means(drift_norm=drift.norms, drift_cosine=np.array([drift.mean_cosine]))
    return Measured(numbers, {"models": models, "norms": drift.norms, "cosines": drift.cosines})


def measure_loss_increase(moment: Moment) -> Measured | None:
    """Cross-entropy of the local models on the training data of the previous round's participants; not in round 1."""
    if not moment.earlier:
        return None
    data = moment.earlier[-1]
    parts_of_data = [moment.world.federation.train[client] for client in data.tolist()]
    sizes = np.array([len(part) for part in parts_of_data])
    numbers, owners = np.concatenate(parts_of_data), np.repeat(np.arange(len(data)), sizes)

    models = [(moment.received.params, moment.received.buffers), *_one_by_one(moment.uploads)]
    losses = of_each(moment.world, models, _examples(moment.world, numbers, moment.batch_size), cross_entropies)
    before, *columns = (_share(values, owners, sizes) for values in losses)
    local = np.stack(columns, axis=1)
    increase = loss_increase(before, local)
    arrays = {"models": moment.models, "data": data, "before": before, "after": local, "loss_increase": increase}
    return Measured(means(loss_increase=increase), arrays)


def measure_fisher(moment: Moment) -> Measured | None:
    """Agreement of each participant's pseudo data with the training data of the last ten rounds; not in round 1.

    Both Fisher diagonals are those of the participant's local model after local training. The pseudo data are made
    again, from the received model as in training; they hold no chance.
    """
    if not moment.earlier:
        return None
    world, received = moment.world, moment.received
    (fedreg,) = (member for member in parts(world.method) if isinstance(member, FedReg))
    data = np.unique(np.concatenate(moment.earlier))
    previous = np.concatenate([world.federation.train[client] for client in data.tolist()])
    agreement = []
    for client, (params, buffers) in zip(moment.models.tolist(), _one_by_one(moment.uploads), strict=True):
        own = own_of(world, client, steps=0)
        with torch.no_grad():
            global_task = LoopTask(world, own.class_counts, received.buffers, received.round)
            made = fedreg.prepare(received, own, global_task)
            local_task = LoopTask(world, own.class_counts, buffers, received.round)
            of_pseudo = fisher_diagonal(local_task, params, Batch(made["x_s"], made["y_s"]))
            of_previous = zeros_like(params)
            for inputs, labels in _examples(world, previous, moment.batch_size):
                share = fisher_diagonal(local_task, params, Batch(inputs, labels))
                of_previous = add_scaled(of_previous, len(labels) / len(previous), share)
        agreement.append(fisher_agreement(_flat(of_pseudo), _flat(of_previous)))
    arrays = {"models": moment.models, "data": data, "agreement": np.array(agreement)}
    return Measured(means(fisher_agreement=arrays["agreement"]), arrays)


MEASURES: Mapping[str, Callable[[Moment], Measured | None]] = MappingProxyType(
    {
        "classes": measure_classes,
        "drift": measure_drift,
        "loss_increase": measure_loss_increase,
        "fisher": measure_fisher,
    }
)
"""What ``forgetting.measures`` may name; a measure with nothing to look at in a round gives None."""


def check_measures(measures: Sequence[str], method: Method) -> None:
    """Refuse measures that the method gives nothing to look at."""
    if "fisher" in measures and not any(isinstance(member, FedReg) for member in parts(method)):
        raise ConfigError(
            f"forgetting.measures: fisher looks at pseudo data, which {method.name} does not make; "
            "use method: fedreg or leave fisher out"
        )


def means(**measured: np.ndarray) -> dict[str, float]:
    """The mean of each over the entries that are numbers; left out where there are none."""
    known = {name: values[np.isfinite(values)] for name, values in measured.items()}
    return {name: float(values.mean()) for name, values in known.items() if len(values)}


def _share(right: np.ndarray, owners: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """The share of right answers (or the mean of other values) of each owner; NaN for an owner of nothing."""
    hits = np.bincount(owners, weights=right, minlength=len(sizes))
    return np.where(sizes > 0, hits / np.maximum(sizes, 1), np.nan)


def _one_by_one(uploads: list[Uploads]) -> list[Model]:
    return [
        ({n: v[i] for n, v in chunk.params.items()}, {n: v[i] for n, v in chunk.buffers.items()})
        for chunk in uploads
        for i in range(len(chunk.clients))
    ]


def _examples(world: World, numbers: np.ndarray, batch_size: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Inputs and labels of the given training-set examples, in batches."""
    for start in range(0, len(numbers), batch_size):
        yield world.federation.examples(numbers[start : start + batch_size])


def _flat(tensors: Tensors) -> np.ndarray:
    """All entries in one row, by name: tensors read from a checkpoint come in any order, and sums must not notice."""
    return torch.cat([tensors[name].flatten() for name in sorted(tensors)]).double().cpu().numpy()
