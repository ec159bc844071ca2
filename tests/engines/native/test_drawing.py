"""Shuffles by the kernel are NumPy's, number by number; where they would not be, NumPy draws."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from fedretain.engines.native import building, drawing
from fedretain.engines.native.drawing import shuffled
from fedretain.randomness import name_of, stream

MANY = 5
needs_compiler = pytest.mark.skipif(building.compiler() is None, reason="no C compiler on this machine")


@pytest.fixture
def afresh() -> Iterator[None]:
    """The kernel is looked for, and checked, again."""
    drawing._checked_kernel.cache_clear()
    building.library.cache_clear()
    yield
    drawing._checked_kernel.cache_clear()
    building.library.cache_clear()


@needs_compiler
@pytest.mark.parametrize("size", [1, 2, 3, 8, 9, 20, 257, 70_000])
def test_numpys_numbers(size: int) -> None:
    """Several shuffles from each stream, with sizes around powers of two and above 2¹⁶."""
    orders = np.full((MANY, 3, size), -1, dtype=np.int64)
    clients = range(10**6, 10**6 + MANY)
    assert shuffled([name_of(7, "batches", 3, client) for client in clients], orders)
    for found, client in zip(orders, clients, strict=True):
        generator = stream(7, "batches", 3, client)
        np.testing.assert_array_equal(found, [generator.permutation(size) for _ in range(3)])


@needs_compiler
def test_names_of_all_lengths() -> None:
    """Up to one block of the digest; a longer one is NumPy's."""
    orders = np.empty((MANY, 1, 11), dtype=np.int64)
    for length in (1, 63, 64, 127, 128):
        purpose = "p" * (length - 2) if length > 2 else ""
        name = name_of(5, purpose) if length > 2 else "5"
        assert len(name) == length
        assert shuffled([name] * MANY, orders)
        if length > 2:
            assert (orders == stream(5, purpose).permutation(11)).all()
    assert not shuffled(["5/" + "p" * 127] * MANY, orders)


def test_large_sizes_are_numpys() -> None:
    """They need longer numbers."""
    assert not shuffled(["1/a"] * MANY, np.empty((MANY, 0, 2**31), dtype=np.int64))


@needs_compiler
@pytest.mark.usefixtures("afresh")
def test_another_numpy(monkeypatch: pytest.MonkeyPatch) -> None:
    """A version that draws other numbers is noticed, and draws them itself."""
    monkeypatch.setattr(drawing, "stream", lambda *name: stream(0, "other", len(name)))
    assert not shuffled(["1/a"] * MANY, np.empty((MANY, 1, 4), dtype=np.int64))


@pytest.mark.usefixtures("afresh")
def test_without_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """NumPy draws."""
    monkeypatch.setenv("FEDRETAIN_NATIVE", "0")
    assert not shuffled(["1/a"] * MANY, np.empty((MANY, 1, 4), dtype=np.int64))
