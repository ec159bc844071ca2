from __future__ import annotations

from importlib.resources import files

import numpy as np

from fedretain.data.digits import load_digits
from fedretain.randomness import stream


def test_sizes_types_and_range() -> None:
    digits = load_digits()
    assert (len(digits.train), len(digits.test)) == (1437, 360)
    assert digits.shape == (1, 8, 8)
    assert digits.class_names == tuple("0123456789")
    assert digits.train.inputs.dtype == np.uint8
    assert (digits.train.inputs.min(), digits.train.inputs.max()) == (0, 16)
    assert digits.scale == 16


def test_class_counts_are_those_of_the_repository() -> None:
    """The counts that UCI prints for its test file; train and test together hold every image once."""
    digits = load_digits()
    counts = np.bincount(digits.train.labels) + np.bincount(digits.test.labels)
    assert counts.tolist() == [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]
    images = np.concatenate([digits.train.inputs, digits.test.inputs]).reshape(1797, -1)
    assert len(np.unique(images, axis=0)) == 1797


def test_split_is_the_one_that_the_licence_page_describes() -> None:
    """360 test images in proportion to the class sizes n_c, by largest remainder.

    360·n_c/1797 = 35.66, 36.46, 35.46, 36.66, 36.26, 36.46, 36.26, 35.86, 34.86, 36.06. Rounded down they
    sum to 355; the five largest remainders are those of 7, 8, 3, 0 and then 1 (.4608, the same as that of 5,
    which comes later).
    """
    expected = [36, 37, 35, 37, 36, 36, 36, 36, 35, 36]
    with files("fedretain.data.digits").joinpath("digits.npz").open("rb") as file, np.load(file) as archive:
        labels = archive["labels"]
        stored = np.unpackbits(archive["test"], count=1797).astype(bool)
    drawn = np.zeros(1797, dtype=bool)
    for c, chosen in enumerate(expected):
        rows = np.flatnonzero(labels == c)
        drawn[stream(0, "digits test split", c).permutation(rows)[:chosen]] = True
    assert np.array_equal(stored, drawn)
    assert np.array_equal(load_digits().test.labels, labels[drawn])


def test_loading_twice_gives_the_same_bits() -> None:
    assert load_digits().fingerprint == load_digits().fingerprint
