"""Convolutions of many clients at once on a GPU, each client with its own weights.

Maps are [K, B, C, H, W], weights [K, O, C, R, S], K clients. ``vmap`` writes this as a grouped convolution, for which
cuDNN has no fast kernels at a handful of channels; here the clients are an axis of the grid. Maps of more than
``FEW_CHANNELS`` channels and all weight gradients come out with their channels side by side ([K, B, H, W, C] and
[K, O, R, S, C] in memory), maps of fewer plane by plane; what is given may have any layout.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fedretain.engines.folding import folded_forward, folded_weight_gradient

TYPES = (torch.float32, torch.bfloat16, torch.float16)
PROCESSORS = 132
"""Programs that keep a large GPU busy; a weight gradient's pixels are divided until there are four times as many."""


FEW_CHANNELS = 16
"""Up to so many channels a map lies plane by plane, and blocks of its pixels are computed together."""


class Tile(NamedTuple):
    """How much of the product a program makes, and with what means."""

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int


def forward_tile(pixels: int, inputs: int, outputs: int, wide: bool) -> Tile:
    """Tiles of a product [pixels, taps × inputs] · [taps × inputs, outputs]; ``wide``: 4 bytes a number."""
    columns = min(128, max(16, 1 << (outputs - 1).bit_length()))
    if inputs % 32:
        return Tile(128, columns, 16 if wide else 32, 4, 3)
    if wide or inputs % 64:
        return Tile(64 if pixels <= 512 else 128, columns, 32, 4, 3)
    if inputs >= 128 and outputs % 256 == 0:
        return Tile(128, 256, 64, 8, 3)
    return Tile(128, columns, 64, 4, 3 if columns == 128 else 4)


def weight_tile(pixels: int, inputs: int, outputs: int, wide: bool) -> Tile:
    """Tiles of a product [outputs, pixels] · [pixels, taps × inputs]."""
    rows = min(128, max(16, 1 << (outputs - 1).bit_length()))
    if inputs % 64 or wide:
        columns = 64 if inputs % 64 == 0 or inputs > 8 else 128
        return Tile(rows, columns, 32, 4, 3)
    if rows < 128:
        return Tile(rows, 64, 128, 4, 3)
    if pixels <= 128:
        return Tile(rows, 128, 128, 8, 2) if inputs % 128 == 0 else Tile(rows, 64, 64, 4, 4)
    return Tile(rows, 128, 64, 4, 3) if pixels <= 2048 and inputs % 128 == 0 else Tile(rows, 64, 64, 4, 4)


