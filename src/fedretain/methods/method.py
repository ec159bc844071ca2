"""What a federated method is: a frozen dataclass of hyper-parameters whose hooks are pure functions of tensors.

The inputs of a hook are split by where they come from. ``Received`` is what the server broadcasts: one copy for
everybody. ``Own`` is what never leaves the client. A vectorised engine shares the first and stacks the second
along a leading client axis; in a real federation the first is the message and the second lives on the node.
So a hook must not look at other clients, must not keep anything outside its return value, and must not turn a
tensor into a Python number.

The defaults are FedAvg (McMahan et al. 2017). Override only what the paper changes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Literal, NamedTuple, Protocol

import torch
from pydantic import Field
from torch import Tensor

from fedretain.components import check_fields
from fedretain.tensors import Tensors

if TYPE_CHECKING:
    from fedretain.config import LocalSettings


NonNegative = Annotated[float, Field(ge=0)]
"""A hyper-parameter that may be 0 or more; NaN and infinity are refused everywhere."""


class Batch(NamedTuple):
    """Some examples. ``weights`` is 1 for a real example and 0 for padding; None means that all are real."""

    inputs: Tensor
    labels: Tensor
    weights: Tensor | None = None


class Received(NamedTuple):
    """What the server broadcasts to every participant of a round."""

    params: Tensors
    buffers: Tensors
    server: Tensors
    round: int


class Own(NamedTuple):
    """What belongs to one client and never leaves it."""

    data: Batch
    class_counts: Tensor
    examples: Tensor
    steps: Tensor
    state: Tensors
    prepared: Tensors


class Task(Protocol):
    """The client's model and local objective, as an engine hands them to a hook."""

    @property
    def local(self) -> LocalSettings:
        """The local settings: optimiser, batch size and so on."""

    @property
    def lr(self) -> float:
        """The local learning rate of this round."""

    def logits(self, params: Tensors, inputs: Tensor) -> Tensor:
        """The model's output in evaluation mode."""

    def losses(self, logits: Tensor, labels: Tensor) -> Tensor:
        """The local objective of each example."""

    def gradient(self, params: Tensors, batch: Batch, *, training: bool = True) -> tuple[Tensor, Tensors]:
        """The mean local objective over a batch and its gradient.

        ``training=False`` leaves the running statistics of normalisation layers as they are; they are not used either.
        """

    def part(self, data: Batch, index: int) -> Batch:
        """The batch at ``index``, modulo their number, when the data are cut into batches in their own order."""


class Aggregate(NamedTuple):
    """What the server knows of a round once the uploads have been summed."""

    delta: Tensors
    """Σ_k p_k · (uploaded model change of client k)."""
    mean: Tensors
    """Σ_k p_k · (extra upload of client k), by name."""
    total: Tensors
    """Σ_k (extra upload of client k), by name, unweighted."""
    participants: int
    population: int


@dataclasses.dataclass(frozen=True)
class Method:
    """Base of all methods; as it stands it is FedAvg."""

    def __post_init__(self) -> None:
        check_fields(self)

    @property
    def name(self) -> str:
        """The key of this method's state: its class name in small letters."""
        return type(self).__name__.lower()

    def uses(self, hook: str) -> bool:
        """Whether this method changes a hook; engines skip the work of a hook that nobody uses."""
        return getattr(type(self), hook) is not getattr(Method, hook)

    @property
    def averaging(self) -> Literal["examples", "uniform"]:
        """How the server weighs clients unless the experiment file says it (server.weights)."""
        return "examples"

    def beside(self, others: Sequence[Method]) -> Method:
        """This method when chained with others; raise ConfigError, naming both, where they cannot work together."""
        return self

    def local(self, settings: LocalSettings) -> LocalSettings:
        """The local work that the method prescribes."""
        return settings

    def freezes(self, name: str) -> bool:
        """Whether the parameter of this name is never trained."""
        return False

    def check(self, local: LocalSettings) -> None:
        """Refuse local settings under which the method would be wrong: raise ConfigError with the reason."""

    # ------------------------------------------------------------------ on the client

    def init_client(self, params: Tensors, own: Own) -> Tensors:
        """State of a client that is seen for the first time."""
        return {}

    def prepare(self, received: Received, own: Own, task: Task) -> Tensors:
        """Once per round, before local training; the result stands in ``own.prepared``."""
        return {}

    def penalty(self, params: Tensors, received: Received, own: Own) -> Tensor:
        """A scalar added to the local objective."""
        return torch.zeros(())

    def direction(self, gradient: Tensors, params: Tensors, received: Received, own: Own) -> Tensors:
        """What the local optimiser gets in place of the gradient."""
        return gradient

    def step(
        self, params: Tensors, batch: Batch, index: int, received: Received, own: Own, task: Task
    ) -> tuple[Tensors, Tensor]:
        """A whole local step, in place of gradient and optimiser; returns new parameters and the batch's loss."""
        raise NotImplementedError

    def upload(self, delta: Tensors, received: Received, own: Own, task: Task) -> Tensors:
        """What the client sends of its model change w_k − w."""
        return delta

    def finish(self, params: Tensors, received: Received, own: Own, task: Task) -> tuple[Tensors, Tensors]:
        """After local training: the client's new state, and what it uploads besides the model change."""
        return own.state, {}

    # ------------------------------------------------------------------ on the server

    def init_server(self, params: Tensors) -> Tensors:
        """The server's state before the first round."""
        return {}

    def broadcast(self, server: Tensors) -> Tensors:
        """The part of the server's state that every participant receives."""
        return {}

    def weigh(self, weights: Tensor, extras: Tensors) -> Tensor:
        """New aggregation weights p_k [m] from the extra uploads [m, …]; using it keeps all uploads of a round."""
        return weights

    def combine(self, aggregate: Aggregate, received: Received) -> Tensors:
        """The change of the global model that the server optimiser applies."""
        return aggregate.delta

    def update_server(self, server: Tensors, aggregate: Aggregate) -> Tensors:
        """The server's state after a round."""
        return server
