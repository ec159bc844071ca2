"""How many clients fit into memory: parameters, data and activations."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import fedretain
from fedretain.config import make_experiment
from fedretain.engines import World, memory
from fedretain.engines.memory import activation_bytes, clients_in_memory
from fedretain.experiment import build_world
from fedretain.methods import Received


def built(model: dict[str, Any], size: int, **local: Any) -> World:
    """Two clients of ten grey images each."""
    inputs = np.zeros((20, 1, size, size), dtype=np.uint8)
    labels = np.arange(20) % 10
    partition = {"kind": "iid", "clients": 2, "validation": 0.0}
    given = {"model": model, "partition": partition, "local": {"epochs": 1, **local}, "device": "cpu"}
    return build_world(make_experiment(given), fedretain.from_arrays(inputs, labels, inputs, labels))


def received(world: World) -> Received:
    return Received({name: p.detach() for name, p in world.model.named_parameters()}, {}, {}, 1)


def test_activations_of_a_perceptron() -> None:
    """64 inputs, for the first layer's gradient, and 32 hidden units after ReLU, for that and the second layer's."""
    assert activation_bytes(built({"name": "mlp", "hidden": [32]}, 8)) == 4 * (64 + 32)


def test_clients_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """8·(64·32 + 32 + 32·10 + 10) for the model, 10·64 for the data, 2·5·(64 + 32) for a batch; 4 bytes each."""
    world = built({"name": "mlp", "hidden": [32]}, 8, batch_size=5)
    one = 4 * (8 * (64 * 32 + 32 + 32 * 10 + 10) + 10 * 64 + 2 * 5 * (64 + 32))
    for room, clients in ((one, 1), (3 * one, 3), (3 * one - 1, 2), (1, 1)):
        monkeypatch.setattr(memory, "MEMORY", room)
        assert clients_in_memory(world, received(world)) == clients


def test_a_batch_is_never_larger_than_a_client() -> None:
    """Ten examples in batches of a thousand are a batch of ten."""
    counts = {
        size: clients_in_memory(world, received(world))
        for size in (10, 1000)
        for world in [built({"name": "mlp", "hidden": [32]}, 8, batch_size=size)]
    }
    assert counts[10] == counts[1000]


def test_batch_norm_keeps_its_statistics() -> None:
    """Measuring runs the model in training mode, on copies of what that would change."""
    world = built({"name": "mlp", "hidden": [4]}, 8)
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.BatchNorm1d(64), torch.nn.Linear(64, 10))
    object.__setattr__(world, "model", model)
    assert activation_bytes(world) > 0
    assert model[1].num_batches_tracked == 0
    assert torch.equal(model[1].running_mean, torch.zeros(64))


def test_a_model_that_breaks_down_is_left_to_training() -> None:
    world = built({"name": "mlp", "hidden": [4]}, 8)
    object.__setattr__(world, "model", torch.nn.Linear(3, 10))
    assert activation_bytes(world) == 0
