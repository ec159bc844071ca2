"""Random numbers depend on what they are for, and on nothing that ran before."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import nn

from fedretain.randomness import Streams, derive, drawing_from, stream


def test_streams_do_not_depend_on_order() -> None:
    first = [stream(0, "batches", 1, k).random(3) for k in (0, 1)]
    second = [stream(0, "batches", 1, k).random(3) for k in (1, 0)]
    assert np.array_equal(first, second[::-1])


def test_every_part_of_a_name_counts() -> None:
    names = [(0, "a"), (1, "a"), (0, "b"), (0, "a", 0), (0, "a", 1), (0, "a", 1, 1), (0, "a", 11), (1, "a", 1)]
    assert len({derive(*name) for name in names}) == len(names)
    assert len({stream(*name).random() for name in names}) == len(names)


def test_a_key_is_the_same_for_ever() -> None:
    """blake2b of the text '7/cohort/3', 16 bytes, little-endian: runs of old must go on with the same numbers."""
    digest = hashlib.blake2b(b"7/cohort/3", digest_size=16).digest()
    assert derive(7, "cohort", 3) == int.from_bytes(digest, "little")


def test_streams_through_one_generator_draw_the_same() -> None:
    """Whatever was drawn before, halves of words included, and in any order."""
    shared = Streams("batches")
    for numbers in ((1, 0), (1, 1), (2, 0), (1, 0)):
        for draw in (
            lambda rng: rng.permutation(37),
            lambda rng: rng.integers(0, 2**31, 5, dtype=np.int32),
            lambda rng: rng.normal(size=3),
            lambda rng: rng.permuted(np.arange(20).reshape(2, 10), axis=1),
        ):
            assert np.array_equal(draw(shared.at(7, *numbers)), draw(stream(7, "batches", *numbers)))
    assert shared.at(7, 1).random() != Streams("cohort").at(7, 1).random()


def test_no_global_generator_is_read_or_set() -> None:
    before = np.random.get_state()[1].copy(), torch.get_rng_state()  # noqa: NPY002
    stream(0, "x").random(10)
    with drawing_from(0, "init"):
        nn.Linear(3, 3)
    assert np.array_equal(before[0], np.random.get_state()[1])  # noqa: NPY002
    assert torch.equal(before[1], torch.get_rng_state())


INITIALISERS = [
    (name, function)
    for name, function in vars(nn.init).items()
    if name.endswith("_") and not name.startswith("_") and inspect.isfunction(function)
]


@pytest.mark.parametrize(("name", "function"), INITIALISERS, ids=[name for name, _ in INITIALISERS])
def test_every_initialiser_draws_from_the_stream(name: str, function: Callable[..., torch.Tensor]) -> None:
    """The same tensor inside two blocks of the same name, and the global generator where it was."""
    extra = {"constant_": (0.5,), "sparse_": (0.5,)}.get(name, ())

    def fill() -> torch.Tensor:
        shape = (3, 3, 3) if name == "dirac_" else (6, 6)
        return function(torch.empty(shape), *extra)

    before = torch.get_rng_state()
    with drawing_from(0, "init"):
        first = fill()
    with drawing_from(0, "init"):
        second = fill()
    assert torch.equal(first, second)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(
    "build",
    [
        lambda: nn.Linear(4, 3),
        lambda: nn.Conv2d(2, 3, 3),
        lambda: nn.ConvTranspose2d(2, 3, 3),
        lambda: nn.Embedding(5, 4),
        lambda: nn.LSTM(3, 4),
        lambda: nn.MultiheadAttention(4, 2),
        lambda: nn.TransformerEncoderLayer(4, 2, 8),
        lambda: nn.Bilinear(2, 3, 4),
        lambda: nn.PReLU(),
        lambda: nn.Parameter(torch.randn(3) + torch.rand(3) + torch.randperm(3) + torch.randint(9, (3,))),
        lambda: nn.Parameter(torch.normal(0.0, 1.0, (3,)) + torch.bernoulli(torch.full((3,), 0.5))),
        lambda: nn.Parameter(torch.multinomial(torch.ones(9), 3).float()),
    ],
)
def test_constructors_draw_from_the_stream(build: Callable[[], nn.Module | nn.Parameter]) -> None:
    def values() -> list[torch.Tensor]:
        built = build()
        return [built] if isinstance(built, torch.Tensor) else list(built.parameters())

    before = torch.get_rng_state()
    with drawing_from(3, "model"):
        first = values()
    with drawing_from(3, "model"):
        second = values()
    with drawing_from(4, "model"):
        other = values()
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    if not isinstance(build(), nn.PReLU):
        assert any(not torch.equal(a, b) for a, b in zip(first, other, strict=True))


def test_nested_blocks_keep_their_own_streams() -> None:
    with drawing_from(0, "outer"):
        alone = [torch.rand(2), torch.rand(2)]
    with drawing_from(0, "inner"):
        inside_alone = torch.rand(2)
    with drawing_from(0, "outer"):
        first = torch.rand(2)
        with drawing_from(0, "inner"):
            inside = torch.rand(2)
        second = torch.rand(2)
    assert torch.equal(inside, inside_alone)
    assert torch.equal(first, alone[0])
    assert torch.equal(second, alone[1])


def test_a_given_generator_is_kept() -> None:
    with drawing_from(0, "x"):
        given = torch.rand(2, generator=torch.Generator().manual_seed(5))
    assert torch.equal(given, torch.rand(2, generator=torch.Generator().manual_seed(5)))
