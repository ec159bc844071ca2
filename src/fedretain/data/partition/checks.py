"""Types and checks of what a partition is given: every refusal says what is allowed and what to change."""

from __future__ import annotations

import math
from numbers import Integral, Real
from typing import Annotated, Any, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray
from pydantic import Field

from fedretain.errors import PartitionError

Indices: TypeAlias = NDArray[np.int64]
Parts: TypeAlias = list[NDArray[np.int64]]

Count = Annotated[int, Field(ge=1)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Fraction = Annotated[float, Field(ge=0, lt=1)]


def check_labels(labels: ArrayLike) -> Indices:
    """The labels as a flat int64 array: at least one, whole numbers, none negative."""
    array = np.asarray(labels)
    if array.ndim != 1:
        raise PartitionError(f"labels have shape {array.shape}: give one class number per example, in one dimension")
    if array.size == 0:
        raise PartitionError("labels are empty: there is nothing to split, check the dataset and its split")
    if not np.issubdtype(array.dtype, np.integer):
        raise PartitionError(f"labels are of type {array.dtype}: convert them to whole class numbers 0, 1, 2, …")
    if array.min() < 0:
        where = int(np.argmax(array < 0))
        raise PartitionError(
            f"label {array[where]} of example {where} is negative: class numbers start at 0, "
            "leave unlabelled examples out"
        )
    return array.astype(np.int64)


def check_count(key: str, value: Any) -> int:
    """A whole number of at least 1."""
    if isinstance(value, bool) or not isinstance(value, Integral) or value < 1:
        raise PartitionError(f"{key} = {value!r}: must be a whole number of at least 1")
    return int(value)


def check_clients(value: Any, examples: int) -> int:
    """A number of clients that leaves none without an example."""
    clients = check_count("clients", value)
    if clients > examples:
        raise PartitionError(
            f"clients = {clients} is more than the {examples} examples, so some client would get no data: "
            f"use at most {examples} clients"
        )
    return clients


def check_positive(key: str, value: Any) -> float:
    """A finite number above zero."""
    if isinstance(value, bool) or not isinstance(value, Real) or not math.isfinite(value) or value <= 0:
        raise PartitionError(f"{key} = {value!r}: must be a finite number above 0")
    return float(value)


def check_fraction(key: str, value: Any) -> float:
    """A number of at least 0 and below 1."""
    if isinstance(value, bool) or not isinstance(value, Real) or not 0 <= float(value) < 1:
        raise PartitionError(f"{key} = {value!r}: must be a number of at least 0 and below 1")
    return float(value)
