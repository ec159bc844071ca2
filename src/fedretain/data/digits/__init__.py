"""The embedded default dataset: handwritten digits, 8x8 pixels, shipped inside the package."""

from __future__ import annotations

from importlib.resources import files

import numpy as np

from fedretain.data.dataset import Dataset, Examples

# Pixels count the black dots of a 4x4 block of the scanned 32x32 bitmap.
LARGEST_PIXEL = 16.0


def load_digits() -> Dataset:
    """1,437 training and 360 test images of the digits 0-9, 1x8x8, pixel values 0 .. 16.

    The split is stored with the images (LICENSE.md says how it was drawn), so that it is the same for
    ever. E. Alpaydin and C. Kaynak, Optical Recognition of Handwritten Digits, UCI Machine Learning
    Repository, 1998.
    """
    with files(__package__).joinpath("digits.npz").open("rb") as file, np.load(file) as archive:
        images, labels = archive["images"][:, None], archive["labels"].astype(np.int64)
        is_test = np.unpackbits(archive["test"], count=len(labels)).astype(bool)
    return Dataset(
        "digits",
        Examples(images[~is_test], labels[~is_test]),
        Examples(images[is_test], labels[is_test]),
        tuple("0123456789"),
        scale=LARGEST_PIXEL,
    )
