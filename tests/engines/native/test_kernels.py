"""The kernels against PyTorch's operations and a sum by hand."""

from __future__ import annotations

import ctypes

import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from torch import Tensor

from fedretain.engines.native import kernels

aten = torch.ops.aten


def random(generator: torch.Generator, *shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)


def test_a_convolution_by_hand(dtype: torch.dtype) -> None:
    """[1 2 3; 4 5 6] with the window [1 10], bias 100: 1 + 20, 2 + 30, 4 + 50, 5 + 60.

    With the gradient [1 2; 3 4] of that, the window's is [Σ g·left, Σ g·right] = [1 + 4 + 12 + 20, 2 + 6 + 15 + 24],
    the bias's 10, and the image's [1, 10 + 2, 20; 3, 30 + 4, 40].
    """
    maps = torch.tensor([[[[1, 2, 3], [4, 5, 6]]]], dtype=dtype)
    window, bias = torch.tensor([[[[1, 10]]]], dtype=dtype), torch.tensor([100], dtype=dtype)
    gradient = torch.tensor([[[[1, 2], [3, 4]]]], dtype=dtype)
    assert kernels.convolve(maps, window, bias, (0, 0)).tolist() == [[[[121, 132], [154, 165]]]]
    of_weights, of_bias = kernels.weights_gradient(gradient, maps, window, (0, 0))
    assert (of_weights.tolist(), of_bias.tolist()) == ([[[[37, 47]]]], [10])
    assert kernels.maps_gradient(gradient, maps, window, (0, 0)).tolist() == [[[[1, 12, 20], [3, 34, 40]]]]


