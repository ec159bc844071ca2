"""FedNova: a round by hand with unequal steps, and what it refuses."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fedretain.config import LocalSettings
from fedretain.errors import ConfigError
from fedretain.methods import Batch, FedNova, FedProx, Own, Received, chain

A, B = [((1, 0), 0)], [((0, 1), 1), ((0, 1), 1)]
ETA = math.log(3) / 2


def test_two_clients_by_hand(play: Any, model: Any, assert_close: Any) -> None:
    """One epoch of single examples, η = ln 3/2, from zero: τ_a = 1, τ_b = 2.

    w_a = η/2·(1, 0; 1). b: −η/2·(0, 1; 1), where p₀ = ¼, then −η/4·(0, 1; 1) more: w_b = −¾η·(0, 1; 1).
    p = (1/3, 2/3): τ_eff = 1/3 + 4/3 = 5/3; Σ p_k w_k/τ_k = η·(1/6, −1/4; 1/6 − 1/4).
    w = 5/3·η·(1/6, −1/4; −1/12) = η·(5/18, −5/12; −5/36).
    """
    end = play(A, B, method="fednova", local={"lr": ETA, "steps": None, "epochs": 1, "batch_size": 1})
    assert_close(end.params, model(5 * ETA / 18, -5 * ETA / 12, -5 * ETA / 36))


def test_two_clients_with_momentum_by_hand(play: Any, model: Any, assert_close: Any) -> None:
    """ρ = ½: a moves by η/2·(1, 0; 1) with ‖a‖₁ = 1. b's second velocity is ½·½ + ¼ = ½: w_b = −η·(0, 1; 1).

    ‖a_b‖₁ = (2 − ½·(1 − ¼)/½)/½ = (2 − ¾)·2 = 5/2: the first gradient counts 1 + ½, the second 1.
    τ_eff = 1/3 + 2/3·5/2 = 2; Σ p_k w_k/‖a_k‖₁ = η·(1/6, −4/15; −1/10); w = η·(1/3, −8/15; −1/5).
    """
    local = {"lr": ETA, "momentum": 0.5, "steps": None, "epochs": 1, "batch_size": 1}
    end = play(A, B, method="fednova", local=local)
    assert_close(end.params, model(ETA / 3, -8 * ETA / 15, -ETA / 5))


def test_two_clients_with_a_proximal_term_by_hand(play: Any, model: Any, assert_close: Any) -> None:
    """μ = 1/(2η), so ημ = ½: w_a = η/2·(1, 0; 1); b's second gradient is (¼ − μ·η/2)·(0, 1; 1) = 0.

    w_b = −η/2·(0, 1; 1);     ‖a_a‖₁ = 1, ‖a_b‖₁ = 1 + ½ = 3/2; τ_eff = 1/3 + 1 = 4/3;
    Σ p_k w_k/‖a_k‖₁ = η·(1/6, −2/9; −1/18); w = η·(2/9, −8/27; −2/27).
    """
    method = ["fednova", {"name": "fedprox", "mu": 1 / (2 * ETA)}]
    end = play(A, B, method=method, local={"lr": ETA, "steps": None, "epochs": 1, "batch_size": 1})
    assert_close(end.params, model(2 * ETA / 9, -8 * ETA / 27, -2 * ETA / 27))


@pytest.mark.parametrize(
    ("method", "local", "used"),
    [
        (["fednova"], {"optimizer": "adam"}, "adam"),
        (["fednova"], {"optimizer": "adamw"}, "adamw"),
        (["fednova"], {"momentum": 0.9, "nesterov": True}, "Nesterov momentum"),
        (["fednova", {"name": "fedprox", "mu": 0.1}], {"momentum": 0.9}, "momentum together with a proximal term"),
        ([{"name": "fedprox", "mu": 0.1}, "fednova"], {"momentum": 0.9}, "momentum together with a proximal term"),
    ],
)
def test_an_optimiser_whose_norm_is_unknown_is_refused(method: Any, local: Any, used: str, refused: Any) -> None:
    assert f"‖a‖₁ of the local optimiser, which is not known for {used}" in refused(method=method, local=local)


def test_a_proximal_term_that_overshoots_is_refused(refused: Any) -> None:
    """ημ = 2: the weights (1 − ημ)^j are 1, −1, 1, …; their sum over an even number of steps is 0."""
    message = refused(method=["fednova", {"name": "fedprox", "mu": 4.0}], local={"lr": 0.5})
    assert "needs η·μ ≤ 1" in message
    assert "0.5 times μ 4 is 2" in message
    chained = chain(FedNova(), FedProx(2.0))
    chained.check(LocalSettings(lr=0.5))


def test_a_proximal_term_that_is_not_there_is_refused(refused: Any) -> None:
    """Only a chain with FedProx puts the term into the objective; ‖a‖₁ alone must not pretend it is there."""
    message = "fednova.proximal is 0.2, but the proximal term beside it has μ = "
    assert message + "0;" in refused(method={"name": "fednova", "proximal": 0.2})
    other = refused(method=[{"name": "fednova", "proximal": 0.2}, {"name": "fedprox", "mu": 0.1}])
    assert message + "0.1;" in other
    with pytest.raises(ConfigError, match="proximal"):
        FedNova(proximal=-1.0)
    same = chain(FedNova(proximal=0.1), FedProx(0.1))
    assert same == chain(FedNova(), FedProx(0.1))


@pytest.mark.parametrize("local", [{}, {"momentum": 0.9}])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_model_keeps_its_type(dtype: torch.dtype, local: dict[str, float]) -> None:
    """‖a‖₁ is of the model's own type: a float64 number would make float64 of a parameter that is a single float32."""
    params = {"scale": torch.ones((), dtype=dtype), "bias": torch.ones(2, dtype=dtype)}
    number = torch.tensor(3)
    own = Own(Batch(torch.zeros(1), torch.zeros(1)), torch.ones(2), number, number, {}, {})
    task: Any = SimpleNamespace(lr=0.1, local=LocalSettings(**local))
    received = Received(params, {}, {}, 1)
    sent = FedNova().upload(params, received, own, task) | FedNova().finish(params, received, own, task)[1]
    assert {value.dtype for value in sent.values()} == {dtype}
