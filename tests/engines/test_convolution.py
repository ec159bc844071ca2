"""Convolutions of many clients give what PyTorch's grouped convolutions give; needs a CUDA device."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from fedretain.engines import convolution
from fedretain.engines.convolution import Tile, convolve, input_gradient, weight_gradient
from fedretain.engines.folding import few, folded_convolve, folded_weight_gradient

pytestmark = pytest.mark.usefixtures("without_tf32")
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
CLIENTS, BATCH = 3, 5
CASES = [
    # channels, outputs, side, taps, stride, padding
    (64, 64, 8, 3, 1, 1),
    (64, 128, 8, 3, 2, 1),
    (32, 64, 8, 1, 2, 0),
    (3, 64, 9, 3, 1, 1),
    (1, 32, 12, 5, 1, 0),
    (24, 40, 7, 3, 1, 1),
    (128, 256, 4, 3, 1, 1),
    (256, 128, 4, 3, 1, 1),
    (20, 8, 6, 3, 2, 1),
]


def random(*shape: int) -> Tensor:
    """The same numbers every time."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).cuda()


@needs_cuda
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("channels", "outputs", "side", "taps", "stride", "padding"), CASES)
def test_all_three(
    channels: int, outputs: int, side: int, taps: int, stride: int, padding: int, dtype: torch.dtype
) -> None:
    """Maps and both gradients, against PyTorch in float64.

    A sum of n products of numbers near 1, rounded to 24 or 8 bits, is off by some √n times the last bit.
    """
    x = random(BATCH, CLIENTS * channels, side, side).to(dtype)
    w = random(CLIENTS * outputs, channels, taps, taps).to(dtype)
    exact_x, exact_w = x.double().requires_grad_(), w.double().requires_grad_()
    y = F.conv2d(exact_x, exact_w, None, stride, padding, 1, CLIENTS)
    d = random(*y.shape).to(dtype)
    of_x, of_w = torch.autograd.grad(y, (exact_x, exact_w), d.double())
    sides, both = [side, side], [padding, padding]
    bits = 2.0**-8 if dtype == torch.bfloat16 else 2.0**-20
    for found, expected in (
        (convolve(x, w, stride, both, CLIENTS), y),
        (input_gradient(d, w, sides, stride, both, CLIENTS), of_x),
        (weight_gradient(d, x, [taps, taps], stride, both, CLIENTS), of_w),
    ):
        scale = float(expected.detach().abs().max())
        torch.testing.assert_close(found.double(), expected.detach(), rtol=0, atol=4 * bits * scale)
        assert found.is_contiguous(memory_format=torch.channels_last)


@needs_cuda
@pytest.mark.parametrize("tile", [Tile(128, 256, 64, 8, 4), Tile(64, 256, 64, 4, 4), Tile(128, 128, 64, 8, 3)], ids=str)
def test_tiles_for_more_clients(tile: Tile, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is taken where many clients fill the GPU: the same numbers."""
    monkeypatch.setattr(convolution, "forward_tile", lambda *_: tile)
    x, w = random(BATCH, CLIENTS * 256, 6, 6).bfloat16(), random(CLIENTS * 256, 256, 3, 3).bfloat16()
    x, w = (value.contiguous(memory_format=torch.channels_last) for value in (x, w))
    exact_x = x.double().requires_grad_()
    y = F.conv2d(exact_x, w.double(), None, 1, 1, 1, CLIENTS)
    d = random(*y.shape).bfloat16().contiguous(memory_format=torch.channels_last)
    (of_x,) = torch.autograd.grad(y, exact_x, d.double())
    for found, expected in (
        (convolution._convolve(x, w, 1, [1, 1], CLIENTS), y.detach()),
        (convolution._input_gradient(d, w, [6, 6], 1, [1, 1], CLIENTS), of_x),
    ):
        torch.testing.assert_close(found.double(), expected, rtol=0, atol=2.0**-6 * float(expected.abs().max()))


@needs_cuda
@pytest.mark.parametrize(("channels", "outputs", "side", "taps", "padding"), [(3, 6, 12, 5, 0), (6, 16, 7, 3, 1)])
def test_few_channels(channels: int, outputs: int, side: int, taps: int, padding: int) -> None:
    """Blocks of pixels: the same in float32, the gradient with respect to the maps too (as ``captured`` writes it)."""
    assert few(channels, outputs, 1)
    x = random(CLIENTS, BATCH, channels, side, side).requires_grad_()
    w = random(CLIENTS, outputs, channels, taps, taps).requires_grad_()
    y = torch.stack([F.conv2d(maps, weights, None, 1, padding) for maps, weights in zip(x, w, strict=True)])
    d = random(*y.shape)
    of_x, of_w = torch.autograd.grad(y, (x, w), d)
    both = [padding, padding]
    turned, outside = w.detach().flip(3, 4).transpose(1, 2), [taps - 1 - padding] * 2
    torch.testing.assert_close(folded_convolve(x.detach(), w.detach(), both), y.detach(), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(folded_convolve(d, turned, outside), of_x, rtol=1e-4, atol=1e-4)
    found = folded_weight_gradient(d, x.detach(), [taps, taps], both)
    torch.testing.assert_close(found, of_w, rtol=1e-4, atol=1e-3)


def test_maps_lie_side_by_side_where_nothing_is_computed() -> None:
    """What tracing sees has the layout of what the kernels make: [B, H, W, K, C]."""
    x, w = torch.empty(2, 6, 8, 8, device="meta"), torch.empty(12, 2, 3, 3, device="meta")
    y = convolve(x, w, 2, [1, 1], 3)
    assert y.shape == (2, 12, 4, 4)
    assert y.is_contiguous(memory_format=torch.channels_last)
    assert input_gradient(y, w, [8, 8], 2, [1, 1], 3).shape == x.shape
    assert weight_gradient(y, x, [3, 3], 2, [1, 1], 3).shape == w.shape
