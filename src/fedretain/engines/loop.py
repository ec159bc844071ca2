"""The oracle: one client after another, plain and obvious. Every other engine must agree with this one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from fedretain.data.transforms import crop_flip, draw_crop_flip
from fedretain.engines.engine import Uploads, World, batch_norm_advice, forward, own_of
from fedretain.engines.schedule import local_batches
from fedretain.errors import FedretainError, TrainingError
from fedretain.methods import Batch, Own, Received
from fedretain.randomness import stream
from fedretain.tensors import Tensors, subtract

if TYPE_CHECKING:
    from fedretain.config import LocalSettings


@dataclass(frozen=True)
class LoopEngine:
    """Trains the participants one by one."""

    world: World

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
        """Yield each participant's upload as it is ready; they are summed by whoever receives them."""
        for client in cohort.tolist():
            try:
                # The sums of a convolution depend on the number of threads; one thread makes them the same everywhere.
                with torch.no_grad(), one_thread(self.world.federation.device):
                    uploads = self._train_client(received, client, states(client))
            except FedretainError:
                raise
            except (RuntimeError, ValueError, TypeError, KeyError) as error:
                raise TrainingError(
                    f"local training failed: {error}{batch_norm_advice(error)}", round=received.round, client=client
                ) from error
            yield uploads if local_models else uploads._replace(params={})

    def close(self) -> None:
        """Nothing is held outside this process."""

    def _train_client(self, received: Received, client: int, state: Tensors | None) -> Uploads:
        """Local training, as in the papers: from the received model, through the local steps, to the upload."""
        world, method = self.world, self.world.method
        numbers = world.federation.train[client]
        batches = local_batches(world.seed, received.round, client, len(numbers), world.local)
        own = own_of(world, client, steps=len(batches))
        own = own._replace(state=method.init_client(received.params, own) if state is None else state)
        task = LoopTask(world, own.class_counts, copied(received.buffers), received.round)
        own = own._replace(prepared=method.prepare(received, own, task))

        batches_of_round = self._batches(received.round, client, own.data, numbers, batches)
        params, losses = self._local_steps(received, own, task, batches_of_round)
        history = torch.stack(losses)
        _refuse_divergence(history, params, received.round, client, task.lr)
        delta = method.upload(subtract(params, received.params), received, own, task)
        new_state, extras = method.finish(params, received, own, task)
        return Uploads(
            clients=np.array([client]),
            params=_stacked(params),
            delta=_stacked(delta),
            buffers=_stacked(task.buffers),
            extras=_stacked(extras),
            state=_stacked(new_state),
            train_loss=history.mean().unsqueeze(0),
            steps=np.array([len(batches)]),
        )

    def _local_steps(
        self, received: Received, own: Own, task: LoopTask, batches: Iterator[Batch]
    ) -> tuple[Tensors, list[Tensor]]:
        """The local model after all steps, and the loss of each of them."""
        world, method = self.world, self.world.method
        params = copied(received.params)
        optimizer = world.local.build_optimizer()
        memory = optimizer.init(params)
        frozen = [name for name in params if method.freezes(name)]
        losses = []
        for index, batch in enumerate(batches):
            if method.uses("step"):
                params, loss = method.step(params, batch, index, received, own, task)
            else:
                loss, gradient = self._objective_gradient(params, batch, received, own, task)
                gradient = method.direction(gradient, params, received, own)
                params, memory = optimizer.update(params, gradient, memory, task.lr, index)
            params |= {name: received.params[name] for name in frozen}
            losses.append(loss)
        return params, losses

    def _objective_gradient(
        self, params: Tensors, batch: Batch, received: Received, own: Own, task: LoopTask
    ) -> tuple[Tensor, Tensors]:
        """The batch's loss, and the gradient of loss + penalty."""
        method = self.world.method
        if not method.uses("penalty"):
            return task.gradient(params, batch)
        with torch.enable_grad():
            leaves = _leaves(params)
            loss = task.loss(leaves, batch)
            return loss.detach(), _gradient(loss + method.penalty(leaves, received, own), leaves)

    def _batches(
        self, round: int, client: int, data: Batch, numbers: np.ndarray, positions: list[np.ndarray]
    ) -> Iterator[Batch]:
        """The training batches of a round, augmented when asked for."""
        federation, augment = self.world.federation, self.world.local.augment
        if augment == "none":
            for at in positions:
                chosen = federation.on_device(at)
                yield Batch(data.inputs.index_select(0, chosen), data.labels[chosen])
            return
        rng = stream(self.world.seed, "augment", round, client)
        draws = torch.from_numpy(draw_crop_flip(rng, len(positions), max(len(at) for at in positions)))
        draws = draws.to(federation.device)
        for step, at in enumerate(positions):
            chosen = federation.on_device(numbers[at])
            raw = crop_flip(federation.inputs[chosen], draws[step, : len(at)])
            yield Batch(federation.normalise(raw), federation.labels[chosen])


