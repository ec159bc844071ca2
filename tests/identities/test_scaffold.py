"""SCAFFOLD: what the control variates are, whoever takes part."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.func import functional_call

from fedretain.engines.schedule import local_batches
from fedretain.tensors import Tensors, zeros_like

OPTIONS = pytest.mark.parametrize("option", ["I", "II"])


def mean_over_population(played: Any, rounds: int) -> Tensors:
    """(1/K)·Σ_k c_k over the whole population; a client that was never seen has c_k = 0."""
    total = zeros_like(played.params)
    for state in played.states(rounds).values():
        total = {name: value + state[name] for name, value in total.items()}
    return {name: value / played.world.federation.clients for name, value in total.items()}


def gradient(played: Any, params: Tensors, numbers: Any) -> Tensors:
    """∇ of the plain cross-entropy on some examples, with torch.nn.functional alone."""
    inputs, labels = played.world.federation.examples(numbers)
    leaves = {name: value.detach().clone().requires_grad_() for name, value in params.items()}
    loss = torch.nn.functional.cross_entropy(functional_call(played.world.model, leaves, (inputs,)), labels)
    return dict(zip(leaves, torch.autograd.grad(loss, tuple(leaves.values())), strict=True))


@OPTIONS
@pytest.mark.parametrize("participation", [1.0, 2])
def test_c_is_the_mean_of_all_c_k_after_every_round(
    play: Any, assert_close: Any, option: str, participation: Any
) -> None:
    """c ← c + (1/K)·Σ_{S_t} (c_k⁺ − c_k) keeps c = (1/K)·Σ_k c_k, K the whole population, even when few take part."""
    played = play(method={"name": "scaffold", "option": option}, participation=participation, rounds=5)
    for t, end in enumerate(played.ends, start=1):
        assert_close(end.state.server, mean_over_population(played, t))
    assert max(value.abs().max() for value in played.ends[-1].state.server.values()) > 1e-3
    assert len(played.states(1)) == (5 if participation == 1.0 else 2)


@OPTIONS
def test_control_variates_start_at_zero(play: Any, option: str) -> None:
    played = play(method={"name": "scaffold", "option": option}, rounds=1)
    assert all(not value.any() for value in played.received[0].server.values())
    fresh = played.world.method.init_client(played.start.params, None)
    assert fresh.keys() == played.start.params.keys()
    assert all(not value.any() for value in fresh.values())


def test_option_1_is_the_full_local_gradient_at_the_received_model(play: Any, assert_close: Any) -> None:
    played = play(method={"name": "scaffold", "option": "I"})
    for k, upload in played.uploads[2].items():
        expected = gradient(played, played.received[2].params, played.world.federation.train[k])
        assert_close({n: v[0] for n, v in upload.state.items()}, expected)


def test_option_2_is_the_mean_of_the_gradients_along_the_local_path(play: Any, assert_close: Any) -> None:
    """y ← y − η(g − c_k + c), τ times: (w − y)/(τη) = mean(g) − c_k + c, so c_k⁺ = mean(g). Replayed in round 3."""
    played = play(method={"name": "scaffold", "option": "II"}, local={"lr": 0.1, "lr_decay": 0.7})
    received, local = played.received[2], played.world.local
    rate = 0.1 * 0.7**2
    for k, upload in played.uploads[2].items():
        numbers, c_k = played.world.federation.train[k], played.states(2)[k]
        y, total = received.params, zeros_like(received.params)
        batches = local_batches(0, 3, k, len(numbers), local)
        for at in batches:
            g = gradient(played, y, numbers[at])
            y = {n: v - rate * (g[n] - c_k[n] + received.server[n]) for n, v in y.items()}
            total = {n: v + g[n] for n, v in total.items()}
        assert_close({n: v[0] for n, v in upload.params.items()}, y)
        assert_close({n: v[0] for n, v in upload.state.items()}, {n: v / len(batches) for n, v in total.items()})
