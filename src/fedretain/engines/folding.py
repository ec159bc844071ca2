"""Convolutions of many clients with few channels, by blocks of pixels (see ``folded_kernels``); stride 1 only.

Maps are [K, B, C, H, W] and lie plane by plane, weights [K, O, C, R, S], K clients. cuDNN has no fast kernels for
grouped convolutions of a handful of channels.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from fedretain.engines.convolution import PROCESSORS, outputs_of, precision_of

FEW_CHANNELS = 16
"""Up to so many channels, in and out, blocks of pixels are computed together."""
COLUMNS = 64
"""At most so many columns: channels times the pixels of a block."""


def block_of(channels: int, height: int, width: int, columns: int = COLUMNS) -> tuple[int, int]:
    """The block of output pixels that is computed together; it divides the map."""
    across = next(size for size in (4, 2, 1) if width % size == 0 and channels * size <= columns)
    down = next(size for size in (2, 1) if height % size == 0 and channels * size * across <= columns)
    return down, across


def few(channels: int, outputs: int, stride: int) -> bool:
    """Whether a convolution is one for these kernels."""
    return channels <= FEW_CHANNELS and outputs <= FEW_CHANNELS and stride == 1


@torch.library.custom_op("fedretain::folded_convolve", mutates_args=(), device_types="cuda")
def folded_convolve(x: Tensor, w: Tensor, padding: Sequence[int]) -> Tensor:
    """y[k, b, o] = Σ_c x[k, b, c] ⋆ w[k, o, c] for every client k."""
    from fedretain.engines.folded_kernels import folded_forward_kernel

    clients, batch, c, h, wide = x.shape
    _, o, _, rows, columns = w.shape
    oh, ow = outputs_of(h, rows, 1, padding[0]), outputs_of(wide, columns, 1, padding[1])
    y = x.new_empty((clients, batch, o, oh, ow))
    down, across = block_of(o, oh, ow)
    index = _spread(c, o, rows, columns, down, across, str(x.device))
    flat = torch.cat([w.reshape(clients, -1), w.new_zeros(clients, 1)], 1)
    blocks = batch * (oh // down) * (ow // across)
    tile = 128
    folded_forward_kernel[(-(-blocks // tile), clients)](
        x,
        flat.index_select(1, index),
        y,
        *x.stride(),
        blocks,
        c,
        h,
        wide,
        o,
        oh,
        ow,
        rows + down - 1,
        columns + across - 1,
        down,
        across,
        *padding,
        precision_of(x),
        tile,
        max(16, 1 << (o * down * across - 1).bit_length()),
        16 if x.dtype == torch.float32 else 32,
        num_warps=4,
        num_stages=3,
    )
    return y


@folded_convolve.register_fake
def _(x: Tensor, w: Tensor, padding: Sequence[int]) -> Tensor:
    clients, batch, _, height, width = x.shape
    _, outputs, _, rows, columns = w.shape
    sides = outputs_of(height, rows, 1, padding[0]), outputs_of(width, columns, 1, padding[1])
    return x.new_empty((clients, batch, outputs, *sides))


@torch.library.custom_op("fedretain::folded_weight_gradient", mutates_args=(), device_types="cuda")
def folded_weight_gradient(d: Tensor, x: Tensor, taps: Sequence[int], padding: Sequence[int]) -> Tensor:
    """The gradient with respect to w, of ``taps`` r × s, from d, the one with respect to y."""
    from fedretain.engines.folded_kernels import folded_weight_kernel

    clients, batch, o, oh, ow = d.shape
    c, h, wide = x.shape[2:]
    rows, columns = taps
    # Both factors are read across their rows; with 4 bytes a number the wide tensor-core instruction cannot do that.
    down, across = block_of(o, oh, ow, COLUMNS // 2 if x.dtype == torch.float32 else COLUMNS)
    blocks = batch * (oh // down) * (ow // across)
    patch = (rows + down - 1, columns + across - 1)
    outputs, inputs = o * down * across, c * patch[0] * patch[1]
    width, depth = 64, 32
    tiles = -(-inputs // width)
    splits = max(1, min(4 * PROCESSORS // (tiles * clients), blocks // (8 * depth)))
    parts = torch.empty((splits, clients, outputs, inputs), dtype=torch.float32, device=d.device)
    folded_weight_kernel[(tiles, clients, splits)](
        d,
        x,
        parts,
        *d.stride(),
        *x.stride(),
        parts.stride(1),
        parts.stride(0),
        blocks,
        splits,
        c,
        h,
        wide,
        o,
        oh,
        ow,
        *patch,
        down,
        across,
        *padding,
        precision_of(x),
        max(16, 1 << (outputs - 1).bit_length()),
        width,
        depth,
        num_warps=4,
        num_stages=3,
    )
    total = (parts[0] if splits == 1 else parts.sum(0)).flatten(1)
    index = _collect(c, o, rows, columns, down, across, str(x.device))
    summed = total.index_select(1, index).reshape(clients, o, rows, columns, c, down * across).sum(-1)
    return summed.to(x.dtype).permute(0, 1, 4, 2, 3)


@folded_weight_gradient.register_fake
def _(d: Tensor, x: Tensor, taps: Sequence[int], padding: Sequence[int]) -> Tensor:
    return x.new_empty((d.shape[0], d.shape[2], *taps, x.shape[2])).permute(0, 1, 4, 2, 3)


@lru_cache(maxsize=64)
def _spread(c: int, o: int, rows: int, columns: int, down: int, across: int, device: str) -> Tensor:
    """Where w[o, c, r − i, s − j] stands for the entry (c, r, s), (o, i, j); one past the end where there is none."""
    shape = (c, rows + down - 1, columns + across - 1, o, down, across)
    channel, r, s, out, i, j = np.indices(shape, sparse=True)
    real = (r - i >= 0) & (r - i < rows) & (s - j >= 0) & (s - j < columns)
    at = ((out * c + channel) * rows + (r - i)) * columns + (s - j)
    return torch.from_numpy(np.where(real, at, o * c * rows * columns).reshape(-1)).to(device)


@lru_cache(maxsize=64)
def _collect(c: int, o: int, rows: int, columns: int, down: int, across: int, device: str) -> Tensor:
    """Where in [(o, i, j), (c, r, s)] the parts of dw[o, r, s, c] stand, for every (i, j)."""
    out, r, s, channel, i, j = np.indices((o, rows, columns, c, down, across), sparse=True)
    height, width = rows + down - 1, columns + across - 1
    row = (out * down + i) * across + j
    at = ((row * c + channel) * height + (r + i)) * width + (s + j)
    return torch.from_numpy(np.ascontiguousarray(at).reshape(-1)).to(device)
