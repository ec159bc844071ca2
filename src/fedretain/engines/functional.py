"""Local training as pure functions of tensors, ready for ``vmap`` and for tracing; same steps as the loop engine."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value
from torch.nn.modules.batchnorm import _BatchNorm

from fedretain.engines.engine import World
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
        total = batch.weights.sum()
        # A client that has done all its steps sees padding only.
        return (losses * batch.weights).sum() / torch.where(total > 0, total, torch.ones_like(total))

    def gradient(self, params: Tensors, batch: Batch, *, training: bool = True) -> tuple[Tensor, Tensors]:
        """The mean local objective over a batch and its gradient."""

        def objective(params: Tensors) -> tuple[Tensor, Tensors]:
            buffers = dict(self.buffers)
            return self.loss(params, buffers, batch), buffers

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
        self.module = copy.deepcopy(world.model)
        if isinstance(self.module, _BatchNorm):
            self.module = FunctionalBatchNorm(self.module, self.padding)
        for parent in list(self.module.modules()):
            for name, child in parent.named_children():
                if isinstance(child, _BatchNorm):
                    setattr(parent, name, FunctionalBatchNorm(child, self.padding))

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


class Padding:
    """Which examples of the batch now in the model are real; batch norm asks."""

    weights: Tensor | None = None
    needs_two: bool = False
    """Set once a batch norm has seen maps of one pixel, where a batch of one example has no variance."""
    explicit: bool = False
    """Write batch norm out in simple operations: ``vmap`` gives PyTorch's own a layout that costs copies."""

    @contextmanager
    def of(self, weights: Tensor | None) -> Iterator[None]:
        """For the duration of a call."""
        self.weights = weights
        try:
            yield
        finally:
            self.weights = None


class FunctionalBatchNorm(nn.Module):
    """Batch norm that replaces its running statistics in place of writing into them, and leaves padding out.

    With weights w ∈ {0, 1}: mean = Σ w x / Σ w over examples and pixels, var likewise; the running variance takes the
    unbiased one, as ``torch.nn.BatchNorm2d`` does.
    """

    weight: Tensor | None
    bias: Tensor | None
    running_mean: Tensor | None
    running_var: Tensor | None
    num_batches_tracked: Tensor | None

    def __init__(self, norm: _BatchNorm, padding: Padding) -> None:
        super().__init__()
        self.eps, self.momentum, self.padding = norm.eps, norm.momentum, padding
        self.register_parameter("weight", norm.weight)
        self.register_parameter("bias", norm.bias)
        for name in ("running_mean", "running_var", "num_batches_tracked"):
            self.register_buffer(name, getattr(norm, name))

    def forward(self, maps: Tensor) -> Tensor:
        """Normalised feature maps [B, C, …]."""
        if not self.training and self.running_mean is not None:
            return torch.nn.functional.batch_norm(
                maps, self.running_mean, self.running_var, self.weight, self.bias, False, 0.0, self.eps
            )
        normal, mean, variance, count = self._by_batch(maps)
        if self.training and self.running_mean is not None:
            assert self.running_var is not None
            assert self.num_batches_tracked is not None
            seen = self.num_batches_tracked + 1
            factor = 1 / seen.to(mean.dtype) if self.momentum is None else self.momentum
            unbiased = variance.detach() * count / (count - 1).clamp(min=1)
            self.running_mean = self.running_mean + factor * (mean.detach() - self.running_mean)
            self.running_var = self.running_var + factor * (unbiased - self.running_var)
            self.num_batches_tracked = seen
        return normal

    def _by_batch(self, maps: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Normalised by the batch's own statistics; these, and over how many values they went."""
        weights, pixels = self.padding.weights, maps[0, 0].numel()
        over = [0, *range(2, maps.dim())]
        if pixels == 1:
            self.padding.needs_two = True
        if weights is None and not self.padding.explicit:
            normal = torch.nn.functional.batch_norm(maps, None, None, self.weight, self.bias, True, 0.0, self.eps)
            exact = maps.detach().to(self._statistics_type(maps))
            variance, mean = torch.var_mean(exact, over, correction=0)
            return normal, mean, variance, mean.new_full((), len(maps) * pixels)
        exact = maps.to(self._statistics_type(maps))
        shape = [1, -1, *[1] * (maps.dim() - 2)]
        if weights is None:
            count = exact.new_full((), len(maps) * pixels)
            mean = exact.mean(over)
            centred = exact - mean.reshape(shape)
            variance = centred.square().mean(over)
        else:
            real = weights.to(exact.dtype).reshape(-1, *[1] * (maps.dim() - 1))
            count = (weights.sum() * pixels).to(exact.dtype).clamp(min=1)
            mean = (exact * real).sum(over) / count
            centred = exact - mean.reshape(shape)
            variance = (centred.square() * real).sum(over) / count
        normal = centred * torch.rsqrt(variance + self.eps).reshape(shape)
        if self.weight is not None:
            assert self.bias is not None
            normal = normal * self.weight.reshape(shape) + self.bias.reshape(shape)
        return normal.to(maps.dtype), mean, variance, count

    def _statistics_type(self, maps: Tensor) -> torch.dtype:
        return torch.float32 if maps.dtype in (torch.bfloat16, torch.float16) else maps.dtype
