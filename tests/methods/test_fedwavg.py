"""FedWAvg: two rounds by hand, and what it refuses."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from fedretain.config import make_experiment
from fedretain.errors import ConfigError
from fedretain.experiment import build_world
from fedretain.rounds import initial_state


def test_two_clients_by_hand(play: Any, model: Any, assert_close: Any) -> None:
    """One step of η = 5/2·ln 3 a round, α = ½; a: ((1, 0), 0), b: four times ((0, ½), 1).

    Round 1: F = (1, 1), so W = (1, 1) and p = (1/5, 4/5). w_a = η/2·(1, 0; 1), w_b = −η/2·(0, ½; 1), both right about
    their own data; w = η·(1/10, −1/5; −3/10).
    Round 2: at w a's logits differ by 2η·(1/10 − 3/10) = −2η/5 = −ln 3: wrong now, F_a = 1; b's by
    2η·(−1/10 − 3/10) = −4η/5 = −2 ln 3: still right, F_b = 0. W = ½ + ½·2·F/1 = (3/2, 1/2), p·W = (3/10, 4/10), which
    divided by 7/10 is (3/7, 4/7). g_a = (¼ − 1)·(1, 0; 1), g_b = 1/10·(0, ½; 1):
    w ← w + η·(9/28, −1/35; 9/28 − 2/35).
    """
    eta = 5 / 2 * math.log(3)
    a, b, method = [((1, 0), 0)], [((0, 0.5), 1)] * 4, {"name": "fedwavg", "alpha": 0.5}
    end = play(a, b, method=method, rounds=2, local={"lr": eta})
    assert end.rows[0]["clients"]["weight"] == pytest.approx([1 / 5, 4 / 5], rel=1e-14)
    assert end.rows[1]["clients"]["weight"] == pytest.approx([3 / 7, 4 / 7], rel=1e-14)
    u, v, c = 1 / 10 + 9 / 28, -1 / 5 - 1 / 35, -3 / 10 + 9 / 28 - 2 / 35
    assert_close(end.params, model(eta * u, eta * v, eta * c))
    assert [state["count"].item() for state in end.clients.values()] == [1, 0]


def test_counts_stand_between_periods(play: Any) -> None:
    """The same two rounds with period 3: round 2 does not count, so both F are still 1 and the weights by examples."""
    method = {"name": "fedwavg", "alpha": 0.5, "period": 3}
    end = play([((1, 0), 0)], [((0, 0.5), 1)] * 4, method=method, rounds=2, local={"lr": 5 / 2 * math.log(3)})
    assert end.rows[1]["clients"]["weight"] == pytest.approx([1 / 5, 4 / 5], rel=1e-14)


@pytest.mark.parametrize("alpha", [1.0, 1.5, -0.1, float("nan")])
def test_alpha_out_of_range_is_refused(alpha: float, refused: Any) -> None:
    assert "method.alpha" in refused(method={"name": "fedwavg", "alpha": alpha})


@pytest.mark.parametrize("period", [0, -1, 1.5])
def test_period_out_of_range_is_refused(period: Any, refused: Any) -> None:
    assert "method.period" in refused(method={"name": "fedwavg", "alpha": 0.1, "period": period})


@pytest.mark.parametrize("chained", [False, True])
def test_a_frozen_classifier_must_exist(chained: bool) -> None:
    """A model whose last layer has another name."""
    fedwavg = {"name": "fedwavg", "alpha": 0.1, "freeze_classifier": True}
    experiment = make_experiment({"method": ["fedavg", fedwavg] if chained else fedwavg})
    world = build_world(experiment)
    initial_state(experiment, world)
    headless = replace(world, model=nn.Sequential(nn.Flatten(), nn.Linear(64, 10)).to(torch.float32))
    with pytest.raises(ConfigError, match="freeze_classifier needs a model whose last layer is called classifier"):
        initial_state(experiment, headless)
