"""Probes look at a round without touching it: test accuracy, and who forgot what."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedretain.engines.engine import Uploads, World, forward
from fedretain.forgetting import ClientForgetting, client_forgetting, forgettable_examples
from fedretain.methods import Received
from fedretain.server import ServerState
from fedretain.tensors import Tensors


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


def evaluate(world: World, params: Tensors, buffers: Tensors, batch_size: int) -> dict[str, float]:
    """Accuracy and cross-entropy (plain softmax, whatever the training loss) on the test set."""
    federation = world.federation
    correct, loss = torch.zeros((), dtype=torch.float64), torch.zeros((), dtype=torch.float64)
    correct, loss = correct.to(federation.device), loss.to(federation.device)
    for start in range(0, len(federation.test_labels), batch_size):
        labels = federation.test_labels[start : start + batch_size]
        inputs = federation.normalise(federation.test_inputs[start : start + batch_size])
        logits = _logits(world, params, buffers, inputs)
        correct += (logits.argmax(-1) == labels).sum()
        loss += torch.nn.functional.cross_entropy(logits.double(), labels, reduction="sum")
    count = len(federation.test_labels)
    return {"test_accuracy": correct.item() / count, "test_loss": loss.item() / count}


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

    def accuracies(params: Tensors, buffers: Tensors) -> np.ndarray:
        return _share(_correct(world, params, buffers, numbers, batch_size), owners, sizes)

    before = accuracies(received.params, received.buffers)
    local_models = list(_one_by_one(uploads))
    matrix = np.stack([accuracies(params, buffers) for params, buffers in local_models], axis=1)
    forgettable = None
    if count_examples:
        counts = []
        for client, (params, buffers) in zip(models.tolist(), local_models, strict=True):
            own = federation.train[client]
            counts.append(
                forgettable_examples(
                    _correct(world, params, buffers, own, batch_size),
                    _correct(world, after.params, after.buffers, own, batch_size),
                )
            )
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
    hits: dict[str, list[np.ndarray]] = {"plain": [], "personalised": []}
    for start in range(0, len(numbers), batch_size):
        here = slice(start, start + batch_size)
        inputs, labels = federation.examples(numbers[here])
        logits = _logits(world, state.params, state.buffers, inputs)
        proportions = counts[federation.on_device(owners[here])].to(logits.dtype)
        log_proportions = (proportions / proportions.sum(-1, keepdim=True)).log()
        hits["plain"].append((logits.argmax(-1) == labels).cpu().numpy())
        hits["personalised"].append(((logits + log_proportions).argmax(-1) == labels).cpu().numpy())
    sizes = federation.validation.sizes
    return PersonalRecord(
        **{kind: _share(np.concatenate(right or [np.empty(0)]), owners, sizes) for kind, right in hits.items()}
    )


def _share(right: np.ndarray, owners: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """The share of right answers of each owner; NaN for an owner of nothing."""
    hits = np.bincount(owners, weights=right, minlength=len(sizes))
    return np.where(sizes > 0, hits / np.maximum(sizes, 1), np.nan)


def _one_by_one(uploads: list[Uploads]) -> list[tuple[Tensors, Tensors]]:
    return [
        ({n: v[i] for n, v in chunk.params.items()}, {n: v[i] for n, v in chunk.buffers.items()})
        for chunk in uploads
        for i in range(len(chunk.clients))
    ]


def _correct(world: World, params: Tensors, buffers: Tensors, numbers: np.ndarray, batch_size: int) -> np.ndarray:
    """Which of the given training-set examples a model gets right."""
    right = []
    for start in range(0, len(numbers), batch_size):
        inputs, labels = world.federation.examples(numbers[start : start + batch_size])
        right.append(_logits(world, params, buffers, inputs).argmax(-1) == labels)
    return torch.cat(right).cpu().numpy() if right else np.empty(0, bool)


def _logits(world: World, params: Tensors, buffers: Tensors, inputs: Tensor) -> Tensor:
    with torch.no_grad():
        return forward(world, params, buffers, inputs, training=False)
