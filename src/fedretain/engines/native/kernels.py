"""The kernels as functions of tensors. All of them work on maps [batch, channels, height, width] without gaps."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fedretain.engines.native.building import library

PLACES = {torch.float32: torch.int32, torch.float64: torch.int64}
"""How the place of a maximum is kept, by the type of the numbers."""
LEAST_WIDTH = {torch.float32: 8, torch.float64: 4}
"""Maps narrower than that are not pooled."""

Padding = tuple[int, int]
Gradients = tuple[Tensor | None, Tensor | None, Tensor | None]


def pool(maps: Tensor) -> tuple[Tensor, Tensor]:
    """Maximum over 2 × 2 windows, and where it was: the first of equals in reading order, as in ``max_pool2d``."""
    *outer, height, width = maps.shape
    out = maps.new_empty((*outer, height // 2, width // 2))
    places = maps.new_empty(out.shape, dtype=PLACES[maps.dtype])
    rows = out.numel() // (width // 2)
    function("pool", maps.dtype)(maps.data_ptr(), out.data_ptr(), places.data_ptr(), rows, width // 2)
    return out, places


def pool_backward(gradient: Tensor, places: Tensor) -> Tensor:
    """The gradient goes to where the maximum was."""
    gradient = gradient.contiguous()
    *outer, height, width = gradient.shape
    out = gradient.new_empty((*outer, 2 * height, 2 * width))
    rows = gradient.numel() // width
    function("pool_gradient", gradient.dtype)(gradient.data_ptr(), places.data_ptr(), out.data_ptr(), rows, width)
    return out


def convolve(maps: Tensor, weights: Tensor, bias: Tensor | None, padding: Padding) -> Tensor:
    """y = x ∗ w + b with stride 1."""
    maps, weights = maps.contiguous(), weights.contiguous()
    shape = _shape(maps, weights, padding)
    batch, _, height, width, outputs, kh, kw, up, left = shape
    out = maps.new_empty((batch, outputs, height + 2 * up - kh + 1, width + 2 * left - kw + 1))
    at = None if bias is None else bias.data_ptr()
    _checked(function("convolve", maps.dtype)(maps.data_ptr(), weights.data_ptr(), at, out.data_ptr(), *shape))
    return out


def maps_gradient(gradient: Tensor, maps: Tensor, weights: Tensor, padding: Padding) -> Tensor:
    """The gradient of a convolution's input; of ``maps`` only the shape is read."""
    gradient, weights = gradient.contiguous(), weights.contiguous()
    out = maps.new_empty(maps.shape)
    kernel = function("maps_gradient", gradient.dtype)
    given = _shape(maps, weights, padding)
    _checked(kernel(gradient.data_ptr(), weights.data_ptr(), out.data_ptr(), *given))
    return out


def weights_gradient(gradient: Tensor, maps: Tensor, weights: Tensor, padding: Padding) -> tuple[Tensor, Tensor]:
    """The gradients of a convolution's weights and bias; of ``weights`` only the shape is read."""
    gradient, maps = gradient.contiguous(), maps.contiguous()
    out, bias = weights.new_empty(weights.shape), weights.new_empty(weights.shape[0])
    kernel = function("weights_gradient", maps.dtype)
    given = _shape(maps, weights, padding)
    _checked(kernel(maps.data_ptr(), gradient.data_ptr(), out.data_ptr(), bias.data_ptr(), *given))
    return out, bias


def add_scaled_(numbers: Tensor, gradient: Tensor, factor: Tensor) -> Tensor:
    """w ← w + c·g, rounded like ``w.add_(g.mul(c))``; both lie in memory without gaps, in the same order."""
    function("add_scaled", numbers.dtype)(numbers.data_ptr(), gradient.data_ptr(), factor.item(), numbers.numel())
    return numbers


def weighted_sum(values: Tensor, shares: Tensor) -> Tensor:
    """Σ_k p_k v_k over the leading axis, one after another: the bits of a program that sums up where it plays."""
    values, shares = values.contiguous(), shares.to(torch.float64)
    out = values.new_empty(values.shape[1:])
    function("weighted_sum", values.dtype)(
        out.data_ptr(), values.data_ptr(), shares.data_ptr(), len(values), out.numel()
    )
    return out


def available(dtype: torch.dtype, name: str = "pool") -> bool:
    """Whether there are kernels for this type of numbers; not every processor has every one."""
    found = _holding(name, dtype)
    return found is not None and hasattr(found, name)


def _holding(name: str, dtype: torch.dtype) -> ctypes.CDLL | None:
    return library(dtype, "playing" if name in _PLAYING else "single")


_PLAYING = ("play", "play_summed", "weighted_sum")
_TENSOR, _WHOLE = ctypes.c_void_p, ctypes.c_long
_ARGUMENTS = {
    "pool": [_TENSOR] * 3 + [_WHOLE] * 2,
    "pool_gradient": [_TENSOR] * 3 + [_WHOLE] * 2,
    "convolve": [_TENSOR] * 4 + [_WHOLE] * 9,
    "maps_gradient": [_TENSOR] * 3 + [_WHOLE] * 9,
    "weights_gradient": [_TENSOR] * 4 + [_WHOLE] * 9,
    "add_scaled": [_TENSOR, _TENSOR, ctypes.c_double, _WHOLE],
    "weighted_sum": [_TENSOR] * 3 + [_WHOLE] * 2,
    "play": [_TENSOR, _WHOLE, _TENSOR, _WHOLE, _TENSOR, _TENSOR, _WHOLE, _WHOLE],
    "play_summed": [_TENSOR] * 3 + [_WHOLE, _TENSOR, _WHOLE, _TENSOR],
}


@functools.cache
def function(name: str, dtype: torch.dtype) -> Callable[..., Any]:
    """A kernel, by its name in C; it gives 0 where all went well."""
    found = _holding(name, dtype)
    assert found is not None
    kernel = getattr(found, name)
    kernel.argtypes, kernel.restype = _ARGUMENTS[name], ctypes.c_int
    return kernel  # type: ignore[no-any-return]


def _shape(maps: Tensor, weights: Tensor, padding: Padding) -> tuple[int, ...]:
    batch, inputs, height, width = maps.shape
    outputs, _, kh, kw = weights.shape
    return batch, inputs, height, width, outputs, kh, kw, *padding


def _checked(failed: int) -> None:
    if failed:
        raise MemoryError("no memory for a convolution")
