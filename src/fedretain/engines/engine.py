"""What every engine is given and gives back."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call

from fedretain.data.federation import Federation
from fedretain.engines.sums import Sums
from fedretain.losses import Loss
from fedretain.methods import Batch, Method, Own, Received
from fedretain.tensors import Tensors

if TYPE_CHECKING:
    from fedretain.config import LocalSettings


@dataclass(frozen=True)
class World:
    """Everything that stays the same from round to round."""

    model: nn.Module
    loss: Loss
    method: Method
    local: LocalSettings
    federation: Federation
    seed: int
    precision: str


class Uploads(NamedTuple):
    """What a chunk of the cohort sends back; every tensor has a leading client axis."""

    clients: np.ndarray
    params: Tensors
    """The local models; empty where nobody asked for them."""
    delta: Tensors
    buffers: Tensors
    extras: Tensors
    state: Tensors
    train_loss: Tensor
    steps: np.ndarray
    sums: Sums | None = None
    """The weighted sums over the chunk in place of ``delta`` and ``extras``, which are then empty; ``buffers`` are too,
    where nobody asked for the local models."""


class Engine(Protocol):
    """Trains the participants of a round."""

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
        """Yield the uploads of the whole cohort in its order, in chunks of any size.

        ``states(client)`` is the client's kept state, or None when it is seen for the first time. ``local_models``
        says whether anybody will look at ``Uploads.params``; they stay empty if not. ``weights``, the p_k of the
        cohort, are given where nobody looks at single uploads: the engine may then sum them up itself. ``upcoming`` is
        the cohort of the next round, for an engine that can prepare it.
        """

    def close(self) -> None:
        """Give back what the engine holds outside this process."""


def forward(world: World, params: Tensors, buffers: Tensors, inputs: Tensor, *, training: bool) -> Tensor:
    """Logits in the precision of the parameters; in training mode the buffers are updated in place."""
    world.model.train(training)
    with torch.autocast(inputs.device.type, torch.bfloat16, enabled=world.precision == "bfloat16"):
        logits: Tensor = functional_call(world.model, (params, buffers), (inputs,))
    return logits.to(inputs.dtype)


def own_of(world: World, client: int, *, steps: int) -> Own:
    """What belongs to a client as it enters a round; its kept state is filled in by the engine."""
    numbers = world.federation.train[client]
    inputs, labels = world.federation.examples(numbers)
    return Own(
        data=Batch(inputs, labels),
        class_counts=world.federation.class_counts(client),
        examples=torch.tensor(len(numbers), device=inputs.device),
        steps=torch.tensor(steps, device=inputs.device),
        state={},
        prepared={},
    )


def batch_norm_advice(error: Exception) -> str:
    """What to do about a batch of one example under batch norm; nothing for other errors."""
    if "more than 1 value per channel" not in str(error):
        return ""
    return "; batch norm needs more than a batch of one example: set local.drop_last or another batch_size"
