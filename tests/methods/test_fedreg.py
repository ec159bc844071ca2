"""FedReg: a step by hand, and what it refuses."""

from __future__ import annotations

import math
from typing import Any

import pytest

METHOD = {"name": "fedreg", "gamma": 0.4, "eta_s": 0.5, "eta_p": 1.0, "ascent_steps": 2}


@pytest.mark.parametrize("gamma", [0.0, 0.4, 1.0])
def test_two_clients_by_hand(gamma: float, play: Any, model: Any, assert_close: Any) -> None:
    """One step of η = 4 ln 3 from w = (r, 0; 0), r = ln 3/2; E = 2, η_s = ½, η_p = 1.

    a holds ((1, 0), 0), b twice ((0, 1), 1). In the first step θ = w, so γ does not matter. Inner products count both
    rows, hence the factors 2.

    a: ∇_x L points along −(1, 0), so x_s = (0, 0) with y_s = (½, ½), and x_p = (−1, 0). p₀ = ¾ at w:
    θ = (r + η/4, 0; η/4), θ_β = (r + η/8, 0; η/8). At x_s the logits differ by η/4 = ln 3: g_s = (¾ − ½)·(0, 0; 1),
    w_s = (2·η/4·¼)/(2/16) = η, θ − w_s g_s = (r + η/4, 0; 0). At x_p they differ by −2r = −ln 3:
    g_p = (¼ − 1)·(−1, 0; 1), w_p = (2·η/4·¾)/(2·2·9/16) = η/6, w_p g_p = η/8·(1, 0; −1): θ_a = (r + η/8, 0; η/8).

    b: p₀ = ½ at w, ∇_x L points along (1, 0): x_s = (1, 1) with y_s = (¾, ¼), x_p = (2, 1).
    θ = (r, −η/2; −η/2), θ_β = (r, −η/4; −η/4). At x_s the logits differ by ln 3 − η = −3 ln 3: p₀ = 1/28,
    g_s = (1/28 − 3/4)·(1, 1; 1) = −5/7·(1, 1; 1), w_s = (2·η·5/7)/(2·3·25/49) = 7η/15, w_s g_s = −η/3·(1, 1; 1),
    θ − w_s g_s = (r + η/3, −η/6; −η/6). At x_p they differ by 2 ln 3 − η = −2 ln 3: g_p = 1/10·(2, 1; 1),
    w_p = (2·(2/3 − 1/6 − 1/6)·η/10)/(2·6/100) = 5η/9, w_p g_p = η/18·(2, 1; 1): θ_b = (r + 2η/9, −2η/9; −2η/9).

    The plain mean, although b has twice the examples: (r + 25η/144, −η/9; −7η/144).
    """
    eta, r = 4 * math.log(3), math.log(3) / 2
    end = play([((1, 0), 0)], [((0, 1), 1)] * 2, (r, 0, 0), method={**METHOD, "gamma": gamma}, local={"lr": eta})
    assert_close(end.params, model(r + 25 * eta / 144, -eta / 9, -7 * eta / 144))
    assert end.rows[0]["clients"]["weight"] == [0.5, 0.5]


def test_a_correction_that_would_help_forgetting_is_not_made(play: Any, model: Any, assert_close: Any) -> None:
    """max(…, 0): with η_p = ¼ client a has x_p = (½, 0), where θ_β's logits differ by r + 3η/8 = 2 ln 3 and
    g_p = (9/10 − 1)·(½, 0; 1). θ − w_s g_s − w = (η/4, 0; 0) has a negative product with it: w_p = 0, not −η.

    Both clients are a here, so the mean is θ_a = (r + η/4, 0; 0).
    """
    eta, r = 4 * math.log(3), math.log(3) / 2
    end = play([((1, 0), 0)], [((1, 0), 0)], (r, 0, 0), method={**METHOD, "eta_p": 0.25}, local={"lr": eta})
    assert_close(end.params, model(r + eta / 4, 0, 0))


@pytest.mark.parametrize("loss", ["wsm", "tce"])
def test_a_gradient_of_zero_has_no_projection(loss: str, play: Any, model: Any, assert_close: Any) -> None:
    """A client of one class has a WSM and TCE gradient of exactly 0, with MG 0/0 as well: nothing moves, no NaN."""
    method = {**METHOD, "modified_gradient": True}
    end = play([((1, 0), 0)], [((0, 1), 1)], (0.3, 0.1, 0.2), method=method, loss=loss, local={"lr": 0.5, "steps": 3})
    assert_close(end.params, model(0.3, 0.1, 0.2))


@pytest.mark.parametrize(
    ("local", "reason"),
    [
        ({"momentum": 0.9}, "local.momentum would have no effect"),
        ({"weight_decay": 1e-4}, "local.weight_decay would have no effect"),
        ({"optimizer": "adam"}, "use local.optimizer: sgd, not adam"),
        ({"optimizer": "adamw"}, "use local.optimizer: sgd, not adamw"),
    ],
)
def test_an_optimiser_that_would_not_be_used_is_refused(local: dict[str, Any], reason: str, refused: Any) -> None:
    for method in (METHOD, [METHOD, {"name": "fedwavg", "alpha": 0.1}]):
        message = refused(method=method, local=local)
        assert "fedreg takes its own plain SGD steps" in message
        assert reason in message


@pytest.mark.parametrize(
    "change",
    [
        {"gamma": 1.1},
        {"gamma": -0.1},
        {"gamma": float("nan")},
        {"eta_s": -1},
        {"eta_p": -1},
        {"ascent_steps": 0},
        {"pseudo_weight": -1},
        {"perturbed_weight": float("inf")},
    ],
)
def test_hyper_parameters_out_of_range_are_refused(change: dict[str, Any], refused: Any) -> None:
    (key,) = change
    assert f"method.{key}" in refused(method={**METHOD, **change})
