from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from PIL import Image

from fedretain.data import images
from fedretain.data.images import decode_images, decode_once, height_and_width
from fedretain.errors import ConfigError, DataError


def decode(blobs: list[bytes], **options: Any) -> np.ndarray:
    return decode_images([blobs], len(blobs), where=lambda i: f"image {i}", **options)


def test_grey_png_is_lossless(png: Callable[..., bytes], pictures: Callable[..., np.ndarray]) -> None:
    pixels = pictures(5)
    decoded = decode([png(p) for p in pixels])
    assert decoded.dtype == np.uint8
    assert np.array_equal(decoded, pixels[:, None])


def test_colour_comes_channels_first(png: Callable[..., bytes]) -> None:
    pixels = np.random.default_rng(3).integers(0, 256, (2, 4, 5, 3), dtype=np.uint8)
    assert np.array_equal(decode([png(p) for p in pixels]), pixels.transpose(0, 3, 1, 2))


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_one_coloured_image_makes_all_of_them_rgb(png: Callable[..., bytes], order: tuple[int, int]) -> None:
    plain = np.full((4, 5), 7, np.uint8)
    coloured = np.dstack([plain + 1, plain + 2, plain + 3])
    blobs = [png(plain), png(coloured)]
    decoded = decode([blobs[i] for i in order])
    assert decoded.shape == (2, 3, 4, 5)
    assert (decoded[order.index(0)] == 7).all()
    assert decoded[order.index(1), :, 0, 0].tolist() == [8, 9, 10]


@pytest.mark.parametrize(("mode", "channels"), [("1", 1), ("LA", 1), ("RGBA", 3), ("P", 3), ("CMYK", 3)])
def test_other_modes_become_grey_or_rgb(mode: str, channels: int) -> None:
    buffer = io.BytesIO()
    Image.new("RGB", (5, 4), (255, 255, 255)).convert(mode).save(buffer, "TIFF" if mode == "CMYK" else "PNG")
    decoded = decode([buffer.getvalue()])
    assert decoded.shape == (1, channels, 4, 5)
    assert (decoded == 255).all()


def test_palette_with_transparency_decodes_without_a_warning() -> None:
    buffer = io.BytesIO()
    Image.new("P", (5, 4)).save(buffer, "PNG", transparency=b"\x00\x80")
    assert decode([buffer.getvalue()]).shape == (1, 3, 4, 5)


def test_sixteen_bits_are_refused(png: Callable[..., bytes]) -> None:
    with pytest.raises(DataError, match=r"image 0: .*mode 'I;16'.*8 bits"):
        decode([png(np.zeros((4, 5), np.uint16))])


def test_orientation_of_photographs_is_followed(png: Callable[..., bytes]) -> None:
    """EXIF orientation 6: the stored picture must be turned by 90° clockwise to be seen upright."""
    exif = Image.Exif()
    exif[0x0112] = 6
    stored = np.zeros((8, 16), np.uint8)
    stored[:, :8] = 255  # the left half; after the turn it is the upper one
    decoded = decode([png(stored, "JPEG", quality=95, exif=exif)])
    assert decoded.shape == (1, 1, 16, 8)
    assert decoded[0, 0, :8].min() > 200
    assert decoded[0, 0, 8:].max() < 50


@pytest.mark.parametrize("damage", ["noise", "cut", "empty"])
def test_damaged_image_is_named(png: Callable[..., bytes], pictures: Callable[..., np.ndarray], damage: str) -> None:
    good = png(pictures(1, 40, 40)[0])
    bad = {"noise": b"not an image", "cut": good[: len(good) // 2], "empty": b""}[damage]
    with pytest.raises(DataError, match=r"image 2: cannot decode"):
        decode([good, good, bad, good])


def test_sizes_must_agree_unless_resized(png: Callable[..., bytes], pictures: Callable[..., np.ndarray]) -> None:
    blobs = [png(pictures(1, 4, 5)[0]), png(pictures(1, 6, 5)[0])]
    with pytest.raises(DataError, match=r"image 1: the image is 6x5 .* before are 4x5; set data.size"):
        decode(blobs)
    assert decode(blobs, size=8).shape == (2, 1, 8, 8)
    assert decode(blobs, size=[3, 7]).shape == (2, 1, 3, 7)


def test_resizing_keeps_constant_images_and_the_order_of_height_and_width(png: Callable[..., bytes]) -> None:
    tall = np.full((6, 2), 90, np.uint8)
    assert np.array_equal(decode([png(tall)], size=(3, 4)), np.full((1, 1, 3, 4), 90))


def test_many_batches_and_threads_keep_the_order(
    png: Callable[..., bytes], pictures: Callable[..., np.ndarray], monkeypatch: pytest.MonkeyPatch
) -> None:
    pixels = pictures(40)
    blobs = [png(p) for p in pixels]
    monkeypatch.setattr(images, "_THREADS_FROM_BYTES", 0)
    decoded = decode_images([blobs[:7], blobs[7:33], blobs[33:]], 40, where=str)
    assert np.array_equal(decoded[:, 0], pixels)
    blobs[20] = b"?"
    blobs[30] = b"?"
    with pytest.raises(DataError, match=r"20: cannot decode"):
        decode_images([blobs[:7], blobs[7:33], blobs[33:]], 40, where=str)


def test_no_images() -> None:
    with pytest.raises(DataError, match=r"no images"):
        decode([])


def test_decode_once_takes_the_second_time_from_the_cache(
    png: Callable[..., bytes], pictures: Callable[..., np.ndarray], monkeypatch: pytest.MonkeyPatch
) -> None:
    blobs = [png(p) for p in pictures(3)]
    first, digest = decode_once(blobs, where=str)
    resized, _ = decode_once(blobs, where=str, size=2)
    assert resized.shape == (3, 1, 2, 2)
    monkeypatch.setattr(images, "decode_images", None)
    again, same = decode_once(blobs, where=str)
    assert np.array_equal(first, again)
    assert digest == same


def test_decode_once_tells_apart_the_same_bytes_cut_differently(png: Callable[..., bytes]) -> None:
    """Two images and one longer blob (a PNG with trailing bytes decodes too) must not share a cache entry."""
    one, two = png(np.zeros((2, 2), np.uint8)), png(np.ones((2, 2), np.uint8))
    assert len(decode_once([one, two], where=str)[0]) == 2
    assert len(decode_once([one + two], where=str)[0]) == 1


@pytest.mark.parametrize("size", [0, -1, True, [3], [3, 4, 5], [3, 0], [2.5, 2]])
def test_sizes_that_are_not_allowed(size: Any) -> None:
    with pytest.raises(ConfigError, match=r"data.size is"):
        height_and_width(size)
