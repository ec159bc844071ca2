"""Encoded images (PNG, JPEG, ...) to one uint8 array."""

from __future__ import annotations

import hashlib
import io
import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
from PIL import Image, ImageOps

from fedretain.data.cache import cached_array
from fedretain.data.dataset import Array
from fedretain.errors import ConfigError, DataError

Size = int | Sequence[int]

_BATCH = 1024
# Below this many encoded bytes an image decodes so quickly that threads only wait for each other:
# measured on two cores, threads made 0.3 kB PNGs 1.4 times slower and 35 kB PNGs 1.6 times faster.
_THREADS_FROM_BYTES = 8192
# Grey stays grey; everything else with 8 bits per channel becomes RGB. Deeper images would lose information.
_GREY = ("L", "1", "LA", "La")
_COLOUR = ("RGB", "RGBA", "RGBa", "RGBX", "P", "PA", "CMYK", "YCbCr", "LAB", "HSV")


def height_and_width(size: Size | None) -> tuple[int, int] | None:
    """``size`` as (height, width): one number stands for a square; None leaves the images as they are."""
    if size is None:
        return None
    pair = (size, size) if isinstance(size, int) else tuple(size)
    if len(pair) != 2 or not all(isinstance(n, int) and not isinstance(n, bool) and n > 0 for n in pair):
        raise ConfigError(
            f"data.size is {size!r}, but must be one positive whole number or two [height, width]; "
            "for example 32, or [28, 32]"
        )
    return pair[0], pair[1]


def decode_images(
    batches: Iterable[Sequence[bytes]], count: int, *, where: Callable[[int], str], size: Size | None = None
) -> Array:
    """``count`` encoded images as uint8 [N, C, H, W].

    C is 1 if every image is grey, otherwise 3. All images must have the same size, unless ``size``
    resizes them (bilinear). ``where(i)`` names image i in errors.
    """
    resize = height_and_width(size)
    pixels: Array | None = None
    index = 0
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for batch in batches:
            each = pool.map if sum(map(len, batch)) > _THREADS_FROM_BYTES * len(batch) else map
            numbered = range(index, index + len(batch))
            for image in each(partial(_decode, where=where, size=resize), numbered, batch):
                pixels = _put(image, pixels, index, count, where)
                index += 1
    if pixels is None:
        raise DataError("there are no images to decode; at least one example is needed")
    return pixels


def decode_once(
    encoded: Sequence[bytes], *, where: Callable[[int], str], size: Size | None = None
) -> tuple[Array, str]:
    """``decode_images`` through the cache, keyed by the encoded bytes; the array and its digest."""
    digest = hashlib.sha256()
    for blob in encoded:
        digest.update(len(blob).to_bytes(8, "little"))
        digest.update(blob)
    batches = (encoded[start : start + _BATCH] for start in range(0, len(encoded), _BATCH))
    return cached_array(
        cache_key(digest.hexdigest(), size),
        lambda: decode_images(batches, len(encoded), where=where, size=size),
    )


def cache_key(source: str, size: Size | None, *parts: str) -> str:
    """The cache key of what ``source`` (a digest of encoded images) decodes to."""
    resize = height_and_width(size)
    return hashlib.sha256("\n".join([source, repr(resize), *parts]).encode()).hexdigest()


def _decode(index: int, blob: bytes, *, where: Callable[[int], str], size: tuple[int, int] | None) -> Array:
    """One image as uint8 [H, W] or [H, W, 3]."""
    try:
        image: Image.Image = Image.open(io.BytesIO(blob))
        if "exif" in image.info:
            image = ImageOps.exif_transpose(image)
        if image.mode in _GREY:
            wanted = "L"
        elif image.mode in _COLOUR:
            wanted = "RGB"
        else:
            raise DataError(
                f"{where(index)}: the image has mode {image.mode!r} (more than 8 bits per channel); "
                "convert it to 8 bits"
            )
        if image.mode in ("P", "PA"):  # a palette may carry transparency, which only RGBA can hold on the way
            image = image.convert("RGBA")
        if image.mode != wanted:
            image = image.convert(wanted)
        if size is not None and image.size != (size[1], size[0]):
            image = image.resize((size[1], size[0]), Image.Resampling.BILINEAR)
        flat = np.frombuffer(image.tobytes(), dtype=np.uint8)
    except DataError:
        raise
    except Exception as error:  # damaged bytes make Pillow raise almost anything
        raise DataError(
            f"{where(index)}: cannot decode the image ({type(error).__name__}: {error}); replace or remove it"
        ) from error
    return flat.reshape((image.height, image.width) if wanted == "L" else (image.height, image.width, 3))


def _put(image: Array, pixels: Array | None, index: int, count: int, where: Callable[[int], str]) -> Array:
    """Stores image ``index``; the first image decides the size, the first coloured one adds channels."""
    if pixels is None:
        pixels = np.empty((count, 1 if image.ndim == 2 else 3, *image.shape[:2]), dtype=np.uint8)
    height, width = pixels.shape[2:]
    if image.shape[:2] != (height, width):
        raise DataError(
            f"{where(index)}: the image is {image.shape[0]}x{image.shape[1]} (height x width), but the ones "
            f"before are {height}x{width}; set data.size (size=) to resize all of them"
        )
    if image.ndim == 3 and pixels.shape[1] == 1:
        pixels = np.repeat(pixels, 3, axis=1)
    pixels[index] = image if image.ndim == 2 else image.transpose(2, 0, 1)
    return pixels