@dataclass(frozen=True)
class LoopTask:
    """One client's model and objective; its buffers (running statistics) change as it trains."""

    world: World
    class_counts: Tensor
    buffers: Tensors
    round: int

    @property
    def local(self) -> LocalSettings:
        """The local settings."""
        return self.world.local

    @property
    def lr(self) -> float:
        """The local learning rate of this round."""
        return self.world.local.lr_of_round(self.round)

    def logits(self, params: Tensors, inputs: Tensor) -> Tensor:
        """The model's output in evaluation mode."""
        return forward(self.world, params, self.buffers, inputs, training=False)

    def losses(self, logits: Tensor, labels: Tensor) -> Tensor:
        """The local objective of each example."""
        return self.world.loss(logits, labels, self.class_counts)

    def loss(self, params: Tensors, batch: Batch, *, training: bool = True) -> Tensor:
        """Mean local objective over a batch; in training mode the running statistics follow."""
        buffers = self.buffers if training else copied(self.buffers)
        losses = self.losses(forward(self.world, params, buffers, batch.inputs, training=True), batch.labels)
        if batch.weights is None:
            return losses.mean()
        return (losses * batch.weights).sum() / batch.weights.sum()

    def gradient(self, params: Tensors, batch: Batch, *, training: bool = True) -> tuple[Tensor, Tensors]:
        """The mean local objective over a batch and its gradient."""
        with torch.enable_grad():
            leaves = _leaves(params)
            loss = self.loss(leaves, batch, training=training)
            return loss.detach(), _gradient(loss, leaves)

    def part(self, data: Batch, index: int) -> Batch:
        """The batch at ``index``, modulo their number, in the data's own order."""
        size, examples = self.local.batch_size, len(data.labels)
        start = index % -(-examples // size) * size
        here = slice(start, start + size)
        return Batch(data.inputs[here], data.labels[here], None if data.weights is None else data.weights[here])


@contextmanager
def one_thread(device: torch.device) -> Iterator[None]:
    """On a CPU, arithmetic in this block runs on one thread."""
    threads = torch.get_num_threads()
    if device.type != "cpu" or threads == 1:
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _leaves(params: Tensors) -> Tensors:
    return {name: value.detach().requires_grad_() for name, value in params.items()}


def _gradient(objective: Tensor, leaves: Tensors) -> Tensors:
    gradients = torch.autograd.grad(objective, tuple(leaves.values()), materialize_grads=True)
    return dict(zip(leaves, gradients, strict=True))


def copied(tensors: Tensors) -> Tensors:
    """The same values in memory of their own."""
    return {name: value.clone() for name, value in tensors.items()}


def _stacked(tensors: Tensors) -> Tensors:
    return {name: value.unsqueeze(0) for name, value in tensors.items()}


def _refuse_divergence(losses: Tensor, params: Tensors, round: int, client: int, lr: float) -> None:
    """Stop at the first loss or parameter that is no number, before it reaches the server."""
    finite = torch.stack([losses.isfinite().all(), *(p.isfinite().all() for p in params.values())])
    if bool(finite.all()):
        return
    bad = torch.nonzero(~losses.isfinite()).flatten().tolist()
    what = (
        f"the training loss became {losses[bad[0]].item()} at local step {bad[0] + 1}"
        if bad
        else ("the local parameters overflowed in the last step")
    )
    raise TrainingError(
        f"training diverged: {what}; lower local.lr (it is {lr:g}) or look for broken inputs",
        round=round,
        client=client,
    )
