"""What a program for ``play`` is made of: operations, and the places of their values in memory."""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from typing import NamedTuple

import numpy as np

FROM_NOTHING, FROM_BIAS, FROM_OUT = range(3)
"""What a product is added to."""


class Kind(IntEnum):
    """What an operation does; the order is that of ``playing.h``."""

    PRODUCT = 0
    RELU = 1
    MASK = 2
    SOFTMAX = 3
    PICK = 4
    PUT = 5
    ADD = 6
    SUBTRACT = 7
    MULTIPLY = 8
    DIVIDE = 9
    SUM = 10
    MEAN = 11
    AT_LEAST = 12
    FILL = 13


class Operation(NamedTuple):
    """A row of the program; the columns are those of ``playing.h``."""

    kind: Kind
    out: int
    a: int = 0
    b: int = 0
    c: int = 0
    rows: int = 1
    length: int = 1
    depth: int = 0
    a_row: int = 0
    a_next: int = 0
    b_row: int = 0
    b_next: int = 0
    out_row: int = 0
    c_row: int = 0
    start: int = FROM_NOTHING
    number: int = 0
    then: int = 0


class Unknown(Exception):
    """Something that the program cannot do."""


class Place(NamedTuple):
    """A value of one client: its buffer, shape and strides in numbers."""

    buffer: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    of: str = "reals"
    """Of what: "reals", "wholes", which name a class, or "truths"."""
    everybody: bool = False
    """Whether it is one number for all clients."""

    @property
    def contiguous(self) -> bool:
        """Whether its numbers lie in order without gaps."""
        return all(
            size == 1 or stride == expected
            for size, stride, expected in zip(self.shape, self.strides, strides_of(self.shape), strict=True)
        )


class Matrix(NamedTuple):
    """A place as rows and columns."""

    rows: int
    length: int
    row: int
    next: int


def strides_of(shape: Sequence[int]) -> tuple[int, ...]:
    """Of numbers that lie in order without gaps."""
    strides = [1]
    for size in reversed(shape[1:]):
        strides.insert(0, strides[0] * size)
    return tuple(strides) if shape else ()


def matrix_of(place: Place) -> Matrix:
    """A place of at most two axes that are longer than 1."""
    long = [(size, stride) for size, stride in zip(place.shape, place.strides, strict=True) if size != 1]
    if len(long) > 2:
        if not place.contiguous:
            raise Unknown(f"a value of {place.shape}")
        long = [(int(np.prod(place.shape, dtype=int)), 1)]
    rows, columns = [(1, 0), (1, 0), *long][-2:]
    return Matrix(rows[0], columns[0], rows[1], columns[1])


def flat(*places: Place) -> dict[str, int]:
    """Values without gaps as one row."""
    if not all(place.contiguous for place in places):
        raise Unknown("gaps in memory")
    return {"rows": 1, "length": int(np.prod(places[0].shape, dtype=int))}


def expanded(place: Place, shape: tuple[int, ...]) -> Place:
    """With strides of 0 along axes that it lacks."""
    if not place.shape:
        return Place(place.buffer, shape, (0,) * len(shape))
    strides = tuple(0 if size == 1 else stride for size, stride in zip(place.shape, place.strides, strict=True))
    return Place(place.buffer, shape, strides)


def matrix_like(place: Place, shape: tuple[int, ...]) -> Matrix:
    """How a place that was ``expanded`` goes along with a result of this shape: only ``row`` and ``next`` count."""
    long = [stride for size, stride in zip(shape, place.strides, strict=True) if size != 1]
    if len(long) > 2:
        same = Place(place.buffer, shape, place.strides)
        if same.contiguous:
            return Matrix(1, int(np.prod(shape, dtype=int)), 0, 1)
        if any(long):
            raise Unknown(f"a value of {shape}")
        long = [0]
    rows, columns = [0, 0, *long][-2:]
    return Matrix(1, 1, rows, columns)
