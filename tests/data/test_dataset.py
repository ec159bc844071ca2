from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import pytest

from fedretain.data.dataset import Dataset, Examples, array_digest
from fedretain.errors import DataError


def examples(count: int = 4, dtype: Any = np.uint8, **columns: np.ndarray) -> Examples:
    inputs = np.arange(count * 6).reshape(count, 1, 2, 3).astype(dtype)
    return Examples(inputs, np.arange(count, dtype=np.int64) % 2, columns)


def dataset(train: Examples, test: Examples | None = None, classes: int = 2, scale: float = 255.0) -> Dataset:
    return Dataset("toy", train, examples() if test is None else test, tuple("abcdef"[:classes]), scale)


def test_shape_classes_and_length() -> None:
    made = dataset(examples(5))
    assert made.shape == (1, 2, 3)
    assert made.classes == 2
    assert (len(made.train), len(made.test)) == (5, 4)


def test_fingerprint_is_the_sha256_of_the_four_digests() -> None:
    """Worked out from the definition: per array sha256(type, shape, bytes), then sha256 of the four lines."""
    train, test = examples(5), examples(3)
    lines = []
    for array in (train.inputs, train.labels, test.inputs, test.labels):
        header = f"{array.dtype.str} {array.shape}\n".encode()
        lines.append(hashlib.sha256(header + array.tobytes()).hexdigest())
    expected = hashlib.sha256("\n".join(lines).encode()).hexdigest()
    assert dataset(train, test).fingerprint == expected
    known = Examples(train.inputs, train.labels, {}, checksum=array_digest(train.inputs))
    assert dataset(known, test).fingerprint == expected


@pytest.mark.parametrize("part", ["train inputs", "train labels", "test inputs", "test labels"])
def test_fingerprint_depends_on_every_part(part: str) -> None:
    split, what = part.split()
    parts = {"train": examples(5), "test": examples(4)}
    before = dataset(parts["train"], parts["test"]).fingerprint
    array = getattr(parts[split], what)
    array[(0,) * array.ndim] = 1 - array[(0,) * array.ndim]
    assert dataset(parts["train"], parts["test"]).fingerprint != before


def test_digest_tells_shapes_and_types_apart_and_not_memory_layouts() -> None:
    flat = np.zeros(6, np.uint8)
    assert array_digest(flat) != array_digest(flat.reshape(2, 3))
    assert array_digest(flat) != array_digest(flat.astype(np.int8))
    square = np.arange(9).reshape(3, 3)
    assert array_digest(np.asfortranarray(square)) == array_digest(square)


def test_label_out_of_range_names_the_first_index_and_value() -> None:
    bad = examples(4)
    bad.labels[2:] = 7, -1
    with pytest.raises(DataError, match=r"'toy', train: example 2 has label 7.*2 classes.*0 to 1 \(2 such"):
        dataset(bad)
    negative = examples(4)
    negative.labels[3] = -1
    with pytest.raises(DataError, match=r"test: example 3 has label -1"):
        dataset(examples(), negative)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_broken_floats_name_the_index(value: float) -> None:
    bad = examples(4, np.float32)
    bad.inputs[1, 0, 1, 2] = value
    with pytest.raises(DataError, match=r"train: example 1 holds NaN or infinity"):
        dataset(bad, examples(4, np.float32), scale=1.0)


def test_lengths_must_agree() -> None:
    short = Examples(examples(4).inputs, np.zeros(3, np.int64))
    with pytest.raises(DataError, match=r"lengths differ .inputs 4, labels 3"):
        dataset(short)
    with pytest.raises(DataError, match=r"lengths differ .*column 'writer' 2"):
        dataset(examples(4, writer=np.array(["x", "y"])))


def test_no_examples() -> None:
    with pytest.raises(DataError, match=r"train: .*at least one example"):
        dataset(examples(0))
    with pytest.raises(DataError, match=r"test: .*at least one example"):
        dataset(examples(), examples(0))


def test_train_and_test_must_be_alike() -> None:
    other = Examples(np.zeros((2, 3, 2, 3), np.uint8), np.zeros(2, np.int64))
    with pytest.raises(DataError, match=r"shape \(1, 2, 3\) but test examples have \(3, 2, 3\)"):
        dataset(examples(), other)
    with pytest.raises(DataError, match=r"type uint8 but test examples have float32"):
        dataset(examples(), examples(4, np.float32))


def test_types_and_layouts_that_are_not_allowed() -> None:
    with pytest.raises(DataError, match=r"inputs are float64 .*from_arrays"):
        dataset(examples(4, np.float64))
    with pytest.raises(DataError, match=r"inputs are uint8 \(4, 6\)"):
        dataset(Examples(np.zeros((4, 6), np.uint8), np.zeros(4, np.int64)))
    with pytest.raises(DataError, match=r"labels are int32"):
        dataset(Examples(examples().inputs, np.zeros(4, np.int32)))  # type: ignore[arg-type]


@pytest.mark.parametrize("scale", [0.0, -1.0, float("nan"), float("inf")])
def test_scale_must_be_positive(scale: float) -> None:
    with pytest.raises(DataError, match=r"scale is"):
        dataset(examples(), scale=scale)


def test_no_classes() -> None:
    with pytest.raises(DataError, match=r"no classes; give"):
        dataset(examples(), classes=0)
