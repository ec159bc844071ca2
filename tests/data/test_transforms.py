from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fedretain.data.arrays import from_arrays
from fedretain.data.dataset import Dataset
from fedretain.data.sources import load_dataset
from fedretain.data.transforms import Normalise, crop_flip, draw_crop_flip
from fedretain.errors import ConfigError
from fedretain.randomness import stream


def images(channels: int = 3, count: int = 5000, name: str = "toy", seed: int = 0) -> Dataset:
    x = np.random.default_rng(seed).integers(0, 256, (count, channels, 4, 5), dtype=np.uint8)
    y = np.arange(count) % 2
    return from_arrays(x, y, x[:2], y[:2], name=name)


def reference(inputs: np.ndarray, draws: np.ndarray, pad: int) -> np.ndarray:
    """Pixel by pixel, without padding the image: what lies outside is zero."""
    count, _, height, width = inputs.shape
    out = np.zeros_like(inputs)
    for b in range(count):
        dy, dx, flip = draws[b]
        for y in range(height):
            for x in range(width):
                row, column = y + dy - pad, x + dx - pad
                if 0 <= row < height and 0 <= column < width:
                    out[b, :, y, width - 1 - x if flip else x] = inputs[b, :, row, column]
    return out


class TestNormalise:
    def test_unit(self) -> None:
        data = images()
        out = Normalise.fit(data, "unit")(torch.from_numpy(data.train.inputs))
        assert out.dtype == torch.float32
        assert np.array_equal(out.numpy(), data.train.inputs.astype(np.float32) / np.float32(255))

    def test_digits_by_their_own_scale(self) -> None:
        data = load_dataset("digits")
        out = Normalise.fit(data, "unit")(torch.from_numpy(data.train.inputs))
        assert (out.min(), out.max()) == (0, 1)

    def test_mean_std_by_hand(self) -> None:
        """Pixels 0 and 255 in equal number: on the unit scale mean 1/2, deviation 1/2, so they become ∓1."""
        x = np.array([0, 255], np.uint8).reshape(2, 1, 1, 1)
        data = from_arrays(x, [0, 1], x, [0, 1])
        out = Normalise.fit(data, "mean_std")(torch.from_numpy(x))
        assert out.ravel().tolist() == [-1, 1]

    @pytest.mark.parametrize("floats", [False, True])
    def test_mean_std_centres_and_scales_every_channel(self, floats: bool) -> None:
        data = images()
        if floats:
            x = data.train.inputs.astype(np.float32) * [[[3.0]], [[1e-3]], [[50.0]]] + 7
            data = from_arrays(x, data.train.labels, x, data.train.labels)
        out = Normalise.fit(data, "mean_std")(torch.from_numpy(data.train.inputs)).double()
        assert out.mean((0, 2, 3)).abs().max() < 1e-4
        assert (out.std((0, 2, 3), correction=0) - 1).abs().max() < 1e-4

    def test_only_the_training_set_counts(self) -> None:
        data = images(count=6)
        other = from_arrays(data.train.inputs, data.train.labels, 255 - data.train.inputs, data.train.labels)
        assert torch.equal(Normalise.fit(data).offset, Normalise.fit(other).offset)

    def test_published_constants_for_cifar(self) -> None:
        """((x / 255) - mean) / std at x = 0 and x = 255, channel by channel."""
        mean, std = np.array([0.4914, 0.4822, 0.4465]), np.array([0.2023, 0.1994, 0.2010])
        for name in ("cifar10", "cifar100"):
            normalise = Normalise.fit(images(name=name, count=4), "mean_std")
            for value in (0, 255):
                x = torch.full((1, 3, 4, 5), value, dtype=torch.uint8)
                expected = (value / 255 - mean) / std
                assert np.allclose(normalise(x)[0, :, 2, 3].numpy(), expected, atol=1e-6)

    def test_grey_data_that_happen_to_be_called_cifar10_use_their_own_moments(self) -> None:
        normalise = Normalise.fit(images(channels=1, name="cifar10"), "mean_std")
        assert normalise.offset.shape == (1, 1, 1)

    def test_given_constants_win(self) -> None:
        normalise = Normalise.fit(images(name="cifar10"), "mean_std", mean=[0, 0, 0.5], std=(1, 2, 0.5))
        x = torch.full((1, 3, 4, 5), 255, dtype=torch.uint8)
        assert normalise(x)[0, :, 0, 0].tolist() == [1, 0.5, 1]

    def test_constant_channel_is_centred_only(self) -> None:
        """Channel 0 is always 0.1 (whose float sums round): it becomes 0; others keep their distance."""
        x = np.random.default_rng(0).random((1000, 2, 3, 4), dtype=np.float32)
        x[:, 0] = 0.1
        data = from_arrays(x, np.zeros(1000, int), x, np.zeros(1000, int))
        normalise = Normalise.fit(data, "mean_std")
        out = normalise(torch.from_numpy(x))
        assert out[:, 0].abs().max() < 1e-7
        assert torch.isfinite(out).all()
        assert normalise(torch.full((1, 2, 1, 1), 1.1))[0, 0, 0, 0] == pytest.approx(1.0, abs=1e-6)

    def test_per_pixel_against_the_definition(self) -> None:
        """(x - mean_p) / (std_p + 0.001), on the 0-255 scale; one pixel is constant and becomes 0."""
        data = images()
        data.train.inputs[:, 1, 2, 3] = 77
        x = data.train.inputs.astype(np.float64)
        expected = (x - x.mean(0)) / (x.std(0) + 0.001)
        out = Normalise.fit(data, "per_pixel")(torch.from_numpy(data.train.inputs))
        assert np.allclose(out.numpy(), expected, atol=1e-4)
        assert (out[:, 1, 2, 3] == 0).all()

    def test_per_pixel_does_not_depend_on_the_scale_in_which_pixels_are_kept(self) -> None:
        data = images(count=40)
        unit = data.train.inputs.astype(np.float64) / 255
        floats = from_arrays(unit, data.train.labels, unit, data.train.labels)
        a = Normalise.fit(data, "per_pixel")(torch.from_numpy(data.train.inputs))
        b = Normalise.fit(floats, "per_pixel")(torch.from_numpy(floats.train.inputs))
        assert torch.allclose(a, b, atol=1e-5)

    def test_more_examples_than_a_block_match_numpy(self) -> None:
        data = images(count=5000, channels=1)
        normalise = Normalise.fit(data, "mean_std")
        pixels = data.train.inputs.astype(np.float64)
        assert normalise.offset.item() == pytest.approx(pixels.mean(), rel=1e-6)
        assert normalise.divisor.item() == pytest.approx(pixels.std(), rel=1e-6)

    def test_to_changes_the_result_and_leaves_the_original(self) -> None:
        normalise = Normalise.fit(images())
        half = normalise.to("cpu", torch.bfloat16)
        x = torch.from_numpy(images().train.inputs[:2])
        assert half(x).dtype == torch.bfloat16
        assert normalise(x).dtype == torch.float32
        assert torch.equal(half(x), normalise(x).bfloat16())
        assert half.to(dtype=torch.float64)(x).dtype == torch.float64
        assert normalise.to().dtype == torch.float32

    def test_leading_dimensions_are_free(self) -> None:
        x = torch.from_numpy(images().train.inputs[:6])
        normalise = Normalise.fit(images())
        assert torch.equal(normalise(x.view(2, 3, *x.shape[1:])), normalise(x).view(2, 3, *x.shape[1:]))

    def test_inputs_are_left_as_they_were(self) -> None:
        x = torch.rand(2, 3, 4, 5, generator=torch.Generator().manual_seed(0))
        before = x.clone()
        Normalise.fit(images())(x)
        assert torch.equal(x, before)

    @pytest.mark.parametrize(
        ("kind", "options", "message"),
        [
            ("mean_sdt", {}, r"unknown normalisation 'mean_sdt'; did you mean 'mean_std'"),
            ("mean_std", {"mean": [0, 0, 0]}, r"given together"),
            ("unit", {"mean": [0, 0, 0], "std": [1, 1, 1]}, r"only with normalise: mean_std"),
            ("mean_std", {"mean": [0, 0], "std": [1, 1]}, r"mean is \[0, 0\], but must be 3 number"),
            ("mean_std", {"mean": [0, 0, 0], "std": [1, 0, 1]}, r"std is \[1, 0, 1\].*positive"),
            ("mean_std", {"mean": [0, 0, float("nan")], "std": [1, 1, 1]}, r"mean is"),
        ],
    )
    def test_refusals(self, kind: Any, options: dict[str, Any], message: str) -> None:
        with pytest.raises(ConfigError, match=message):
            Normalise.fit(images(count=4), kind, **options)

    @pytest.mark.kit
    def test_mnist_constants(self, kit_data: Path) -> None:
        """The well-known 0.1307 and 0.3081."""
        normalise = Normalise.fit(load_dataset("mnist"), "mean_std")
        assert round(normalise.offset.item() / 255, 4) == 0.1307
        assert round(normalise.divisor.item() / 255, 4) == 0.3081

    @pytest.mark.kit
    def test_mnist_per_pixel_is_finite_where_pixels_never_change(self, kit_data: Path) -> None:
        data = load_dataset("mnist")
        normalise = Normalise.fit(data, "per_pixel")
        assert normalise.offset.shape == (1, 28, 28)
        assert normalise.divisor[0, 0, 0].item() == pytest.approx(0.001)
        assert torch.isfinite(normalise(torch.from_numpy(data.train.inputs[:1000]))).all()


