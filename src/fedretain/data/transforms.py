"""Normalisation and augmentation as batched tensor operations, pure and on any device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Literal, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from fedretain.data.dataset import Array, Dataset
from fedretain.errors import ConfigError, unknown

NormaliseKind = Literal["mean_std", "per_pixel", "unit"]

# Mean and standard deviation per channel on the 0-1 scale that the papers use for CIFAR (wsm-paper). They are
# not quite those of the pixels: CIFAR-10's deviations are about 0.247, 0.244 and 0.262.
PUBLISHED_MEAN_STD: Mapping[str, tuple[tuple[float, ...], tuple[float, ...]]] = MappingProxyType(
    {
        "cifar10": ((0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010)),
        "cifar100": ((0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010)),
    }
)
_PER_PIXEL_EPSILON = 0.001
_CHUNK = 2048


@dataclass(frozen=True, eq=False)
class Normalise:
    """Raw inputs to what a model sees: (x - offset) / divisor, per channel or per pixel.

    ``offset`` and ``divisor`` have shape [C, 1, 1] or [C, H, W] and are in the units of the raw inputs,
    so that any leading dimensions are broadcast. ``dtype`` is the type of the result; the arithmetic is
    in float32 or better.
    """

    offset: Tensor
    divisor: Tensor
    dtype: torch.dtype = torch.float32

    @classmethod
    def fit(
        cls,
        dataset: Dataset,
        kind: NormaliseKind = "mean_std",
        mean: Sequence[float] | None = None,
        std: Sequence[float] | None = None,
    ) -> Normalise:
        """The normalisation of a dataset, from its training set alone.

        ``unit``: x / scale. ``mean_std``: (x / scale - mean_c) / std_c per channel c, with the given
        ``mean`` and ``std``, else the published ones (CIFAR), else the exact ones of the training set; a
        channel that is constant there is only centred (std_c = 1). ``per_pixel``: (x - mean_p) / (std_p +
        0.001) per pixel p on the 0-255 scale (fedreg-paper, B.2); inputs with another scale are brought
        to that one.
        """
        if kind not in get_args(NormaliseKind):
            raise ConfigError(unknown("normalisation", kind, get_args(NormaliseKind)))
        if (mean is None) != (std is None) or (mean is not None and kind != "mean_std"):
            raise ConfigError("mean and std are given together, and only with normalise: mean_std")
        channels, scale = dataset.shape[0], dataset.scale
        if kind == "unit":
            return cls._of(np.zeros((channels, 1, 1)), np.full((channels, 1, 1), scale))
        if kind == "per_pixel":
            centre, deviation = _moments(dataset.train.inputs, (0,))
            return cls._of(centre[0], deviation[0] + _PER_PIXEL_EPSILON * scale / 255)
        published = PUBLISHED_MEAN_STD.get(dataset.name)
        if mean is not None and std is not None:
            return cls._of(_per_channel("mean", mean, channels) * scale, _positive(std, channels) * scale)
        if published is not None and len(published[0]) == channels:
            return cls._of(
                _per_channel("mean", published[0], channels) * scale,
                _positive(published[1], channels) * scale,
            )
        centre, deviation = _moments(dataset.train.inputs, (0, 2, 3))
        return cls._of(centre[0], np.where(_constant(dataset.train.inputs), scale, deviation[0]))

    @classmethod
    def _of(cls, offset: Array, divisor: Array) -> Normalise:
        return cls(torch.tensor(offset, dtype=torch.float32), torch.tensor(divisor, dtype=torch.float32))

    def __call__(self, inputs: Tensor) -> Tensor:
        """Normalises inputs [..., C, H, W] of any number type."""
        return ((inputs.to(self.offset.dtype) - self.offset) / self.divisor).to(self.dtype)

    def to(self, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> Normalise:
        """The same normalisation on another device or with another type of result."""
        wanted = dtype or self.dtype
        exact = torch.float64 if wanted == torch.float64 else torch.float32
        return replace(
            self,
            offset=self.offset.to(device=device, dtype=exact),
            divisor=self.divisor.to(device=device, dtype=exact),
            dtype=wanted,
        )


def draw_crop_flip(rng: np.random.Generator, steps: int, batch: int, *, pad: int = 4) -> NDArray[np.int64]:
    """The random numbers of ``crop_flip`` for ``steps`` batches: int64 [steps, batch, 3].

    dy and dx are uniform over 0 .. 2·pad and flip over 0, 1. Every number takes exactly one draw, in
    order, so that drawing more steps leaves the earlier ones as they were.
    """
    bounds = np.array([2 * pad + 1, 2 * pad + 1, 2])
    draws: NDArray[np.int64] = np.floor(rng.random((steps, batch, 3)) * bounds).astype(np.int64)
    return draws


def crop_flip(inputs: Tensor, draws: Tensor, *, pad: int = 4) -> Tensor:
    """A random crop out of zero padding, then a random horizontal flip; inputs [B, C, H, W], draws [B, 3].

    out[b, c, y, x] = padded[b, c, y + dy_b, x' + dx_b], x' = W-1-x if flip_b else x. Zero is black in raw
    images, therefore apply it before ``Normalise``.
    """
    examples, channels, height, width = inputs.shape
    dy, dx, flip = draws.to(inputs.device).unbind(1)
    y = torch.arange(height, device=inputs.device)
    x = torch.arange(width, device=inputs.device)
    rows = y[None, :] + dy[:, None]
    columns = torch.where(flip[:, None] == 1, width - 1 - x[None, :], x[None, :]) + dx[:, None]
    padded = functional.pad(inputs, (pad, pad, pad, pad)).flatten(2)
    sources = (rows[:, :, None] * (width + 2 * pad) + columns[:, None, :]).reshape(examples, 1, height * width)
    return padded.gather(2, sources.expand(-1, channels, -1)).reshape(inputs.shape)


def _moments(inputs: Array, axes: tuple[int, ...]) -> tuple[Array, Array]:
    """Mean and (population) standard deviation in float64, in two passes over blocks of examples."""
    count = int(np.prod([inputs.shape[axis] for axis in axes]))
    blocks = range(0, len(inputs), _CHUNK)
    total = sum(inputs[i : i + _CHUNK].sum(axis=axes, dtype=np.float64, keepdims=True) for i in blocks)
    mean = np.asarray(total) / count
    squares = sum(((inputs[i : i + _CHUNK] - mean) ** 2).sum(axis=axes, keepdims=True) for i in blocks)
    return mean, np.sqrt(np.asarray(squares) / count)


def _constant(inputs: Array) -> Array:
    """Which channels hold one value only, [C, 1, 1]; exact, where a rounded deviation might not be zero."""
    spread: Array = inputs.max(axis=(0, 2, 3)) == inputs.min(axis=(0, 2, 3))
    return spread[:, None, None]


def _per_channel(what: str, values: Sequence[float], channels: int) -> Array:
    array = np.asarray(values, dtype=np.float64)
    if array.shape != (channels,) or not np.isfinite(array).all():
        raise ConfigError(f"normalisation: {what} is {values!r}, but must be {channels} number(s), one per channel")
    return array[:, None, None]


def _positive(values: Sequence[float], channels: int) -> Array:
    array = _per_channel("std", values, channels)
    if (array <= 0).any():
        raise ConfigError(f"normalisation: std is {values!r}, but every entry must be positive")
    return array
