"""FedCurv: two rounds by hand, and what it refuses."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from fedretain.tensors import under_prefix


@pytest.mark.parametrize("lam", [0.0, 0.5, 3.0])
def test_two_clients_by_hand(lam: float, play: Any, model: Any, assert_close: Any) -> None:
    """One step of η = ln 3/2 a round; a: ((1, 0), 0), b: twice ((0, 1), 1).

    Round 1: θ_a = η/2·(1, 0; 1), θ_b = −η/2·(0, 1; 1), w = η·(1/6, −1/3; −1/6). At θ_a the softmax of a's example is
    (¾, ¼), its gradient ∓¼ on both rows: F_a = 1/16 on the first column and the bias; F_b = 1/16 on the second column
    and the bias. ΣF = 1/16 everywhere on the weights and 1/8 on the bias; ΣFθ = η/32·(1, −1; 0).
    Round 2: a's logits differ by 0 at w: g_a = −½·(1, 0; 1). b's by −η: p₀ = 1/(1 + √3) = (√3 − 1)/2 = q,
    g_b = q·(0, 1; 1). The penalty of a is that of b's θ_b: 2λ/16·(w − θ_b) on the second column and the bias,
    λ/8·(0, −η/3 + η/2; −η/6 + η/2) = λη·(0, 1/48; 1/24). That of b: λ/8·(η/6 − η/2, 0; −η/6 − η/2)
    = −λη·(1/24, 0; 1/12).
    w ← w − η·(g_a + penalty)/3 − 2η·(g_b + penalty)/3.
    """
    eta, q = math.log(3) / 2, (math.sqrt(3) - 1) / 2
    a, b, method = [((1, 0), 0)], [((0, 1), 1)] * 2, {"name": "fedcurv", "lam": lam}
    first = play(a, b, method=method, local={"lr": eta})
    column, bias = torch.full((2, 2), 1 / 16).double(), torch.full((2,), 1 / 8).double()
    assert_close(under_prefix("fisher", first.server), {"classifier.weight": column, "classifier.bias": bias})
    assert_close(under_prefix("weighted", first.server), model(eta / 32, -eta / 32, 0))

    penalty = lam * eta
    u = 1 / 6 - (-1 / 2) / 3 - 2 * (-penalty / 24) / 3
    v = -1 / 3 - (penalty / 48) / 3 - 2 * q / 3
    c = -1 / 6 - (-1 / 2 + penalty / 24) / 3 - 2 * (q - penalty / 12) / 3
    second = play(a, b, method=method, rounds=2, local={"lr": eta})
    assert_close(second.params, model(eta * u, eta * v, eta * c))


def test_fisher_is_taken_example_by_example(play: Any) -> None:
    """b holds ((0, 1), 0) and ((0, 1), 1): its mean gradient at zero is 0, so it does not move, but each example's is
    ±½ on the second column and the bias: F_b = ¼ there. A squared batch mean would be 0.
    """
    end = play([((1, 0), 0)], [((0, 1), 0), ((0, 1), 1)], method={"name": "fedcurv", "lam": 1.0}, local={"lr": 0.1})
    fisher = under_prefix("fisher", end.clients[1])
    assert fisher["classifier.weight"].tolist() == [[0, 0.25], [0, 0.25]]
    assert fisher["classifier.bias"].tolist() == [0.25, 0.25]
    assert not any(value.any() for value in under_prefix("weighted", end.clients[1]).values())


@pytest.mark.parametrize("lam", [float("nan"), -1.0, float("inf"), None])
def test_lambda_out_of_range_is_refused(lam: Any, refused: Any) -> None:
    assert "method.lam" in refused(method={"name": "fedcurv", "lam": lam})
