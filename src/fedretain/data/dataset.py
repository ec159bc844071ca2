"""What every way of bringing data ends in: a checked training set and test set as plain arrays."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedretain.errors import DataError

Array = NDArray[Any]


@dataclass(frozen=True, eq=False)
class Examples:
    """Examples in a fixed order: ``inputs`` [N, C, H, W] (uint8 or float32), ``labels`` [N] (int64).

    ``columns`` holds what else is known of each example (source, patient, coarse label, ...), for partitions
    by a column. ``checksum`` is ``array_digest(inputs)`` where a loader already knows it; it saves a pass.
    """

    inputs: Array
    labels: NDArray[np.int64]
    columns: Mapping[str, Array] = field(default_factory=dict)
    checksum: str = ""

    def __len__(self) -> int:
        return len(self.labels)


@dataclass(frozen=True, eq=False)
class Dataset:
    """A training set and a test set of the same kind of examples, checked on construction.

    ``scale`` is the largest value a pixel can take (255 for images, 16 for digits, 1 for float arrays),
    so that ``inputs / scale`` lies in [0, 1]. ``fingerprint`` is a sha256 over inputs and labels of both
    sets: two datasets with the same fingerprint train the same model. It is computed unless it is given.
    """

    name: str
    train: Examples
    test: Examples
    class_names: tuple[str, ...]
    scale: float
    fingerprint: str = ""

    def __post_init__(self) -> None:
        _check_dataset(self)
        if not self.fingerprint:
            object.__setattr__(self, "fingerprint", _fingerprint(self.train, self.test))

    @property
    def shape(self) -> tuple[int, int, int]:
        """(channels, height, width) of one example."""
        channels, height, width = self.train.inputs.shape[1:]
        return channels, height, width

    @property
    def classes(self) -> int:
        """The number of classes C; labels lie in 0 .. C-1."""
        return len(self.class_names)


def array_digest(array: Array) -> str:
    """sha256 over the type, the shape and the bytes of an array, in hexadecimal."""
    digest = hashlib.sha256(f"{array.dtype.str} {array.shape}\n".encode())
    digest.update(np.ascontiguousarray(array).data)
    return digest.hexdigest()


def _fingerprint(train: Examples, test: Examples) -> str:
    digests = [
        part
        for examples in (train, test)
        for part in (examples.checksum or array_digest(examples.inputs), array_digest(examples.labels))
    ]
    return hashlib.sha256("\n".join(digests).encode()).hexdigest()


def _check_dataset(dataset: Dataset) -> None:
    if not (np.isfinite(dataset.scale) and dataset.scale > 0):
        raise DataError(
            f"dataset {dataset.name!r}: scale is {dataset.scale}, but must be a positive number: the "
            "largest value a pixel can take (255 for images, 1 for float arrays)"
        )
    for split, examples in (("train", dataset.train), ("test", dataset.test)):
        _check_examples(f"dataset {dataset.name!r}, {split}", examples, dataset.classes)
    for what, of_train, of_test in (
        ("shape", dataset.train.inputs.shape[1:], dataset.test.inputs.shape[1:]),
        ("type", dataset.train.inputs.dtype, dataset.test.inputs.dtype),
    ):
        if of_train != of_test:
            raise DataError(
                f"dataset {dataset.name!r}: train examples have {what} {of_train} but test examples have "
                f"{of_test}; bring both to the same {what}"
            )


def _check_examples(where: str, examples: Examples, classes: int) -> None:
    inputs, labels = examples.inputs, examples.labels
    if inputs.dtype not in (np.uint8, np.float32) or inputs.ndim != 4:
        raise DataError(
            f"{where}: inputs are {inputs.dtype} {inputs.shape}, but must be uint8 or float32 [N, C, H, W]; "
            "from_arrays converts other types and layouts"
        )
    if labels.dtype != np.int64 or labels.ndim != 1:
        raise DataError(f"{where}: labels are {labels.dtype} {labels.shape}, but must be int64 [N]")
    if inputs.size == 0:
        raise DataError(f"{where}: inputs of shape {inputs.shape} hold no values; at least one example is needed")
    lengths = {"inputs": len(inputs), "labels": len(labels)}
    lengths |= {f"column {name!r}": len(values) for name, values in examples.columns.items()}
    if len(set(lengths.values())) > 1:
        listed = ", ".join(f"{name} {length}" for name, length in lengths.items())
        raise DataError(f"{where}: lengths differ ({listed}); every example needs one entry in each")
    if classes == 0:
        raise DataError(f"{where}: there are no classes; give at least one class name")
    outside = np.flatnonzero((labels < 0) | (labels >= classes))
    if len(outside):
        raise DataError(
            f"{where}: example {outside[0]} has label {labels[outside[0]]}, but with {classes} classes "
            f"labels must be 0 to {classes - 1} ({len(outside)} such labels)"
        )
    if inputs.dtype == np.float32:
        broken = np.flatnonzero(~np.isfinite(inputs).reshape(len(inputs), -1).all(axis=1))
        if len(broken):
            raise DataError(
                f"{where}: example {broken[0]} holds NaN or infinity ({len(broken)} such examples); "
                "remove or repair them"
            )
