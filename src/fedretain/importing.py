"""Importing without looking for garbage."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def uncollected() -> Iterator[None]:
    """Python's collector rests in this block.

    Imports make hundreds of thousands of objects and no garbage; to look through all of them again and again takes
    half of the time that importing this package takes after PyTorch.
    """
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()
