"""SCAFFOLD: two rounds by hand, and what it refuses."""

from __future__ import annotations

import math
from typing import Any

import pytest


@pytest.mark.parametrize("option", ["I", "II"])
def test_two_clients_by_hand(option: str, play: Any, model: Any, assert_close: Any) -> None:
    """One step of η = ln 3 a round, so that both options give c_k⁺ = g; a: ((1, 0), 0), b: twice ((0, 1), 1).

    Round 1: c = c_k = 0. g_a = −½·(1, 0; 1) = c_a, g_b = ½·(0, 1; 1) = c_b, c = (c_a + c_b)/2 = (−¼, ¼; 0) (K = 2,
    not by examples). w = −η·(g_a + 2·g_b)/3 = η·(1/6, −1/3; −1/6).
    Round 2: a's logits differ by 2η·(1/6 − 1/6) = 0, so g_a = −½·(1, 0; 1) again; b's by 2η·(−1/3 − 1/6) = −ln 3, so
    p₀ = ¼ and g_b = ¼·(0, 1; 1).
    a: g_a − c_a + c = (−¼, ¼; 0). b: g_b − c_b + c = (−¼, 0; −¼).
    w ← w − η·(−1/12 − 1/6, 1/12; −1/6) = η·(1/6 + 1/4, −1/3 − 1/12; −1/6 + 1/6) = η·(5/12, −5/12; 0).
    c_a = (−½, 0; −½), c_b = (0, ¼; ¼), c = (−¼, ⅛; −⅛).
    """
    eta = math.log(3)
    end = play(
        [((1, 0), 0)],
        [((0, 1), 1)] * 2,
        method={"name": "scaffold", "option": option},
        rounds=2,
        local={"lr": eta},
    )
    assert_close(end.params, model(5 * eta / 12, -5 * eta / 12, 0))
    assert_close(end.clients[0], model(-1 / 2, 0, -1 / 2))
    assert_close(end.clients[1], model(0, 1 / 4, 1 / 4))
    assert_close(end.server, model(-1 / 4, 1 / 8, -1 / 8))


@pytest.mark.parametrize(
    ("local", "used"),
    [
        ({"momentum": 0.9}, "sgd with momentum 0.9"),
        ({"momentum": 0.5, "nesterov": True}, "sgd with momentum 0.5"),
        ({"optimizer": "adam"}, "adam"),
        ({"optimizer": "adamw"}, "adamw"),
    ],
)
def test_option_2_with_another_optimiser_is_refused(local: dict[str, Any], used: str, refused: Any) -> None:
    message = refused(method="scaffold", local=local)
    assert f"option II computes c_k from (w − y)/(τ·η), which holds only for plain SGD, not for {used}" in message
    assert "use option: I" in message
    assert message == refused(method=["fedavg", "scaffold"], local=local)


@pytest.mark.parametrize("local", [{"momentum": 0.9}, {"optimizer": "adam", "lr": 0.01}])
def test_option_1_goes_with_any_optimiser(local: dict[str, Any], play: Any, model: Any, assert_close: Any) -> None:
    """c_k is the gradient at the received model (zero here), whatever the optimiser made of it: −½·(1, 0; 1) on a."""
    end = play([((1, 0), 0)], [((0, 1), 1)], method={"name": "scaffold", "option": "I"}, local={"steps": 3, **local})
    assert_close(end.clients[0], model(-1 / 2, 0, -1 / 2))


def test_unknown_option_is_refused(refused: Any) -> None:
    assert "method.option" in refused(method={"name": "scaffold", "option": "III"})
