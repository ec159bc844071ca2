"""FedNova: ‖a‖₁ against the optimiser itself, and the aggregation against its equation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch

from fedretain.methods import FedNova, Method, chain
from fedretain.optimizers import SGD


def accumulated(steps: int, lr: float, momentum: float = 0.0, mu: float = 0.0) -> float:
    """‖a‖₁ by brute force: the j-th gradient is the j-th unit vector, so that w_0 − w_τ = η·a entry by entry.

    The proximal term adds μ·(w − w_0) to every gradient, w_0 = 0.
    """
    optimizer, params = SGD(momentum), {"w": torch.zeros(steps, dtype=torch.float64)}
    memory = optimizer.init(params)
    for step, unit in enumerate(torch.eye(steps, dtype=torch.float64)):
        params, memory = optimizer.update(params, {"w": unit + mu * params["w"]}, memory, lr, step)
    return float((params["w"] / lr).abs().sum())


@pytest.mark.parametrize(
    ("methods", "local", "optimiser"),
    [
        (["fednova"], {}, {}),
        (["fednova"], {"momentum": 0.9}, {"momentum": 0.9}),
        (["fednova"], {"momentum": 0.3}, {"momentum": 0.3}),
        (["fednova", {"name": "fedprox", "mu": 0.5}], {}, {"mu": 0.5}),
        ([{"name": "fedprox", "mu": 5.0}, "fednova"], {}, {"mu": 5.0}),
    ],
)
def test_norm_is_the_weight_that_the_optimiser_gives_to_the_gradients(
    play: Any, methods: Any, local: Any, optimiser: Any
) -> None:
    """23, 17, 12, 9 and 5 examples in batches of 6, three epochs: 12, 9, 6, 6 and 3 steps. Round 2 has η = 0.2·0.8."""
    played = play(method=methods, local={"epochs": 3, "lr_decay": 0.8, **local}, rounds=2)
    steps = played.rows[1]["clients"]["steps"]
    assert steps == [12, 9, 6, 6, 3]
    name = "norm" if len(methods) == 1 else "fednova/norm"
    for k, upload in played.uploads[1].items():
        expected = accumulated(steps[k], 0.2 * 0.8, **optimiser)
        assert float(upload.extras[name]) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_aggregation_is_the_papers_equation(play: Any, assert_close: Any, momentum: float) -> None:
    """w ← w − τ_eff·Σ p_k (w − w_k)/‖a_k‖₁, τ_eff = Σ p_k ‖a_k‖₁, from the local models themselves."""
    played = play(method="fednova", participation=3, local={"momentum": momentum})
    for received, uploads, end, row in zip(played.received, played.uploads, played.ends, played.rows, strict=True):
        sizes = {k: len(played.world.federation.train[k]) for k in uploads}
        p = {k: n / sum(sizes.values()) for k, n in sizes.items()}
        steps = dict(zip(uploads, row["clients"]["steps"], strict=True))
        norm = {k: accumulated(steps[k], 0.2, momentum) for k in uploads}
        effective = sum(p[k] * norm[k] for k in uploads)
        expected = {
            n: w - effective * sum(p[k] * (w - u.params[n][0]) / norm[k] for k, u in uploads.items())
            for n, w in received.params.items()
        }
        assert_close(end.state.params, expected)


@dataclass(frozen=True)
class Still(Method):
    """A client that does not move."""

    def direction(self, gradient, params, received, own):
        return {name: torch.zeros_like(value) for name, value in gradient.items()}


def test_nobody_moved_then_the_model_does_not_move(play: Any, assert_same_bits: Any) -> None:
    """Normalised *changes* are averaged: models would be scaled by τ_eff·Σ p_k/‖a_k‖₁ ≠ 1."""
    played = play(use=chain(FedNova(), Still()))
    assert len(set(played.rows[0]["clients"]["steps"])) > 1
    assert_same_bits(played.params, played.start.params)
