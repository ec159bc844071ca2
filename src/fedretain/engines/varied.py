"""Experiments that can train as one stack: the same shapes and hooks, other seeds, rates, losses and numbers."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fedretain.engines.engine import World
from fedretain.methods import Method
from fedretain.methods.chain import Chain, parts
from fedretain.tensors import Tensors

if TYPE_CHECKING:
    from fedretain.engines.stack import Stack

FREE_LOCAL = ("lr", "lr_decay")
"""Local settings that may differ within a stack: they only change the rate of a round."""
_NUMBER = torch.float64


@dataclass(frozen=True)
class Varied:
    """What differs between the experiments of a stack, as tensors with one entry per experiment."""

    template: World
    losses: tuple[Any, ...]
    values: Tensors
    """By name: which of the losses; and every number of the method that differs, named ``member.field``."""

    @classmethod
    def of(cls, worlds: Sequence[World]) -> Varied:
        """Find what differs; the worlds must be ``alike``."""
        losses: list[Any] = []
        chosen = []
        for world in worlds:
            key = _loss_key(world.loss)
            if key not in [_loss_key(loss) for loss in losses]:
                losses.append(world.loss)
            chosen.append([_loss_key(loss) for loss in losses].index(key))
        values: Tensors = {}
        device = worlds[0].federation.device
        if len(losses) > 1:
            values["loss"] = torch.tensor(chosen, device=device)
        fields = [_numbers(world.method) for world in worlds]
        for name in fields[0]:
            found = [numbers[name] for numbers in fields]
            if len(set(found)) > 1:
                values[name] = torch.tensor(found, dtype=_NUMBER, device=device)
        return cls(worlds[0], tuple(losses), values)

    def numbers(self, clients: Stack) -> Tensors:
        """The values of each client."""
        if not self.values:
            return {}
        which = torch.tensor([member.which for member in clients.members], device=self.template.federation.device)
        return {name: value[which] for name, value in self.values.items()}

    def world(self, numbers: Tensors) -> World:
        """One client's experiment, its numbers being tensors; for use within ``vmap``."""
        if not numbers:
            return self.template
        loss = self.template.loss
        if "loss" in numbers:
            loss = partial(_one_of, self.losses, numbers["loss"])
        return replace(self.template, loss=loss, method=_with_numbers(self.template.method, numbers))


def alike(first: World, second: World) -> bool:
    """Whether two experiments can train in one stack."""
    return (
        first.federation.inputs is second.federation.inputs
        and first.precision == second.precision
        and _shapes(first) == _shapes(second)
        and type(first.model) is type(second.model)
        and str(first.model) == str(second.model)
        and first.local.model_dump(exclude=set(FREE_LOCAL)) == second.local.model_dump(exclude=set(FREE_LOCAL))
        and _structure(first.method) == _structure(second.method)
    )


def _one_of(losses: tuple[Any, ...], which: Tensor, logits: Tensor, labels: Tensor, class_counts: Tensor) -> Tensor:
    """The loss of this client's experiment; all are computed, one counts."""
    values = torch.stack([loss(logits, labels, class_counts) for loss in losses])
    return values.gather(0, which.expand(1, *values.shape[1:])).squeeze(0)


def _with_numbers(method: Method, numbers: Tensors) -> Method:
    changed = []
    for index, member in enumerate(parts(method)):
        new = copy.copy(member)
        for field in dataclasses.fields(member):
            if f"{index}.{field.name}" in numbers:
                object.__setattr__(new, field.name, numbers[f"{index}.{field.name}"])
        changed.append(new)
    if not isinstance(method, Chain):
        return changed[0]
    whole = copy.copy(method)
    object.__setattr__(whole, "methods", tuple(changed))
    return whole


def _numbers(method: Method) -> dict[str, float]:
    """The real numbers among a method's fields; counts and choices decide what is computed and must be the same."""
    return {
        f"{index}.{field.name}": value
        for index, member in enumerate(parts(method))
        for field in dataclasses.fields(member)
        if isinstance(value := getattr(member, field.name), float)
    }


def _structure(method: Method) -> list[Any]:
    """The members of a method and everything about them but their real numbers."""
    described = []
    for member in parts(method):
        values = {field.name: getattr(member, field.name) for field in dataclasses.fields(member)}
        fixed = {name: "number" if isinstance(value, float) else repr(value) for name, value in values.items()}
        described.append((type(member), fixed))
    return described


def _shapes(world: World) -> list[Any]:
    tensors = [*world.model.named_parameters(), *world.model.named_buffers()]
    return [(name, tuple(value.shape), value.dtype) for name, value in tensors]


def _loss_key(loss: Any) -> Any:
    if isinstance(loss, partial):
        return (loss.func, tuple(sorted(loss.keywords.items())))
    return loss
