"""Convolutions of many clients at once on a GPU, each client with its own weights.

As ``vmap`` writes them: grouped convolutions, one group a client, maps [B, K·C, H, W], weights [K·O, C, R, S]. Results
come out with their channels side by side, [B, H, W, K, C] and [K, O, R, S, C] in memory; what is given may have any
layout. In half precision the faster of our kernels and cuDNN's is taken (``choices``); in float32 it is
always ours, whose sums have one order. A handful of channels has kernels of its own (``folding``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from fedretain.engines.choices import fastest

TYPES = (torch.float32, torch.bfloat16, torch.float16)
PROCESSORS = 132
"""Programs that keep a large GPU busy, one on each of its processors."""


class Tile(NamedTuple):
    """How much of the product a program makes, and with what means."""

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int


def forward_tile(pixels: int, inputs: int, outputs: int, times: int, wide: bool) -> Tile:
    """Tiles of ``times`` products [pixels, taps × inputs] · [taps × inputs, outputs]; ``wide``: 4 bytes a number."""
    columns = min(128, max(16, 1 << (outputs - 1).bit_length()))
    if inputs % 32:
        return Tile(128, columns, 16 if wide else 32, 4, 3)
    if wide or inputs % 64:
        return Tile(64 if pixels <= 512 else 128, columns, 32, 4, 3)
    if inputs >= 128 and outputs % 256 == 0:
        wide_tiles = outputs // 256 * times
        if -(-pixels // 128) * wide_tiles >= 3 * PROCESSORS:
            return Tile(128, 256, 64, 8, 4)
        if pixels % 128 and -(-pixels // 64) * wide_tiles >= 3 * PROCESSORS:
            return Tile(64, 256, 64, 4, 4)
    return Tile(128, columns, 64, 8 if columns == 128 else 4, 3)


def weight_tile(pixels: int, inputs: int, outputs: int, columns: int, wide: bool) -> Tile:
    """Tiles of a product [outputs, pixels] · [pixels, columns], the columns being taps × inputs."""
    rows = min(128, max(16, 1 << (outputs - 1).bit_length()))
    if inputs % 64 or wide:
        return Tile(rows, 64 if inputs % 64 == 0 or inputs > 8 else 128, 32, 4, 3)
    if rows < 128 or columns < 128:
        return Tile(rows, 64, 64, 4, 3)
    if pixels <= 128 and inputs % 256 == 0:
        return Tile(64, 256, 32, 4, 3)
    return Tile(rows, 128, 32, 4, 4) if inputs % 128 == 0 else Tile(rows, 128, 64, 4, 3)


def splits_of(pixels: int, programs: int, tile: Tile) -> int:
    """Into how many parts the pixels go, so that the whole GPU has work."""
    at_once = (2 if tile.rows * tile.columns >= 128 * 128 else 4) * PROCESSORS
    return max(1, min(at_once // max(1, programs), pixels // (8 * tile.depth)))


def precision_of(x: Tensor) -> str:
    """TF32 where PyTorch's own convolutions use it."""
    return "tf32" if x.dtype != torch.float32 or torch.backends.cudnn.allow_tf32 else "ieee"


def outputs_of(size: int, taps: int, stride: int, padding: int) -> int:
    """Pixels that a convolution makes of ``size``."""
    return (size + 2 * padding - taps) // stride + 1


def _side_by_side(maps: Tensor) -> Tensor:
    return maps.contiguous(memory_format=torch.channels_last)


def _new_maps(like: Tensor, shape: Sequence[int]) -> Tensor:
    return torch.empty(tuple(shape), dtype=like.dtype, device=like.device, memory_format=torch.channels_last)


