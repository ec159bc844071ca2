"""Arithmetic on flat dictionaries of tensors: parameters, gradients, control variates, all alike."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

Tensors = dict[str, Tensor]


def zeros_like(a: Mapping[str, Tensor]) -> Tensors:
    """0, with the names and shapes of a."""
    return {name: torch.zeros_like(value) for name, value in a.items()}


def add(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> Tensors:
    """a + b."""
    return {name: value + b[name] for name, value in a.items()}


def subtract(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> Tensors:
    """a − b."""
    return {name: value - b[name] for name, value in a.items()}


def scale(factor: float | Tensor, a: Mapping[str, Tensor]) -> Tensors:
    """factor · a."""
    return {name: factor * value for name, value in a.items()}


def add_scaled(a: Mapping[str, Tensor], factor: float | Tensor, b: Mapping[str, Tensor]) -> Tensors:
    """a + factor · b."""
    return {name: value + factor * b[name] for name, value in a.items()}


def inner(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> Tensor:
    """⟨a, b⟩ over all entries of all tensors."""
    return torch.stack([(value * b[name]).sum() for name, value in a.items()]).sum()


def inners(*pairs: tuple[Mapping[str, Tensor], Mapping[str, Tensor]]) -> tuple[Tensor, ...]:
    """⟨a, b⟩ of every pair; tensor by tensor, so that a compiler reads each of them once for all pairs."""
    names = list(pairs[0][0])
    sums = torch.stack([(a[name] * b[name]).sum() for name in names for a, b in pairs])
    return sums.reshape(len(names), len(pairs)).sum(0).unbind()


def squared_distance(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> Tensor:
    """‖a − b‖² over all entries of all tensors."""
    return torch.stack([(value - b[name]).square().sum() for name, value in a.items()]).sum()


def all_finite(a: Mapping[str, Tensor]) -> bool:
    """Whether every entry is a number; the answer of all tensors is fetched from the device at once.

    A sum is finite only if all its terms are; one that is not may have overflowed, which takes a closer look.
    """
    if all(value.device.type == "cpu" for value in a.values()):
        quick = all(math.isfinite(value.sum().item()) for value in a.values())
    else:
        quick = bool(torch.stack([value.sum().isfinite() for value in a.values()]).all())
    return quick or bool(torch.stack([value.isfinite().all() for value in a.values()]).all())


def size_in_bytes(a: Mapping[str, Tensor]) -> int:
    """What sending these tensors costs, without framing."""
    return sum(value.numel() * value.element_size() for value in a.values())


def with_prefix(prefix: str, a: Mapping[str, Tensor]) -> Tensors:
    """Names become ``prefix/name``."""
    return {f"{prefix}/{name}": value for name, value in a.items()}


def under_prefix(prefix: str, a: Mapping[str, Tensor]) -> Tensors:
    """The entries called ``prefix/name``, by their short names."""
    start = prefix + "/"
    return {name.removeprefix(start): value for name, value in a.items() if name.startswith(start)}
