"""Memory that two processes see: tensors laid end to end in an unnamed file, gone with its last holder."""

from __future__ import annotations

import io
import mmap
import os
import pickle
import tempfile
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedretain.tensors import Tensors

ALIGNED = 64
"""Bytes between the beginnings of two tensors are a multiple of this: a cache line."""
REMEMBERED = 8
"""Layouts whose views are kept for the next time."""
LARGE = 1024
"""Bytes from which a tensor or array goes to shared memory in place of the message."""

Layout = list[tuple[str, torch.dtype, tuple[int, ...], int]]
"""Name, type, shape and place of every tensor."""


class SharedFile:
    """An unnamed file in memory that grows as needed; the other process opens it by its number."""

    def __init__(self, number: int | None = None) -> None:
        self.number = _unnamed() if number is None else number
        self.view: mmap.mmap | None = None
        self.seen: dict[tuple[Any, ...], list[Tensor]] = {}

    def room(self, size: int) -> mmap.mmap:
        """The file's memory, at least ``size`` bytes of it; tensors that were read before keep their own hold on it."""
        if self.view is None or len(self.view) < size:
            held = os.fstat(self.number).st_size
            if held < size:
                os.ftruncate(self.number, size + size // 4)
                held = size + size // 4
            self.view = mmap.mmap(self.number, held)
        return self.view

    def write(self, tensors: Tensors, start: int = 0) -> tuple[Layout, int]:
        """Lay tensors down from ``start``; where each of them is, and where the last ends."""
        layout: Layout = []
        end = start
        for name, value in tensors.items():
            layout.append((name, value.dtype, tuple(value.shape), end))
            end += -(-value.numel() * value.element_size() // ALIGNED) * ALIGNED
        self.room(end)
        for (name, *_), place in zip(layout, self._views(layout), strict=True):
            place.copy_(tensors[name])
        return layout, end

    def read(self, layout: Layout) -> Tensors:
        """The tensors of a layout, as views of the shared memory."""
        names = (name for name, *_ in layout)
        return dict(zip(names, self._views(layout), strict=True))

    def _views(self, layout: Layout) -> list[Tensor]:
        """Views of the shared memory; the last few layouts are remembered, for they come again in every round."""
        key = tuple(layout)
        found = self.seen.get(key)
        if found is None:
            end = max((at + _bytes(dtype, shape) for _, dtype, shape, at in layout), default=0)
            memory = self.room(max(end, 1))
            found = [_view(memory, dtype, shape, at) for _, dtype, shape, at in layout]
            if len(self.seen) >= REMEMBERED:
                self.seen.clear()
            self.seen[key] = found
        return found

    def close(self) -> None:
        """Let go of the file; its memory stays as long as tensors that were read from it."""
        self.view = None  # the map holds the file open too
        self.seen.clear()
        os.close(self.number)


def _view(memory: mmap.mmap, dtype: torch.dtype, shape: tuple[int, ...], at: int) -> Tensor:
    count = int(np.prod(shape))
    if not count:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(memory, dtype=dtype, count=count, offset=at).reshape(shape)


def dump(thing: Any, file: SharedFile, moved: Sequence[Tensor] = ()) -> bytes:
    """Pickle anything; its large tensors and arrays go to the shared file.

    Those of its tensors that are ``moved`` lie there from then on, and give up the memory that they had.
    """
    stream = io.BytesIO()
    pickler = _Pickler(stream, file)
    pickler.dump(thing)
    for tensor in moved:
        if id(tensor) in pickler.placed:
            _, layout, _ = pickler.placed[id(tensor)]
            tensor.data = file.read(layout)[""]
    return stream.getvalue()


def travels(thing: Any) -> bool:
    """Whether another process could be sent this: all its classes and functions can be imported there."""
    try:
        return b"__main__" not in dump_names(thing)
    except (pickle.PicklingError, AttributeError, TypeError):
        return False


def dump_names(thing: Any) -> bytes:
    """Pickle anything without its numbers: which classes and functions it is made of."""
    stream = io.BytesIO()
    _NamesOnly(stream).dump(thing)
    return stream.getvalue()


def load(message: bytes, file: SharedFile) -> Any:
    """What was dumped; its large tensors are views of the shared file."""
    return _Unpickler(io.BytesIO(message), file).load()


class _NamesOnly(pickle.Pickler):
    """Leaves the numbers out."""

    def persistent_id(self, thing: Any) -> Any:
        return "numbers" if isinstance(thing, Tensor | np.ndarray) else None


class _Pickler(pickle.Pickler):
    def __init__(self, stream: io.BytesIO, file: SharedFile) -> None:
        super().__init__(stream, protocol=pickle.HIGHEST_PROTOCOL)
        self.file, self.end = file, 0
        self.placed: dict[int, Any] = {}

    def persistent_id(self, thing: Any) -> Any:
        is_array = isinstance(thing, np.ndarray) and thing.dtype.kind in "biuf"
        if type(thing) is Tensor and not thing.requires_grad:
            value = thing.detach().cpu()
        elif is_array:
            value = torch.from_numpy(np.require(thing, requirements=["C", "W"]))
        else:
            return None
        if value.numel() * value.element_size() < LARGE:
            return None
        if id(thing) not in self.placed:
            layout, self.end = self.file.write({"": value}, self.end)
            # Keeping the object keeps its id from being used again.
            self.placed[id(thing)] = ("array" if is_array else "tensor", layout, thing)
        return self.placed[id(thing)][:2]


class _Unpickler(pickle.Unpickler):
    def __init__(self, stream: io.BytesIO, file: SharedFile) -> None:
        super().__init__(stream)
        self.file = file

    def persistent_load(self, pid: Any) -> Any:
        kind, layout = pid
        (value,) = self.file.read(layout).values()
        return value.numpy() if kind == "array" else value


def _unnamed() -> int:
    if hasattr(os, "memfd_create"):
        return os.memfd_create("fedretain")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def _bytes(dtype: torch.dtype, shape: tuple[int, ...]) -> int:
    return int(np.prod(shape)) * dtype.itemsize