def _by_client(tensor: Tensor, clients: int) -> Tensor:
    """Maps [B, K·C, H, W] as [K, B, C, H, W]."""
    batch, channels, height, width = tensor.shape
    return tensor.view(batch, clients, channels // clients, height, width).transpose(0, 1)


def _of_client(weights: Tensor, clients: int) -> Tensor:
    """Weights [K·O, C, R, S] as [K, O, C, R, S]."""
    return weights.view(clients, -1, *weights.shape[1:])


def _ways(x: Tensor, ours: Callable[[], Tensor], cudnn: Callable[[], Tensor]) -> list[Callable[[], Tensor]]:
    """What may compute this: in float32 our kernels alone."""

    def tuned() -> Tensor:
        with torch.backends.cudnn.flags(enabled=True, benchmark=True, deterministic=True):
            return _side_by_side(cudnn())

    return [ours] if x.dtype == torch.float32 else [ours, tuned]


def _cudnn_gradient(
    d: Tensor, x: Tensor, w: Tensor, stride: int, padding: Sequence[int], clients: int, which: int
) -> Tensor:
    """The gradient with respect to x (0) or w (1); this one gives its shape and layout."""
    wanted = [which == 0, which == 1, False]
    found = torch.ops.aten.convolution_backward(
        d, x, w, None, [stride, stride], list(padding), [1, 1], False, [0, 0], clients, wanted
    )
    gradient: Tensor = found[which]
    return gradient


@torch.library.custom_op("fedretain::convolve", mutates_args=(), device_types="cuda")
def convolve(x: Tensor, w: Tensor, stride: int, padding: Sequence[int], clients: int) -> Tensor:
    """y[b, (k, o)] = Σ_c x[b, (k, c)] ⋆ w[(k, o), c] for every client k."""
    x, w = _side_by_side(x), _side_by_side(w)
    ways = _ways(
        x,
        lambda: _convolve(x, w, stride, padding, clients),
        lambda: F.conv2d(x, w, None, stride, list(padding), 1, clients),
    )
    return fastest(("forward", x.shape, w.shape, x.dtype, stride, *padding), ways)


@convolve.register_fake
def _(x: Tensor, w: Tensor, stride: int, padding: Sequence[int], clients: int) -> Tensor:
    return _new_maps(x, _shape_of_outputs(x, w, stride, padding))


def _shape_of_outputs(x: Tensor, w: Tensor, stride: int, padding: Sequence[int]) -> tuple[int, int, int, int]:
    batch, _, height, width = x.shape
    outputs, _, rows, columns = w.shape
    return (
        batch,
        outputs,
        outputs_of(height, rows, stride, padding[0]),
        outputs_of(width, columns, stride, padding[1]),
    )


def _convolve(x: Tensor, w: Tensor, stride: int, padding: Sequence[int], clients: int) -> Tensor:
    from fedretain.engines.convolution_kernels import forward_kernel

    y = _new_maps(x, _shape_of_outputs(x, w, stride, padding))
    maps, weights = _by_client(x, clients), _of_client(w, clients)
    batch, channels, *sides = maps.shape[1:]
    _, outputs, _, *taps = weights.shape
    made = y.shape[2:]
    pixels = batch * made[0] * made[1]
    tile = forward_tile(pixels, channels, outputs, clients, x.dtype == torch.float32)
    grid = (-(-pixels // tile.rows) * -(-outputs // tile.columns), clients)
    forward_kernel[grid](
        x,
        w,
        y,
        *maps.stride(),
        *weights.stride(),
        outputs,
        clients * outputs,
        pixels,
        channels,
        *sides,
        outputs,
        *made,
        *taps,
        stride,
        *padding,
        channels % tile.depth != 0,
        precision_of(x),
        tile.rows,
        tile.columns,
        tile.depth,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
    return y


@torch.library.custom_op("fedretain::convolve_input_gradient", mutates_args=(), device_types="cuda")
def input_gradient(
    d: Tensor, w: Tensor, size: Sequence[int], stride: int, padding: Sequence[int], clients: int
) -> Tensor:
    """The gradient with respect to x, maps of ``size``, from d, the one with respect to y."""
    d, w = _side_by_side(d), _side_by_side(w)
    ways = _ways(
        d,
        lambda: _input_gradient(d, w, size, stride, padding, clients),
        lambda: _cudnn_gradient(d, _new_maps(d, (len(d), clients * w.shape[1], *size)), w, stride, padding, clients, 0),
    )
    return fastest(("input", d.shape, w.shape, *size, d.dtype, stride, *padding), ways)


@input_gradient.register_fake
def _(d: Tensor, w: Tensor, size: Sequence[int], stride: int, padding: Sequence[int], clients: int) -> Tensor:
    return _new_maps(d, (len(d), clients * w.shape[1], *size))


def _input_gradient(
    d: Tensor, w: Tensor, size: Sequence[int], stride: int, padding: Sequence[int], clients: int
) -> Tensor:
    from fedretain.engines.convolution_kernels import input_kernel

    gradients, weights = _by_client(d, clients), _of_client(w, clients)
    _, batch, outputs, *made = gradients.shape
    channels, *taps = weights.shape[2:]
    x = _new_maps(d, (batch, clients * channels, *size))
    pixels = batch * -(-size[0] // stride) * -(-size[1] // stride)
    tile = forward_tile(pixels, outputs, channels, clients * stride * stride, d.dtype == torch.float32)
    grid = (-(-pixels // tile.rows) * -(-channels // tile.columns), clients, stride * stride)
    input_kernel[grid](
        d,
        w,
        x,
        *gradients.stride(),
        *weights.stride(),
        channels,
        clients * channels,
        batch,
        channels,
        *size,
        outputs,
        *made,
        *taps,
        stride,
        *padding,
        outputs % tile.depth != 0,
        precision_of(d),
        tile.rows,
        tile.columns,
        tile.depth,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
    return x


@torch.library.custom_op("fedretain::convolve_weight_gradient", mutates_args=(), device_types="cuda")
def weight_gradient(
    d: Tensor, x: Tensor, taps: Sequence[int], stride: int, padding: Sequence[int], clients: int
) -> Tensor:
    """The gradient with respect to w, of ``taps`` r × s, from d, the one with respect to y."""
    d, x = _side_by_side(d), _side_by_side(x)
    ways = _ways(
        x,
        lambda: _weight_gradient(d, x, taps, stride, padding, clients),
        lambda: _cudnn_gradient(
            d, x, _new_maps(x, (d.shape[1], x.shape[1] // clients, *taps)), stride, padding, clients, 1
        ),
    )
    return fastest(("weight", d.shape, x.shape, *taps, d.dtype, stride, *padding), ways)


@weight_gradient.register_fake
def _(d: Tensor, x: Tensor, taps: Sequence[int], stride: int, padding: Sequence[int], clients: int) -> Tensor:
    return _new_maps(x, (d.shape[1], x.shape[1] // clients, *taps))


def _weight_gradient(
    d: Tensor, x: Tensor, taps: Sequence[int], stride: int, padding: Sequence[int], clients: int
) -> Tensor:
    from fedretain.engines.convolution_kernels import weight_kernel

    gradients, maps = _by_client(d, clients), _by_client(x, clients)
    _, batch, outputs, *made = gradients.shape
    channels, *sides = maps.shape[2:]
    pixels, columns = batch * made[0] * made[1], taps[0] * taps[1] * channels
    tile = weight_tile(pixels, channels, outputs, columns, x.dtype == torch.float32)
    tiles = -(-outputs // tile.rows) * -(-columns // tile.columns)
    splits = splits_of(pixels, tiles * clients, tile)
    dtype = x.dtype if splits == 1 else torch.float32
    parts = torch.empty((splits, clients * outputs, *taps, channels), dtype=dtype, device=x.device)
    weight_kernel[(tiles, clients, splits)](
        d,
        x,
        parts,
        *gradients.stride(),
        *maps.stride(),
        outputs * columns,
        parts.stride(0),
        pixels,
        splits,
        channels,
        *sides,
        outputs,
        *made,
        *taps,
        stride,
        *padding,
        precision_of(x),
        tile.rows,
        tile.columns,
        tile.depth,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
    total = parts[0] if splits == 1 else parts.sum(0).to(x.dtype)
    return total.permute(0, 3, 1, 2)
