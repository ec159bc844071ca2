"""The test set of a federation: normalised once, kept where it is small, never sent to other processes."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest
import torch

from fedretain.data import federation as module
from fedretain.data.federation import EvaluationSet
from fedretain.data.transforms import Normalise
from fedretain.randomness import stream

EXAMPLES, SHAPE = 30, (2, 3, 3)
BYTES = EXAMPLES * 18 * 4


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many examples each normalisation was given."""
    seen: list[int] = []
    normalise = Normalise.__call__

    def counted(self: Normalise, inputs: torch.Tensor) -> torch.Tensor:
        seen.append(len(inputs))
        return normalise(self, inputs)

    monkeypatch.setattr(Normalise, "__call__", counted)
    return seen


def evaluation_set() -> EvaluationSet:
    rng = stream(0, "federation test")
    inputs = torch.from_numpy(rng.integers(0, 256, (EXAMPLES, *SHAPE), dtype=np.uint8))
    normalise = Normalise(torch.tensor([[[100.0]], [[7.0]]]), torch.tensor([[[50.0]], [[3.0]]]))
    return EvaluationSet(inputs, torch.arange(EXAMPLES) % 3, normalise)


def joined(test: EvaluationSet, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    inputs, labels = zip(*test.batches(size), strict=True)
    assert [len(part) for part in labels[:-1]] == [size] * (len(labels) - 1)
    return torch.cat(inputs), torch.cat(labels)


@pytest.mark.parametrize("kept", [BYTES, BYTES - 1])
@pytest.mark.parametrize("block", [7, 2048])
@pytest.mark.parametrize("size", [1, 7, 30, 1000])
def test_batches_are_the_normalised_examples(size: int, block: int, kept: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """(x − 100) / 50 in the first channel, (x − 7) / 3 in the second; to the bit, kept or not."""
    monkeypatch.setattr(module, "KEPT_ON_CPU", kept)
    monkeypatch.setattr(module, "_BLOCK", block)
    test = evaluation_set()
    inputs, labels = joined(test, size)
    raw = test.inputs.to(torch.float32)
    assert torch.equal(inputs[:, 0], (raw[:, 0] - 100) / 50)
    assert torch.equal(inputs[:, 1], (raw[:, 1] - 7) / 3)
    assert torch.equal(labels, test.labels)


def test_a_small_test_set_is_normalised_once(calls: list[int]) -> None:
    test = evaluation_set()
    joined(test, 7)
    joined(test, 10)
    assert calls == [EXAMPLES]


def test_a_large_one_is_normalised_batch_by_batch(calls: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Kept, it would take 30 · 18 · 4 bytes."""
    monkeypatch.setattr(module, "KEPT_ON_CPU", BYTES - 1)
    test = evaluation_set()
    joined(test, 10)
    joined(test, 10)
    assert calls == [10] * 6


def test_what_was_normalised_is_not_sent(calls: list[int]) -> None:
    test = evaluation_set()
    before = joined(test, 7)
    fields: dict[str, Any] = test.__getstate__()
    assert fields.keys() == {"inputs", "labels", "normalise"}
    again = pickle.loads(pickle.dumps(test))
    assert len(calls) == 1
    assert all(torch.equal(one, other) for one, other in zip(joined(again, 7), before, strict=True))
    assert len(calls) == 2
