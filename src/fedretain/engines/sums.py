"""Sums over uploads: all that the server needs of them, unless somebody looks at single ones."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fedretain.engines.native.kernels import available, weighted_sum
from fedretain.tensors import Tensors, add, size_in_bytes

if TYPE_CHECKING:
    from fedretain.engines.engine import Uploads


@dataclass
class Sums:
    """Running sums over uploads; memory does not grow with the number of clients."""

    delta: Tensors = field(default_factory=dict)
    """Σ_k p_k · model change"""
    mean: Tensors = field(default_factory=dict)
    """Σ_k p_k · extra upload"""
    total: Tensors = field(default_factory=dict)
    """Σ_k extra upload"""
    buffers: Tensors = field(default_factory=dict)
    """Σ_k p_k · running statistics; of a counter the largest"""
    bytes_up: int = 0
    """What the clients really sent."""

    def add(self, uploads: Uploads, weights: Tensor) -> None:
        """Add a chunk; ``weights`` are the p_k of its clients."""
        # A counter such as num_batches_tracked has no mean: the most advanced client's stands.
        buffers = {
            name: _weighted_sum(weights, value) if value.is_floating_point() else value.amax(0)
            for name, value in uploads.buffers.items()
        }
        self.include(
            Sums(
                _weighted(weights, uploads.delta),
                _weighted(weights, uploads.extras),
                {name: value.sum(0) for name, value in uploads.extras.items()},
                buffers,
                upload_bytes(uploads),
            )
        )

    def include(self, others: Sums) -> None:
        """Add the sums over other clients."""
        self.delta = _accumulate(self.delta, others.delta)
        self.mean = _accumulate(self.mean, others.mean)
        self.total = _accumulate(self.total, others.total)
        for name, value in others.buffers.items():
            if name not in self.buffers:
                self.buffers[name] = value
            elif value.is_floating_point():
                self.buffers[name] = self.buffers[name] + value
            else:
                self.buffers[name] = torch.maximum(self.buffers[name], value)
        self.bytes_up += others.bytes_up


def upload_bytes(uploads: Uploads) -> int:
    """What a chunk of clients really sends: the model change, running statistics and extra uploads."""
    return sum(size_in_bytes(part) for part in (uploads.delta, uploads.buffers, uploads.extras))


def _weighted(weights: Tensor, tensors: Tensors) -> Tensors:
    """Σ_k p_k v_k over the leading axis; a count becomes a real number."""
    return {name: _weighted_sum(weights, value) for name, value in tensors.items()}


def _weighted_sum(weights: Tensor, values: Tensor) -> Tensor:
    real = values if values.is_floating_point() else values.to(weights.dtype)
    if len(weights) == 1:
        return weights[0].to(real.dtype) * real[0]
    if not real.is_contiguous() and real.dim() == 3 and real.mT.is_contiguous():
        return _weighted_sum(weights, real.mT).mT  # summed as it lies
    if real.device.type == "cpu" and available(real.dtype, "weighted_sum"):
        return weighted_sum(real, weights)
    return (weights.to(real.dtype) @ real.reshape(len(real), -1)).reshape(real.shape[1:])


def _accumulate(sums: Tensors, parts: Tensors) -> Tensors:
    return add(sums, parts) if sums else parts
