"""Models look at data, several at once where that is faster: accuracy and loss on the test set, and what probes ask."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence

import numpy as np
import torch
from torch import Tensor
from torch.func import vmap

from fedretain.engines.engine import World, forward
from fedretain.engines.native import pooling
from fedretain.tensors import Tensors, size_in_bytes

Model = tuple[Tensors, Tensors]
"""Parameters and buffers."""

STACKED = 2**24
"""Bytes of models that look at a batch together."""
CONVOLVING = 16
"""Models with convolutions that do so on an accelerator, at most: their maps take far more memory than they."""


def evaluate(world: World, params: Tensors, buffers: Tensors, batch_size: int) -> dict[str, float]:
    """Accuracy and cross-entropy (plain softmax, whatever the training loss) on the test set."""
    (found,) = evaluate_all(world, [(params, buffers)], batch_size)
    return found


def evaluate_all(
    world: World, models: Sequence[Model], batch_size: int, *, stacked: bool = True
) -> list[dict[str, float]]:
    """``evaluate`` of many models of one architecture; the test set passes by once, whatever their number.

    A model that is not ``stacked`` with others has the bits that it has alone. In a stack its logits are the same up to
    the order of float additions: its loss is equal to rounding in ``precision``, and its accuracy unless the two
    largest logits of an example are that close.
    """
    test = world.federation.test
    found = of_each(world, models, test.batches(batch_size), _right_and_loss, stacked=stacked)
    # Row by row: the sum of one model's losses must not depend on how many there are.
    return [
        {"test_accuracy": float(right.sum()) / len(test.labels), "test_loss": float(losses.sum()) / len(test.labels)}
        for losses, right in found
    ]


def of_each(
    world: World,
    models: Sequence[Model],
    batches: Iterable[tuple[Tensor, Tensor]],
    look: Callable[[Tensor, Tensor], Tensor],
    *,
    stacked: bool = True,
) -> np.ndarray:
    """``look(logits, labels)`` of every example under every model [models, …, examples].

    Batch by batch, then stack by stack of models: every batch is gathered and normalised once, whatever the number of
    models. Nothing waits for the device before the last batch.
    """
    stacks = _stacks(models, stacked)
    seen = [
        torch.cat([look(_logits_of_all(world, *stack, inputs), labels) for stack in stacks])
        for inputs, labels in batches
    ]
    return torch.cat(seen, dim=-1).cpu().numpy() if seen else np.empty((len(models), 0))


def logits_of(world: World, params: Tensors, buffers: Tensors, inputs: Tensor) -> Tensor:
    """What one model says [examples, classes], in evaluation mode."""
    with torch.no_grad(), pooling(world.model, inputs):
        return forward(world, params, buffers, inputs, training=False)


def is_right(logits: Tensor, labels: Tensor) -> Tensor:
    """Whether the largest of the logits […, examples, classes] is the label's."""
    return logits.argmax(-1) == labels


def cross_entropies(logits: Tensor, labels: Tensor) -> Tensor:
    """−log softmax(f)_y of each example under each model, plain softmax whatever the training loss, in float64."""
    # With the examples innermost PyTorch computes several of them in one instruction.
    by_class = logits.movedim(-1, 1).double()
    return torch.nn.functional.cross_entropy(by_class, labels.expand(len(logits), -1), reduction="none")


def _right_and_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """[models, 2, examples]."""
    losses = cross_entropies(logits, labels)
    return torch.stack([losses, is_right(logits, labels).to(losses.dtype)], dim=1)


def _stacks(models: Sequence[Model], stacked: bool) -> list[Model]:
    """Models side by side, with a leading axis, as many as ``STACKED`` bytes hold.

    On a CPU convolutions of several models at once are slower than one after the other: such models stay alone.
    """
    params, _ = models[0]
    together = max(1, STACKED // max(1, size_in_bytes(params)))
    if any(value.dim() > 2 for value in params.values()):
        on_cpu = next(iter(params.values())).device.type == "cpu"
        together = 1 if on_cpu else min(together, CONVOLVING)
    together = together if stacked else 1
    return [
        (_beside([params for params, _ in some]), _beside([buffers for _, buffers in some]))
        for some in (models[start : start + together] for start in range(0, len(models), together))
    ]


def _beside(parts: Sequence[Tensors]) -> Tensors:
    if len(parts) == 1:
        return {name: value[None] for name, value in parts[0].items()}
    return {name: torch.stack([part[name] for part in parts]) for name in parts[0]}


def _logits_of_all(world: World, params: Tensors, buffers: Tensors, inputs: Tensor) -> Tensor:
    """[models, examples, classes]."""
    count = len(next(iter(params.values())))
    if count > 1:
        # Some models cannot: one that asks for the value of a tensor, say, or whose maps do not fit into memory.
        with contextlib.suppress(RuntimeError), torch.no_grad():
            every = vmap(lambda params, buffers: forward(world, params, buffers, inputs, training=False))
            logits: Tensor = every(params, buffers)
            return logits
    alone = [(_at(index, params), _at(index, buffers)) for index in range(count)]
    return torch.stack([logits_of(world, *model, inputs) for model in alone])


def _at(index: int, stack: Tensors) -> Tensors:
    return {name: value[index] for name, value in stack.items()}
