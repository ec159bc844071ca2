"""Shuffles from many streams in one call: the numbers that NumPy draws, at a tenth of the time for small ones."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from fedretain.engines.native.building import library
from fedretain.randomness import name_of, stream

LARGEST = 2**31
"""Numbers of 32 bits are drawn; NumPy takes longer ones for larger sizes."""


def shuffled(names: Sequence[str], orders: np.ndarray) -> bool:
    """Fill [streams, times, size] with shuffles of 0 … size − 1; False where NumPy has to do it.

    A stream's name is ``name_of(seed, purpose, *numbers)``; its shuffles are those of the stream from its beginning.
    """
    kernel = _checked_kernel() if orders.shape[2] < LARGEST else None
    return kernel is not None and _fill(kernel, names, orders)


def _fill(kernel: Callable[..., Any], names: Sequence[str], orders: np.ndarray) -> bool:
    assert orders.flags.c_contiguous
    assert orders.dtype == np.int64
    lines = "".join([f"{name}\n" for name in names]).encode()
    return bool(kernel(lines, *orders.shape, orders.ctypes.data) == 0)


@functools.cache
def _checked_kernel() -> Callable[..., Any] | None:
    """The kernel, if this version of NumPy draws the same numbers."""
    found = library(torch.float32, "drawing")
    if found is None:
        return None
    kernel = found.shuffles
    kernel.argtypes = [ctypes.c_char_p, *[ctypes.c_long] * 3, ctypes.c_void_p]
    kernel.restype = ctypes.c_int
    for size in (2, 7, 100):
        orders = np.empty((3, 2, size), dtype=np.int64)
        streams = [stream(size, "check", number) for number in range(3)]
        expected = [[one.permutation(size) for _ in range(2)] for one in streams]
        names = [name_of(size, "check", number) for number in range(3)]
        if not _fill(kernel, names, orders) or not np.array_equal(orders, expected):
            return None
    return kernel
