"""Random numbers that depend on what they are for, and on nothing that ran before.

Every draw comes from a stream named by ``(seed, purpose, *numbers)``, for example
``stream(seed, "batches", round, client)``. No global generator is read or set, so the same experiment gives
the same numbers in any order, on any engine and after any interruption.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from struct import unpack
from typing import Any

import numpy as np
import torch
from torch.overrides import TorchFunctionMode


def derive(seed: int, purpose: str, *numbers: int) -> int:
    """A 128-bit key for one purpose, the same on every machine and in every process."""
    return int.from_bytes(_digest(seed, purpose, *numbers), "little")


def name_of(seed: int, purpose: str, *numbers: int) -> str:
    """How a stream is called."""
    return f"{int(seed)}/{purpose}" + "".join([f"/{int(number)}" for number in numbers])


def _digest(seed: int, purpose: str, *numbers: int) -> bytes:
    return hashlib.blake2b(name_of(seed, purpose, *numbers).encode(), digest_size=16).digest()


def stream(seed: int, purpose: str, *numbers: int) -> np.random.Generator:
    """A fresh NumPy generator for one purpose."""
    return np.random.Generator(np.random.Philox(key=derive(seed, purpose, *numbers)))


class Streams:
    """Many streams of one purpose through one generator: the draws of ``stream``, at a fifth of its cost."""

    def __init__(self, purpose: str) -> None:
        self.purpose = purpose
        self.bits = np.random.Philox(key=0)
        self.generator = np.random.Generator(self.bits)
        fresh = dict(self.bits.state)
        self.start: dict[str, Any] = {"counter": [0, 0, 0, 0], "key": [0, 0]}
        # Lists of Python numbers are read faster than arrays.
        self.state: Any = fresh | {"state": self.start, "buffer": [0, 0, 0, 0]}

    def at(self, seed: int, *numbers: int) -> np.random.Generator:
        """The stream ``(seed, purpose, *numbers)`` from its beginning; the one asked for before it is over."""
        self.start["key"] = unpack("<QQ", _digest(seed, self.purpose, *numbers))
        self.bits.state = self.state
        return self.generator


class _DrawFrom(TorchFunctionMode):
    """Hands a generator to every random operation that was not given one."""

    _draws = frozenset(
        {
            torch.Tensor.uniform_,
            torch.Tensor.normal_,
            torch.Tensor.bernoulli_,
            torch.Tensor.exponential_,
            torch.Tensor.random_,
            torch.rand,
            torch.randn,
            torch.randint,
            torch.randperm,
            torch.normal,
            torch.bernoulli,
            torch.multinomial,
            *(f for f in vars(torch.nn.init).values() if "generator" in getattr(f, "__annotations__", {})),
        }
    )

    def __init__(self, generator: torch.Generator) -> None:
        super().__init__()
        self.generator = generator

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func in self._draws and kwargs.get("generator") is None:
            kwargs["generator"] = self.generator
        return func(*args, **kwargs)


@contextmanager
def drawing_from(seed: int, purpose: str, *numbers: int) -> Iterator[torch.Generator]:
    """Within the block PyTorch's random operations draw from one stream instead of the global generator.

    This is how models are initialised: their constructors call ``uniform_`` or ``normal_`` without a generator.
    """
    generator = torch.Generator().manual_seed(derive(seed, purpose, *numbers) % 2**63)
    with _DrawFrom(generator):
        yield generator