class TestDrawCropFlip:
    def test_shape_type_and_range(self) -> None:
        draws = draw_crop_flip(stream(0, "t"), 50, 40)
        assert draws.shape == (50, 40, 3)
        assert draws.dtype == np.int64
        assert [(draws[..., i].min(), draws[..., i].max()) for i in range(3)] == [(0, 8), (0, 8), (0, 1)]

    def test_every_value_is_equally_likely(self) -> None:
        """20,000 draws of 9 values: each 2,222 times, with deviation √(20000·8/81) ≈ 44; of 2 values: 71."""
        draws = draw_crop_flip(stream(1, "t"), 100, 200).reshape(-1, 3)
        for i, (values, deviation) in enumerate([(9, 44), (9, 44), (2, 71)]):
            assert np.abs(np.bincount(draws[:, i], minlength=values) - 20000 / values).max() < 5 * deviation

    @given(short=st.integers(0, 6), more=st.integers(0, 6), batch=st.integers(1, 5), pad=st.integers(0, 6))
    @settings(max_examples=30, deadline=None)
    def test_more_steps_leave_the_earlier_ones_unchanged(self, short: int, more: int, batch: int, pad: int) -> None:
        few = draw_crop_flip(stream(3, "t"), short, batch, pad=pad)
        many = draw_crop_flip(stream(3, "t"), short + more, batch, pad=pad)
        assert np.array_equal(few, many[:short])

    def test_no_padding_only_flips(self) -> None:
        draws = draw_crop_flip(stream(0, "t"), 10, 10, pad=0)
        assert (draws[..., :2] == 0).all()
        assert set(np.unique(draws[..., 2])) == {0, 1}


