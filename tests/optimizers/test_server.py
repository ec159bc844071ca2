"""Server optimisers: two steps of Reddi et al. 2020, Algorithm 2, by hand on a single number."""

from __future__ import annotations

import math

import pytest
import torch

from fedretain.optimizers import ServerOptimizer


def two_steps(optimizer: ServerOptimizer) -> float:
    params = {"w": torch.tensor(1.0, dtype=torch.float64)}
    state = optimizer.init(params)
    for change in (0.5, -0.25):
        params, state = optimizer.update(params, {"w": torch.tensor(change, dtype=torch.float64)}, state)
    return params["w"].item()


def test_sgd() -> None:
    """w = 1 + 2·0.5 + 2·(−0.25) = 1.5."""
    assert two_steps(ServerOptimizer("sgd", lr=2.0)) == pytest.approx(1.5, abs=1e-15)


def test_momentum() -> None:
    """m₁ = 0.5, w = 1.5; m₂ = 0.9·0.5 − 0.25 = 0.2, w = 1.7."""
    assert two_steps(ServerOptimizer("momentum", momentum=0.9)) == pytest.approx(1.7, abs=1e-15)


@pytest.mark.parametrize("rule", ["adam", "yogi", "adagrad"])
def test_adaptive(rule: str) -> None:
    """β₁ = 0.9, β₂ = 0.99, τ = 0.1, v₀ = τ² = 0.01, m₁ = 0.05, m₂ = 0.045 − 0.025 = 0.02.

    adam:    v₁ = 0.0099 + 0.0025 = 0.0124;           v₂ = 0.99·0.0124 + 0.01·0.0625 = 0.012901.
    yogi:    v₁ = 0.01 − 0.01·0.25·sign(0.01 − 0.25) = 0.0125; v₂ = 0.0125 + 0.01·0.0625 = 0.013125.
    adagrad: v₁ = 0.26;                               v₂ = 0.3225.
    w = 1 + m₁/(√v₁ + τ) + m₂/(√v₂ + τ).
    """
    v1, v2 = {"adam": (0.0124, 0.012901), "yogi": (0.0125, 0.013125), "adagrad": (0.26, 0.3225)}[rule]
    expected = 1 + 0.05 / (math.sqrt(v1) + 0.1) + 0.02 / (math.sqrt(v2) + 0.1)
    assert two_steps(ServerOptimizer(rule, tau=0.1)) == pytest.approx(expected, abs=1e-14)


def test_no_change_moves_nothing() -> None:
    params = {"w": torch.tensor([1.0, 2.0])}
    for rule in ("sgd", "momentum", "adam", "yogi", "adagrad"):
        optimizer = ServerOptimizer(rule)
        moved, _ = optimizer.update(params, {"w": torch.zeros(2)}, optimizer.init(params))
        assert torch.equal(moved["w"], params["w"])
