"""Shared memory gives back what was written, in any type, however it grows."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import torch

from fedretain.engines.shared import ALIGNED, LARGE, SharedFile, dump, load
from fedretain.randomness import stream

TYPES = [
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.uint8,
    torch.bool,
]


@pytest.fixture
def pair() -> tuple[SharedFile, SharedFile]:
    """The same file, as its writer and as another process that was given its number."""
    ours = SharedFile()
    theirs = SharedFile(os.dup(ours.number))
    yield ours, theirs
    ours.close()
    theirs.close()


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_round_trip(dtype: torch.dtype, pair: tuple[SharedFile, SharedFile]) -> None:
    ours, theirs = pair
    values = {
        "matrix": (torch.arange(35) % 7 - 3).reshape(5, 7).to(dtype),
        "empty": torch.empty((0, 3), dtype=dtype),
        "number": torch.tensor(1).to(dtype),
        "turned": (torch.arange(6) % 2).reshape(2, 3).to(dtype).t(),
    }
    layout, end = ours.write(values)
    read = theirs.read(layout)
    assert list(read) == list(values)
    for name, value in values.items():
        assert read[name].dtype == dtype
        assert read[name].shape == value.shape
        assert torch.equal(read[name], value)
    assert end % ALIGNED == 0
    assert all(at % ALIGNED == 0 for *_, at in layout)


def test_tensors_do_not_overlap(pair: tuple[SharedFile, SharedFile]) -> None:
    """Three bytes and then 65: the second begins at 64 and ends at 129, the third begins at 192."""
    ours, theirs = pair
    values = {
        "a": torch.ones(3, dtype=torch.uint8),
        "b": torch.full((65,), 2, dtype=torch.uint8),
        "c": torch.full((1,), 3, dtype=torch.uint8),
    }
    layout, end = ours.write(values)
    assert [at for *_, at in layout] == [0, 64, 192]
    assert end == 256
    assert all(torch.equal(theirs.read(layout)[name], value) for name, value in values.items())


def test_growth_keeps_what_was_read_before(pair: tuple[SharedFile, SharedFile]) -> None:
    """A second part behind the first, far beyond the file's first size; the reader's old tensors stay valid."""
    ours, theirs = pair
    first, end = ours.write({"a": torch.arange(10)})
    early = theirs.read(first)["a"]
    second, _ = ours.write({"b": torch.arange(100_000)}, end)
    assert torch.equal(theirs.read(second)["b"], torch.arange(100_000))
    assert torch.equal(early, torch.arange(10))
    ours.write({"a": torch.arange(10) + 1})
    assert torch.equal(early, torch.arange(10) + 1)


def test_nothing_at_all(pair: tuple[SharedFile, SharedFile]) -> None:
    ours, theirs = pair
    layout, end = ours.write({}, 128)
    assert (layout, end) == ([], 128)
    assert theirs.read(layout) == {}


def test_pickling_sends_large_arrays_through_the_file(pair: tuple[SharedFile, SharedFile]) -> None:
    """The message is far shorter than the data, and a tensor that stands in two places is written once."""
    ours, theirs = pair
    rng = stream(0, "shared")
    array, tensor = rng.random(5000), torch.from_numpy(rng.random((50, 40)))
    thing = {"a": array, "b": [tensor, tensor], "small": torch.arange(3), "text": "x", "whole": np.arange(1000)}
    message = dump(thing, ours)
    assert len(message) < 4096
    size = os.fstat(ours.number).st_size
    assert size < 1.3 * (array.nbytes + tensor.numel() * 8 + 8000 + 3 * ALIGNED)
    again = load(message, theirs)
    assert np.array_equal(again["a"], array)
    assert again["whole"].dtype == np.int64
    assert torch.equal(again["b"][0], tensor)
    assert again["b"][0].data_ptr() == again["b"][1].data_ptr()
    assert torch.equal(again["small"], torch.arange(3))
    assert again["text"] == "x"


def test_tensors_that_move_give_up_their_memory(pair: tuple[SharedFile, SharedFile]) -> None:
    """From then on both sides see the same numbers; one that is too small to be laid down stays where it is."""
    ours, theirs = pair
    large, small = torch.arange(LARGE), torch.arange(3)
    message = dump([large, small], ours, moved=[large, small])
    again, little = load(message, theirs)
    again[5] = -1
    little[1] = -1
    assert large[5] == -1
    assert small.tolist() == [0, 1, 2]
    assert large.shape == (LARGE,)


def test_pickling_modules_and_odd_arrays(pair: tuple[SharedFile, SharedFile]) -> None:
    """Parameters stay parameters; texts, objects and arrays that must not be written to come through too."""
    ours, theirs = pair
    read_only = np.arange(LARGE)
    read_only.flags.writeable = False
    thing = (torch.nn.Linear(40, 30), np.array(["word"] * 500), np.arange(4000).reshape(40, 100)[:, ::2], read_only)
    layer, words, strided, kept = load(dump(thing, ours), theirs)
    assert isinstance(layer.weight, torch.nn.Parameter)
    assert torch.equal(layer.weight, thing[0].weight)
    assert words.tolist() == thing[1].tolist()
    assert np.array_equal(strided, thing[2])
    assert np.array_equal(kept, read_only)


def test_the_file_is_gone_with_its_last_holder() -> None:
    before = len(list(Path("/proc/self/fd").iterdir())) if Path("/proc/self/fd").exists() else 0
    file = SharedFile()
    layout, _ = file.write({"a": torch.arange(5)})
    held = file.read(layout)["a"]
    file.close()
    assert torch.equal(held, torch.arange(5))
    if before:
        del held, file
        assert len(list(Path("/proc/self/fd").iterdir())) <= before
