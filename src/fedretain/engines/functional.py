"""Local training as pure functions of tensors, ready for ``vmap`` and for tracing; same steps as the loop engine."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor
from torch.func import functional_call, grad_and_value

from fedretain.engines.engine import World
from fedretain.engines.norms import Padding, with_functional_norms
from fedretain.engines.tracing import uncompiled
from fedretain.methods import Batch, Own, Received
from fedretain.tensors import Tensors

if TYPE_CHECKING:
    from fedretain.config import LocalSettings


class Carry(NamedTuple):
    """What a local step changes: the model, its running statistics, the optimiser's memory."""

    params: Tensors
    buffers: Tensors
    memory: Tensors


class Moving(NamedTuple):
    """What is different in every step or round, always tensors, so that one recording serves all of them."""

    step: Tensor
    """The number of the step within the round, from 0."""
    lr: Tensor
    """η of this step; 0 for a client that has done all its steps."""


def local_step(
    world: World,
    model: FunctionalModel,
    carry: Carry,
    batch: Batch,
    moving: Moving,
    received: Received,
    own: Own,
) -> tuple[Carry, Tensor]:
    """One local step of one client, as in ``LoopEngine``: gradient, direction, optimiser; or the method's own step."""
    method = world.method
    params, buffers, memory = carry
    task = FunctionalTask(world, model, own.class_counts, dict(buffers), moving.lr)
    if method.uses("step"):
        new, loss = method.step(params, batch, moving.step, received, own, task)  # type: ignore[arg-type]
    else:
        loss, gradient = task.objective_gradient(params, batch, received, own)
        gradient = method.direction(gradient, params, received, own)
        new, memory = world.local.build_optimizer().update(params, gradient, memory, moving.lr, moving.step)
    new |= {name: received.params[name] for name in params if method.freezes(name)}
    return Carry(new, task.buffers, memory), loss


class FunctionalTask:
    """One client's model and objective; ``buffers`` is replaced, never written into."""

    def __init__(
        self,
        world: World,
        model: FunctionalModel,
        class_counts: Tensor,
        buffers: Tensors,
        lr: float | Tensor,
    ) -> None:
        self.world, self.model, self.class_counts, self.buffers = world, model, class_counts, buffers
        self._lr = lr

    @property
    def local(self) -> LocalSettings:
        """The local settings."""
        return self.world.local

    @property
    def lr(self) -> float:
        """The local learning rate of this round; a tensor where clients of several experiments are stacked."""
        return self._lr  # type: ignore[return-value]

    def logits(self, params: Tensors, inputs: Tensor) -> Tensor:
        """The model's output in evaluation mode."""
        return self.model(params, dict(self.buffers), Batch(inputs, inputs), training=False)

    def losses(self, logits: Tensor, labels: Tensor) -> Tensor:
        """The local objective of each example."""
        return self.world.loss(logits, labels, self.class_counts)

    def loss(self, params: Tensors, buffers: Tensors, batch: Batch) -> Tensor:
        """Mean local objective over a batch, padding left out; ``buffers`` receives the new running statistics."""
        losses = self.losses(self.model(params, buffers, batch, training=True), batch.labels)
        if batch.weights is None:
            return losses.mean()
        # A client that has done all its steps sees padding only.
        return (losses * (batch.weights / batch.weights.sum().clamp(min=1))).sum()

    def gradient(self, params: Tensors, batch: Batch, *, training: bool = True) -> tuple[Tensor, Tensors]:
        """The mean local objective over a batch and its gradient."""

        def objective(params: Tensors) -> tuple[Tensor, Tensors]:
            buffers = dict(self.buffers)
            return self.loss(params, buffers, batch), buffers

        with uncompiled():
            gradient, (loss, buffers) = grad_and_value(objective, has_aux=True)(params)
        if training:
            self.buffers = buffers
        return loss, gradient

    def objective_gradient(self, params: Tensors, batch: Batch, received: Received, own: Own) -> tuple[Tensor, Tensors]:
        """The batch's loss, and the gradient of loss + penalty."""
        method = self.world.method
        if not method.uses("penalty"):
            return self.gradient(params, batch)

        def objective(params: Tensors) -> tuple[Tensor, tuple[Tensor, Tensors]]:
            buffers = dict(self.buffers)
            loss = self.loss(params, buffers, batch)
            return loss + method.penalty(params, received, own), (loss, buffers)

        with uncompiled():
            gradient, (_, (loss, self.buffers)) = grad_and_value(objective, has_aux=True)(params)
        return loss, gradient

    def part(self, data: Batch, index: int | Tensor) -> Batch:
        """The batch at ``index``, modulo their number, in the client's own order; padding weighs 0."""
        size, room = min(self.local.batch_size, len(data.labels)), len(data.labels)
        if data.weights is None and room % size == 0:
            at = index % (room // size) * size + torch.arange(size, device=data.labels.device)
            return Batch(data.inputs[at], data.labels[at])
        weights = torch.ones(room, device=data.labels.device) if data.weights is None else data.weights
        examples = weights.sum().to(torch.int64)
        batches = torch.div(examples + self.local.batch_size - 1, self.local.batch_size, rounding_mode="floor")
        at = index % batches * self.local.batch_size + torch.arange(size, device=data.labels.device)
        real = (at < examples).to(data.inputs.dtype)
        at = at.clamp(max=room - 1)
        return Batch(data.inputs[at], data.labels[at], real)


class FunctionalModel:
    """A model called with its tensors; running statistics come back in the dictionary that was given."""

    def __init__(self, world: World) -> None:
        self.precision = world.precision
        self.padding = Padding()
        self.module = with_functional_norms(copy.deepcopy(world.model), self.padding)

    def __call__(self, params: Tensors, buffers: Tensors, batch: Batch, *, training: bool) -> Tensor:
        """Logits of a batch; padded examples are left out of batch statistics."""
        self.module.train(training)
        device = batch.inputs.device.type
        with (
            self.padding.of(batch.weights),
            torch.autocast(device, torch.bfloat16, enabled=self.precision == "bfloat16"),
        ):
            tensors = {**params, **buffers}
            logits: Tensor = functional_call(self.module, tensors, (batch.inputs,))
        buffers.update({name: tensors[name] for name in buffers})  # replaced, where the model did so
        return logits.to(batch.inputs.dtype)
