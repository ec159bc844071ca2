"""The server's side of a round: sum the uploads as they arrive, then move the global model."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedretain.engines.engine import Uploads
from fedretain.methods import Aggregate, Method, Received
from fedretain.optimizers import ServerOptimizer
from fedretain.tensors import Tensors, add, size_in_bytes


class ServerState(NamedTuple):
    """What the server keeps between rounds."""

    round: int
    params: Tensors
    buffers: Tensors
    server: Tensors
    optimizer: Tensors


@dataclass
class Reception:
    """Running sums over the uploads of a round; memory does not grow with the cohort."""

    delta: Tensors = field(default_factory=dict)
    mean: Tensors = field(default_factory=dict)
    total: Tensors = field(default_factory=dict)
    buffers: Tensors = field(default_factory=dict)

    def add(self, uploads: Uploads, weights: Tensor) -> None:
        """Add a chunk; ``weights`` are the p_k of its clients."""
        self.delta = _accumulate(self.delta, _weighted(weights, uploads.delta))
        self.mean = _accumulate(self.mean, _weighted(weights, uploads.extras))
        self.total = _accumulate(self.total, {n: v.sum(0) for n, v in uploads.extras.items()})
        for name, value in uploads.buffers.items():
            if value.is_floating_point():
                part = _weighted(weights, {name: value})[name]
                self.buffers[name] = self.buffers[name] + part if name in self.buffers else part
            else:
                # A counter such as num_batches_tracked has no mean: the most advanced client's stands.
                top = value.amax(0)
                self.buffers[name] = torch.maximum(self.buffers[name], top) if name in self.buffers else top


def receive(method: Method, chunks: Iterable[Uploads], weights: Tensor) -> tuple[Reception, Tensor]:
    """Sum all uploads of a round by their weights p_k; a method that weighs anew sees all extra uploads first."""
    reception = Reception()
    if method.uses("weigh"):
        chunks = list(chunks)
        names = chunks[0].extras
        extras = {name: torch.cat([chunk.extras[name] for chunk in chunks]) for name in names}
        weights = method.weigh(weights, extras)
    start = 0
    for chunk in chunks:
        end = start + len(chunk.clients)
        reception.add(chunk, weights[start:end])
        start = end
    return reception, weights


def advance(
    state: ServerState,
    reception: Reception,
    received: Received,
    method: Method,
    optimizer: ServerOptimizer,
    *,
    participants: int,
    population: int,
) -> ServerState:
    """The state after the round: w ← w + η_s·Δ for plain averaging."""
    aggregate = Aggregate(reception.delta, reception.mean, reception.total, participants, population)
    params, memory = optimizer.update(state.params, method.combine(aggregate, received), state.optimizer)
    return ServerState(received.round, params, reception.buffers, method.update_server(state.server, aggregate), memory)


def example_weights(sizes: np.ndarray, kind: str, like: Tensor) -> Tensor:
    """p_k of the participants: by examples, or uniform."""
    weights = sizes / sizes.sum() if kind == "examples" else np.full(len(sizes), 1 / len(sizes))
    return torch.from_numpy(weights.astype(np.float64)).to(like.device, like.dtype)


def upload_bytes(uploads: Uploads) -> int:
    """What a chunk of clients really sends: the model change, running statistics and extra uploads."""
    return sum(size_in_bytes(part) for part in (uploads.delta, uploads.buffers, uploads.extras))


def download_bytes(received: Received) -> int:
    """What one participant really receives."""
    return sum(size_in_bytes(part) for part in (received.params, received.buffers, received.server))


def _weighted(weights: Tensor, tensors: Tensors) -> Tensors:
    """Σ_k p_k v_k over the leading axis; a count becomes a real number."""
    real = {n: v if v.is_floating_point() else v.to(weights.dtype) for n, v in tensors.items()}
    if len(weights) == 1:
        return {name: weights[0].to(value.dtype) * value[0] for name, value in real.items()}
    return {n: (weights.to(v.dtype) @ v.reshape(len(v), -1)).reshape(v.shape[1:]) for n, v in real.items()}


def _accumulate(sums: Tensors, parts: Tensors) -> Tensors:
    return add(sums, parts) if sums else parts
