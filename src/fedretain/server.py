"""The server's side of a round: sum the uploads as they arrive, then move the global model."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedretain.engines.engine import Uploads
from fedretain.engines.sums import Sums
from fedretain.methods import Aggregate, Method, Received
from fedretain.optimizers import ServerOptimizer
from fedretain.tensors import Tensors, size_in_bytes


class ServerState(NamedTuple):
    """What the server keeps between rounds."""

    round: int
    params: Tensors
    buffers: Tensors
    server: Tensors
    optimizer: Tensors


def receive(method: Method, chunks: Iterable[Uploads], weights: Tensor) -> tuple[Sums, Tensor]:
    """Sum all uploads of a round by their weights p_k; a method that weighs anew sees all extra uploads first."""
    sums = Sums()
    if method.uses("weigh"):
        chunks = list(chunks)
        names = chunks[0].extras
        extras = {name: torch.cat([chunk.extras[name] for chunk in chunks]) for name in names}
        weights = method.weigh(weights, extras)
    start = 0
    for chunk in chunks:
        end = start + len(chunk.clients)
        if chunk.sums is not None:
            sums.include(chunk.sums)
        else:
            sums.add(chunk, weights[start:end])
        start = end
    return sums, weights


def advance(
    state: ServerState,
    sums: Sums,
    received: Received,
    method: Method,
    optimizer: ServerOptimizer,
    *,
    participants: int,
    population: int,
) -> ServerState:
    """The state after the round: w ← w + η_s·Δ for plain averaging."""
    aggregate = Aggregate(sums.delta, sums.mean, sums.total, participants, population)
    params, memory = optimizer.update(state.params, method.combine(aggregate, received), state.optimizer)
    return ServerState(received.round, params, sums.buffers, method.update_server(state.server, aggregate), memory)


def example_weights(sizes: np.ndarray, kind: str, like: Tensor) -> Tensor:
    """p_k of the participants: by examples, or uniform."""
    weights = sizes / sizes.sum() if kind == "examples" else np.full(len(sizes), 1 / len(sizes))
    return torch.from_numpy(weights.astype(np.float64)).to(like.device, like.dtype)


def download_bytes(received: Received) -> int:
    """What one participant really receives."""
    return sum(size_in_bytes(part) for part in (received.params, received.buffers, received.server))
