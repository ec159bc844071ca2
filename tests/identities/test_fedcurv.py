"""FedCurv: the Fisher diagonal example by example, the server's sums, and the penalty that they stand for."""

from __future__ import annotations

from typing import Any

import torch
from torch.func import functional_call

from fedretain.engines.loop import LoopTask
from fedretain.methods import Batch, Own
from fedretain.methods.fisher import fisher_diagonal
from fedretain.tensors import Tensors, under_prefix, zeros_like


def gradient(played: Any, params: Tensors, inputs: torch.Tensor, labels: torch.Tensor) -> Tensors:
    leaves = {name: value.detach().clone().requires_grad_() for name, value in params.items()}
    loss = torch.nn.functional.cross_entropy(functional_call(played.world.model, leaves, (inputs,)), labels)
    return dict(zip(leaves, torch.autograd.grad(loss, tuple(leaves.values())), strict=True))


def explicit_fisher(played: Any, params: Tensors, client: int) -> Tensors:
    """(1/n)·Σ_i (∇ log p(y_i | x_i))², one example after another."""
    inputs, labels = played.world.federation.examples(played.world.federation.train[client])
    total = zeros_like(params)
    for i in range(len(labels)):
        one = gradient(played, params, inputs[i : i + 1], labels[i : i + 1])
        total = {name: value + one[name] ** 2 for name, value in total.items()}
    return {name: value / len(labels) for name, value in total.items()}


def test_fisher_is_the_mean_of_squared_gradients_not_the_square_of_the_mean(
    play: Any, assert_close: Any, monkeypatch: Any
) -> None:
    """In chunks of 10 examples (23 = 10 + 10 + 3), too."""
    played = play(rounds=0)
    federation, params = played.world.federation, played.start.params
    task = LoopTask(played.world, federation.class_counts(0), {}, 1)
    inputs, labels = federation.examples(federation.train[0])
    expected = explicit_fisher(played, params, 0)
    assert_close(fisher_diagonal(task, params, Batch(inputs, labels)), expected)
    monkeypatch.setattr("fedretain.methods.fisher.CHUNK", 10)
    assert_close(fisher_diagonal(task, params, Batch(inputs, labels)), expected)
    of_mean = {name: value**2 for name, value in gradient(played, params, inputs, labels).items()}
    assert not torch.allclose(of_mean["classifier.bias"], expected["classifier.bias"], rtol=0.5)


def test_fisher_leaves_out_padding(play: Any, assert_close: Any) -> None:
    """Weight 0 marks an example that is not there; n is the number of those that are."""
    played = play(rounds=0)
    federation, params = played.world.federation, played.start.params
    task = LoopTask(played.world, federation.class_counts(0), {}, 1)
    inputs, labels = federation.examples(federation.train[3])
    padded = Batch(
        torch.cat([inputs, inputs[:2] * 7]), torch.cat([labels, labels[:2]]), torch.tensor([1.0] * 9 + [0.0] * 2)
    )
    assert_close(fisher_diagonal(task, params, padded), fisher_diagonal(task, params, Batch(inputs, labels)))


def test_server_sums_are_those_of_each_clients_latest_upload(play: Any, assert_close: Any) -> None:
    """Σ_j F_j and Σ_j F_j θ_j, θ_j the last local model of each client seen so far, after each of six rounds of two."""
    played = play(method={"name": "fedcurv", "lam": 0.1}, participation=2, rounds=6, loss="wsm")
    latest: dict[int, Tensors] = {}
    seen_again = False
    for uploads, end in zip(played.uploads, played.ends, strict=True):
        seen_again |= any(k in latest for k in uploads)
        latest |= {k: {n: v[0] for n, v in u.params.items()} for k, u in uploads.items()}
        fisher, weighted = zeros_like(played.params), zeros_like(played.params)
        for k, params in latest.items():
            mine = explicit_fisher(played, params, k)
            fisher = {n: v + mine[n] for n, v in fisher.items()}
            weighted = {n: v + mine[n] * params[n] for n, v in weighted.items()}
        assert_close(under_prefix("fisher", end.state.server), fisher, rtol=1e-11)
        assert_close(under_prefix("weighted", end.state.server), weighted, rtol=1e-11)
    assert seen_again
    assert len(latest) > 2


def test_penalty_gradient_is_the_sum_over_the_other_clients(play: Any, assert_close: Any) -> None:
    """∇ λ·Σ_{j≠k} (θ − θ_j)ᵀ diag(F_j) (θ − θ_j) = 2λ·Σ_{j≠k} F_j (θ − θ_j), each client's own share left out."""
    played = play(method={"name": "fedcurv", "lam": 0.3}, participation=3, rounds=3)
    end, method = played.ends[-1], played.world.method
    received = played.received[-1]._replace(server=method.broadcast(end.state.server))
    theta = {n: v + 0.1 * torch.linspace(-1, 1, v.numel()).double().reshape(v.shape) for n, v in played.params.items()}
    nothing = torch.zeros(())
    states = played.states(3)
    for k, state in states.items():
        leaves = {n: v.clone().requires_grad_() for n, v in theta.items()}
        own = Own(Batch(nothing, nothing), nothing, nothing, nothing, state, {})
        found = torch.autograd.grad(method.penalty(leaves, received, own), tuple(leaves.values()))
        expected = zeros_like(theta)
        for j, other in states.items():
            if j != k:
                fisher, weighted = under_prefix("fisher", other), under_prefix("weighted", other)
                expected = {n: v + 2 * 0.3 * (fisher[n] * theta[n] - weighted[n]) for n, v in expected.items()}
        assert_close(dict(zip(leaves, found, strict=True)), expected, rtol=1e-10, atol=1e-13)
