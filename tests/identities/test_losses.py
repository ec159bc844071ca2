"""The loss family inside training: class proportions are read anew in every round."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import functional_call

from fedretain.config import make_experiment
from fedretain.data import Dataset
from fedretain.data.federation import Federation
from fedretain.engines import LoopEngine
from fedretain.experiment import build_world
from fedretain.losses import LOSSES
from fedretain.rounds import initial_state, train_rounds
from fedretain.runs.checkpoint import Checkpoint


@dataclass(frozen=True)
class Drifting(Federation):
    """A federation whose class counts are whatever was last written on the board."""

    board: list[Tensor]

    def class_counts(self, client: int) -> Tensor:
        return self.board[-1]


@pytest.mark.parametrize("name", sorted(LOSSES))
def test_class_proportions_are_an_input_of_every_round(
    name: str, settings: Any, five_clients: Dataset, assert_close: Any
) -> None:
    """The counts change between rounds 1 and 2; each round is the full-batch step under its own counts, engine kept."""
    given = settings(rounds=2, loss=name, local={"steps": 1, "batch_size": 100})
    experiment = make_experiment(given)
    world = build_world(experiment, five_clients)
    held = world.federation
    shares = [torch.tensor([9, 0, 3, 1]), torch.tensor([1, 5, 0, 60])]
    board: list[Tensor] = [shares[0]]
    federation = Drifting(**{f.name: getattr(held, f.name) for f in fields(Federation)}, board=board)
    world = replace(world, federation=federation)
    start = initial_state(experiment, world)
    rounds = train_rounds(experiment, world, LoopEngine(world), Checkpoint(start, {}, {}))
    params = start.params
    for counts in shares:
        board.append(counts)
        end, _, _ = next(rounds)
        expected = {n: torch.zeros_like(v) for n, v in params.items()}
        for k in range(5):
            inputs, labels = held.examples(held.train[k])
            leaves = {n: v.clone().requires_grad_() for n, v in params.items()}
            loss = LOSSES[name](functional_call(world.model, leaves, (inputs,)), labels, counts).mean()
            gradients = torch.autograd.grad(loss, tuple(leaves.values()))
            p = len(labels) / len(held.labels)
            expected = {n: v + p * (params[n] - 0.2 * g) for (n, v), g in zip(expected.items(), gradients, strict=True)}
        assert_close(end.state.params, expected)
        params = end.state.params


@pytest.mark.parametrize("name", ["wsm", "tce", "fedlc", "balanced"])
def test_absent_classes_are_left_alone_by_local_training(name: str, play: Any) -> None:
    """Client 3 holds some classes; the classifier's rows of the others keep their bits."""
    played = play(loss=name, rounds=1, local={"epochs": 5})
    counts = played.world.federation.class_counts(3)
    assert 2 <= int((counts > 0).sum()) < 4
    local = played.uploads[0][3].params
    for part in ("weight", "bias"):
        moved = (local[f"classifier.{part}"][0] != played.start.params[f"classifier.{part}"]).reshape(4, -1).any(1)
        assert torch.equal(moved, counts > 0)


def test_balanced_softmax_trains_as_wsm(play: Any, assert_close: Any) -> None:
    """The same gradient, so the same model after three rounds."""
    keys = {"participation": 3, "local": {"epochs": 2}}
    assert_close(play(loss="balanced", **keys).params, play(loss="wsm", **keys).params, rtol=1e-10, atol=1e-13)