def splits_of(pixels: int, programs: int, depth: int) -> int:
    """Into how many parts the pixels go, so that the whole GPU has work."""
    return max(1, min(4 * PROCESSORS // max(1, programs), pixels // (8 * depth)))


def _precision(x: Tensor) -> str:
    """TF32 where PyTorch's own convolutions use it."""
    return "tf32" if x.dtype != torch.float32 or torch.backends.cudnn.allow_tf32 else "ieee"


def _channels_last(like: Tensor, shape: Sequence[int]) -> Tensor:
    k, b, c, h, w = shape
    return like.new_empty((k, b, h, w, c)).permute(0, 1, 4, 2, 3)


def _maps(like: Tensor, shape: Sequence[int]) -> Tensor:
    return like.new_empty(tuple(shape)) if shape[2] <= FEW_CHANNELS else _channels_last(like, shape)


def _side_by_side(maps: Tensor) -> Tensor:
    """The same maps with their channels side by side, where the kernels read them so."""
    return maps.permute(0, 1, 3, 4, 2).contiguous().permute(0, 1, 4, 2, 3)


def _few(c: int, o: int, stride: int) -> bool:
    return c <= FEW_CHANNELS and o <= FEW_CHANNELS and stride == 1


def _outputs(size: int, taps: int, stride: int, padding: int) -> int:
    return (size + 2 * padding - taps) // stride + 1


@torch.library.custom_op("fedretain::convolve", mutates_args=(), device_types="cuda")
def convolve(x: Tensor, w: Tensor, stride: int, padding: Sequence[int]) -> Tensor:
    """y[k, b, o] = Σ_c x[k, b, c] ⋆ w[k, o, c] for every client k."""
    from fedretain.engines.convolution_kernels import forward_kernel

    k, b, c, h, wide = x.shape
    _, o, _, r, s = w.shape
    oh, ow = _outputs(h, r, stride, padding[0]), _outputs(wide, s, stride, padding[1])
    y = _maps(x, (k, b, o, oh, ow))
    pixels = b * oh * ow
    if _few(c, o, stride):
        folded_forward(x, w, y, padding, _precision(x))
        return y
    x = _side_by_side(x)
    tile = forward_tile(pixels, c, o, x.dtype == torch.float32)
    grid = (-(-pixels // tile.rows) * -(-o // tile.columns), k)
    forward_kernel[grid](
        x,
        w,
        y,
        *x.stride(),
        *w.stride(),
        y.stride(0),
        o <= FEW_CHANNELS,
        pixels,
        c,
        h,
        wide,
        o,
        oh,
        ow,
        r,
        s,
        stride,
        *padding,
        c % tile.depth != 0,
        _precision(x),
        tile.rows,
        tile.columns,
        tile.depth,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
    return y


@convolve.register_fake
def _(x: Tensor, w: Tensor, stride: int, padding: Sequence[int]) -> Tensor:
    k, b, _, h, wide = x.shape
    _, o, _, r, s = w.shape
    return _maps(x, (k, b, o, _outputs(h, r, stride, padding[0]), _outputs(wide, s, stride, padding[1])))


@torch.library.custom_op("fedretain::convolve_input_gradient", mutates_args=(), device_types="cuda")
def input_gradient(d: Tensor, w: Tensor, size: Sequence[int], stride: int, padding: Sequence[int]) -> Tensor:
    """The gradient with respect to x, maps of ``size``, from d, the one with respect to y."""
    from fedretain.engines.convolution_kernels import input_kernel

    k, b, o, oh, ow = d.shape
    _, _, c, r, s = w.shape
    h, wide = size
    x = _maps(d, (k, b, c, h, wide))
    if _few(c, o, stride):
        flipped = w.flip(3, 4).transpose(1, 2)
        folded_forward(d, flipped, x, (r - 1 - padding[0], s - 1 - padding[1]), _precision(d))
        return x
    d = _side_by_side(d)
    pixels = b * -(-h // stride) * -(-wide // stride)
    tile = forward_tile(pixels, o, c, d.dtype == torch.float32)
    grid = (-(-pixels // tile.rows) * -(-c // tile.columns), k, stride * stride)
    input_kernel[grid](
        d,
        w,
        x,
        *d.stride(),
        *w.stride(),
        x.stride(0),
        c <= FEW_CHANNELS,
        b,
        c,
        h,
        wide,
        o,
        oh,
        ow,
        r,
        s,
        stride,
        *padding,
        o % tile.depth != 0,
        _precision(d),
        tile.rows,
        tile.columns,
        tile.depth,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
    return x


@input_gradient.register_fake
def _(d: Tensor, w: Tensor, size: Sequence[int], stride: int, padding: Sequence[int]) -> Tensor:
    return _maps(d, (d.shape[0], d.shape[1], w.shape[2], *size))


@torch.library.custom_op("fedretain::convolve_weight_gradient", mutates_args=(), device_types="cuda")
def weight_gradient(d: Tensor, x: Tensor, taps: Sequence[int], stride: int, padding: Sequence[int]) -> Tensor:
    """The gradient with respect to w, of ``taps`` r × s, from d, the one with respect to y."""
    from fedretain.engines.convolution_kernels import weight_kernel

    k, b, o, oh, ow = d.shape
    _, _, c, h, wide = x.shape
    r, s = taps
    pixels = b * oh * ow
    if _few(c, o, stride):
        folded = folded_weight_gradient(d, x, taps, padding, _precision(x), PROCESSORS)
        return folded.permute(0, 1, 4, 2, 3)
    d, x = _side_by_side(d), _side_by_side(x)
    tile = weight_tile(pixels, c, o, x.dtype == torch.float32)
    tiles = -(-o // tile.rows) * -(-(r * s * c) // tile.columns)
    splits = splits_of(pixels, tiles * k, tile.depth)
    dtype = x.dtype if splits == 1 else torch.float32
    parts = torch.empty((splits, k, o, r, s, c), dtype=dtype, device=x.device)
    weight_kernel[(tiles, k, splits)](
        d,
        x,
        parts,
        *d.stride(),
        *x.stride(),
        parts.stride(1),
        parts.stride(0),
        pixels,
        splits,
        c,
        h,
        wide,
        o,
        oh,
        ow,
        r,
        s,
        stride,
        *padding,
        _precision(x),
        tile.rows,
        tile.columns,
        tile.depth,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
    total = parts[0] if splits == 1 else parts.sum(0).to(x.dtype)
    return total.permute(0, 1, 4, 2, 3)


@weight_gradient.register_fake
def _(d: Tensor, x: Tensor, taps: Sequence[int], stride: int, padding: Sequence[int]) -> Tensor:
    return _channels_last(x, (d.shape[0], d.shape[2], x.shape[2], *taps))
