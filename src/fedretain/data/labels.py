"""From labels as they come (numbers, text) to class numbers 0 .. C-1."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from fedretain.data.dataset import Array
from fedretain.errors import DataError, unknown

# Without class names the number of classes is the largest label + 1. With more classes than examples, and more than
# this, a label is an id, not a class.
MANY_CLASSES = 1000


def encode_labels(
    values: Mapping[str, Array], class_names: Sequence[str] | None, where: str
) -> tuple[dict[str, NDArray[np.int64]], tuple[str, ...]]:
    """Class numbers of each split, and the class names.

    Numbers are kept as they are; without ``class_names`` the classes are 0 .. largest label. Text is
    looked up in ``class_names``, or, without them, in the sorted distinct texts of all splits.
    """
    textual = {split: array.dtype.kind in "UT" for split, array in values.items()}
    if len(set(textual.values())) > 1:
        raise DataError(f"{where}: some splits have text as labels and others numbers; use one kind for all")
    if all(textual.values()):
        return _from_text(values, class_names, where)
    numbers = {split: _from_numbers(array, f"{where}, {split}") for split, array in values.items()}
    if class_names is not None:
        return numbers, tuple(class_names)
    largest = max((int(array.max()) for array in numbers.values() if array.size), default=-1)
    if largest >= max(MANY_CLASSES, sum(array.size for array in numbers.values())):
        raise DataError(
            f"{where}: the largest label is {largest}; labels must be class numbers 0, 1, 2, ... without "
            "large gaps: renumber them, or give them as text"
        )
    return numbers, tuple(str(c) for c in range(largest + 1))


def _from_text(
    values: Mapping[str, Array], class_names: Sequence[str] | None, where: str
) -> tuple[dict[str, NDArray[np.int64]], tuple[str, ...]]:
    names = (
        tuple(class_names)
        if class_names is not None
        else tuple(sorted({str(text) for array in values.values() for text in np.unique(array)}))
    )
    number = {name: c for c, name in enumerate(names)}
    encoded = {}
    for split, array in values.items():
        distinct, position = np.unique(array, return_inverse=True)
        for text in distinct:
            if str(text) not in number:
                row = int(np.flatnonzero(array == text)[0])
                raise DataError(f"{where}, {split}, example {row}: {unknown('class', str(text), names)}")
        encoded[split] = np.array([number[str(text)] for text in distinct], dtype=np.int64)[position.reshape(-1)]
    return encoded, names


def _from_numbers(array: Array, where: str) -> NDArray[np.int64]:
    if array.ndim == 2 and array.shape[1] == 1:
        array = array[:, 0]
    if array.ndim != 1:
        raise DataError(f"{where}: labels have shape {array.shape}; give one class number per example")
    if array.dtype.kind == "f":
        odd = np.flatnonzero(~((np.abs(array) < 2**53) & (array == np.trunc(array))))
        if len(odd):
            raise DataError(f"{where}: example {odd[0]} has label {array[odd[0]]}, which is not a class number")
    elif array.dtype.kind not in "iub":
        raise DataError(f"{where}: labels of type {array.dtype} cannot be used; give whole numbers or text")
    return array.astype(np.int64)