class TestCropFlip:
    @given(
        count=st.integers(1, 4),
        channels=st.integers(1, 3),
        height=st.integers(1, 7),
        width=st.integers(1, 7),
        pad=st.integers(0, 5),
        floats=st.booleans(),
        seed=st.integers(0, 99),
    )
    @settings(max_examples=60, deadline=None)
    def test_agrees_with_the_slow_reference(
        self, count: int, channels: int, height: int, width: int, pad: int, floats: bool, seed: int
    ) -> None:
        rng = np.random.default_rng(seed)
        inputs = rng.integers(1, 256, (count, channels, height, width), dtype=np.uint8)
        x = inputs.astype(np.float32) / 7 if floats else inputs
        draws = draw_crop_flip(rng, 1, count, pad=pad)[0]
        out = crop_flip(torch.from_numpy(x), torch.from_numpy(draws), pad=pad)
        assert out.dtype == (torch.float32 if floats else torch.uint8)
        assert np.array_equal(out.numpy(), reference(x, draws, pad))

    def test_by_hand(self) -> None:
        """One row 1 2 3, pad 1, padded 0 1 2 3 0: dx = 0 gives 0 1 2, dx = 2 gives 2 3 0, flipped 0 3 2."""
        x = torch.tensor([1, 2, 3], dtype=torch.uint8).view(1, 1, 1, 3).repeat(4, 1, 1, 1)
        draws = torch.tensor([[1, 1, 0], [1, 0, 0], [1, 2, 0], [1, 2, 1]])
        out = crop_flip(x, draws, pad=1)[:, 0, 0]
        assert out.tolist() == [[1, 2, 3], [0, 1, 2], [2, 3, 0], [0, 3, 2]]

    def test_the_middle_without_a_flip_is_the_identity(self) -> None:
        x = torch.rand(3, 2, 8, 8, generator=torch.Generator().manual_seed(0))
        assert torch.equal(crop_flip(x, torch.tensor([[4, 4, 0]] * 3)), x)

    def test_everything_follows_the_device_of_the_inputs(self) -> None:
        """The device ``meta`` has no values, but mixing it with the CPU fails, as mixing GPU and CPU does."""
        x = torch.zeros(2, 3, 4, 5, dtype=torch.uint8, device="meta")
        out = Normalise.fit(images(count=4)).to("meta")(crop_flip(x, torch.zeros(2, 3, dtype=torch.int64)))
        assert out.device.type == "meta"
        assert out.shape == x.shape

    def test_vectorised_over_clients(self) -> None:
        """``torch.vmap`` over a leading client axis gives what a loop over the clients gives."""
        x = torch.rand(2, 3, 1, 6, 6, generator=torch.Generator().manual_seed(0))
        draws = torch.from_numpy(draw_crop_flip(stream(0, "t"), 2, 3))
        looped = torch.stack([crop_flip(x[k], draws[k]) for k in range(2)])

        def one(inputs: Tensor, drawn: Tensor) -> Tensor:
            return crop_flip(inputs, drawn)

        assert torch.equal(torch.vmap(one)(x, draws), looped)