@hypothesis_settings(deadline=None, max_examples=150)
@given(st.data())
def test_convolutions_of_any_shape(data: st.DataObject) -> None:
    """In double precision, to the rounding of the sums."""
    if not kernels.available(torch.float64):
        pytest.skip("no kernels: no C compiler on this machine (cc, gcc or clang)")
    kh, kw = data.draw(st.integers(1, 7)), data.draw(st.integers(1, 7))
    padding = data.draw(st.integers(0, kh - 1)), data.draw(st.integers(0, kw - 1))
    height = data.draw(st.integers(max(1, kh - 2 * padding[0]), 20))
    width = data.draw(st.integers(max(1, kw - 2 * padding[1]), 20))
    batch, inputs, outputs = data.draw(st.integers(1, 20)), data.draw(st.integers(1, 7)), data.draw(st.integers(1, 19))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 1000)))
    maps = random(generator, batch, inputs, height, width)
    weights, bias = random(generator, outputs, inputs, kh, kw), random(generator, outputs)
    if data.draw(st.booleans()):
        maps = maps.transpose(2, 3).contiguous().transpose(2, 3)  # laid out otherwise
    how = ((1, 1), padding, (1, 1), False, (0, 0), 1)
    expected = aten.convolution(maps, weights, bias, *how)
    torch.testing.assert_close(kernels.convolve(maps, weights, bias, padding), expected, rtol=1e-11, atol=1e-11)
    expected = aten.convolution(maps, weights, None, *how)
    torch.testing.assert_close(kernels.convolve(maps, weights, None, padding), expected, rtol=1e-11, atol=1e-11)
    gradient = random(generator, *expected.shape)
    of_maps, of_weights, of_bias = aten.convolution_backward(gradient, maps, weights, [outputs], *how, [True] * 3)
    ours = (kernels.maps_gradient(gradient, maps, weights, padding),)
    ours += kernels.weights_gradient(gradient, maps, weights, padding)
    for found, wanted in zip(ours, (of_maps, of_weights, of_bias), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(
    ("batch", "inputs", "side", "outputs", "padding"), [(64, 3, 32, 6, 0), (64, 6, 14, 16, 0), (5, 1, 28, 32, 2)]
)
def test_single_precision(batch: int, inputs: int, side: int, outputs: int, padding: int) -> None:
    """No worse than PyTorch's own against double precision: the same number of terms, summed in another order."""
    if not kernels.available(torch.float32):
        pytest.skip("no kernels: no C compiler on this machine (cc, gcc or clang)")
    generator = torch.Generator().manual_seed(0)
    exact = [random(generator, batch, inputs, side, side), random(generator, outputs, inputs, 5, 5)]
    around = (padding, padding)
    how = ((1, 1), around, (1, 1), False, (0, 0), 1)
    out = aten.convolution(*exact, None, *how)
    gradient = random(generator, *out.shape)
    backward = aten.convolution_backward(gradient, *exact, [outputs], *how, [True] * 3)
    maps, weights, given_gradient = exact[0].float(), exact[1].float(), gradient.float()
    ours = (
        kernels.convolve(maps, weights, None, around),
        kernels.maps_gradient(given_gradient, maps, weights, around),
        *kernels.weights_gradient(given_gradient, maps, weights, around),
    )
    for found, wanted in zip(ours, (out, *backward), strict=True):
        assert (found - wanted).abs().max() < 2e-5 * wanted.abs().max()


@pytest.mark.parametrize("width", [4, 6, 8, 10, 14, 16, 18, 28, 32, 34])
@pytest.mark.parametrize("kind", ["random", "ties", "not a number"])
def test_pooling(width: int, kind: str, dtype: torch.dtype) -> None:
    """The same bits as PyTorch's, and the gradient at the first of equals."""
    if width < kernels.LEAST_WIDTH[dtype]:
        width += kernels.LEAST_WIDTH[dtype]
    generator = torch.Generator().manual_seed(width)
    maps = random(generator, 3, 2, 6, width, dtype=dtype)
    if kind == "ties":
        maps = maps.round().relu()
    if kind == "not a number":
        maps[0, 0, 0, 1] = maps[1, 1, 3, 2] = maps[2, 0, 5, width - 2] = torch.nan
    out, indices = aten.max_pool2d_with_indices(maps, [2, 2])
    found, places = kernels.pool(maps)
    assert found.equal(out) if kind != "not a number" else torch.allclose(found, out, rtol=0, atol=0, equal_nan=True)
    gradient = random(generator, *out.shape, dtype=dtype)
    how = ([2, 2], [2, 2], [0, 0], [1, 1], False)
    expected = aten.max_pool2d_with_indices_backward(gradient, maps, *how, indices)
    assert kernels.pool_backward(gradient, places).equal(expected)
    turned = gradient.transpose(0, 1).contiguous().transpose(0, 1)
    assert kernels.pool_backward(turned, places).equal(expected)


def test_nothing_is_written_beyond_the_results(dtype: torch.dtype) -> None:
    """Every result lies between numbers that must stay as they are, for sizes around those of vectors."""
    generator = torch.Generator().manual_seed(3)
    for side in range(8, 23):
        batch, inputs, outputs, k = 2, 2, 5, 3
        made, half = side - k + 1, side // 2
        maps, weights = random(generator, batch, inputs, side, side), random(generator, outputs, inputs, k, k)
        gradient = random(generator, batch, outputs, made, made)
        maps, weights, gradient = maps.to(dtype), weights.to(dtype), gradient.to(dtype)
        shape = (batch, inputs, side, side, outputs, k, k, 0, 0)
        even = random(generator, batch, inputs, 2 * half, 2 * half, dtype=dtype)
        rows = batch * inputs * half
        places = torch.zeros(rows * half, dtype=kernels.PLACES[dtype])
        calls = [
            ("convolve", [maps, weights, None], [gradient.numel()], shape),
            ("maps_gradient", [gradient, weights], [maps.numel()], shape),
            ("weights_gradient", [maps, gradient], [weights.numel(), outputs], shape),
            ("pool_gradient", [even, places], [even.numel()], (rows, half)),
        ]
        for name, given_tensors, sizes, numbers in calls:
            results = [torch.full((size + 64,), 7.0, dtype=dtype) for size in sizes]
            function = kernels.function(name, dtype)
            pointers = [None if tensor is None else tensor.data_ptr() for tensor in given_tensors]
            function(*pointers, *(result[32:].data_ptr() for result in results), *numbers)
            for result, size in zip(results, sizes, strict=True):
                assert (result[:32] == 7).all(), name
                assert (result[32 + size :] == 7).all(), name
                assert not (result[32 : 32 + size] == 7).all(), name
        out = torch.full((rows * half + 64,), 7.0, dtype=dtype)
        where = torch.full((rows * half + 64,), 7, dtype=kernels.PLACES[dtype])
        kernels.function("pool", dtype)(even.data_ptr(), out[32:].data_ptr(), where[32:].data_ptr(), rows, half)
        for result in (out, where):
            assert (result[:32] == 7).all()
            assert (result[32 + rows * half :] == 7).all()
            assert (result[32 : 32 + rows * half] != 7).all()


@pytest.mark.parametrize("count", [1, 7, 16, 100, 1003])
def test_an_update_is_rounded_twice(count: int, dtype: torch.dtype) -> None:
    """Like a product and a sum of their own; a fused one differs in some of the last bits.

    The rate is a number in double precision, as engines give it.
    """
    if not kernels.available(dtype, "add_scaled"):
        pytest.skip("this processor's registers are not known to the kernel")
    generator = torch.Generator().manual_seed(count)
    numbers, gradient = (random(generator, count, dtype=dtype) for _ in range(2))
    rate = torch.tensor(-0.1, dtype=torch.float64)
    expected = numbers.clone().add_(gradient.clone().mul_(rate))
    kept = gradient.clone()
    assert kernels.add_scaled_(numbers, gradient, rate) is numbers
    assert numbers.equal(expected)
    assert gradient.equal(kept)


@pytest.mark.parametrize("shape", [(1, 3), (2, 1), (3, 2048), (5, 2049), (4, 7, 300)], ids=str)
def test_sums_by_weight(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """One client after another, through more numbers than are summed at once; values that lie turned around too."""
    if not kernels.available(dtype, "weighted_sum"):
        pytest.skip("no kernels")
    generator = torch.Generator().manual_seed(sum(shape))
    values = random(generator, *shape, dtype=dtype)
    shares = torch.rand(shape[0], generator=generator, dtype=torch.float64).to(dtype)
    expected = torch.tensordot(shares.double(), values.double(), 1).to(dtype)
    tolerance = {"rtol": 1e-5, "atol": 1e-6} if dtype == torch.float32 else {}
    torch.testing.assert_close(kernels.weighted_sum(values, shares), expected, **tolerance)
    turned = values.mT.contiguous().mT if values.dim() == 3 else values
    assert kernels.weighted_sum(turned, shares).equal(kernels.weighted_sum(values, shares))


def test_no_memory_is_an_error(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    def nothing_left(*_: object) -> ctypes.c_int:
        return ctypes.c_int(1)

    monkeypatch.setattr(kernels, "function", lambda name, dtype: nothing_left)
    maps, weights = torch.zeros(1, 1, 3, 3, dtype=dtype), torch.zeros(1, 1, 2, 2, dtype=dtype)
    with pytest.raises(MemoryError, match="no memory for a convolution"):
        kernels.convolve(maps, weights, None, (0, 0))
