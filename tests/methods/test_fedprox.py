"""FedProx: two local steps by hand, and what it refuses."""

from __future__ import annotations

import math
from typing import Any

import pytest


@pytest.mark.parametrize("mu", [0.0, 0.5, 2.0])
def test_two_clients_by_hand(mu: float, play: Any, model: Any, assert_close: Any) -> None:
    """Two full-batch steps of η = ln 3/2 from zero; a holds ((1, 0), 0), b twice ((0, 1), 1).

    Step 1: w_a = η/2·(1, 0; 1); the penalty's gradient is 0. Step 2: the logits of a's example differ by 2·(η/2 + η/2)
    = ln 3, so p₀ = ¾ and the gradient is −¼·(1, 0; 1) + μ·η/2·(1, 0; 1): w_a = s·(1, 0; 1) with s = η/2 + η/4 − μη²/2.
    b mirrors it: w_b = −s·(0, 1; 1). w = w_a/3 + 2·w_b/3 = s·(1/3, −2/3; −1/3).
    """
    eta = math.log(3) / 2
    s = 3 * eta / 4 - mu * eta**2 / 2
    method = {"name": "fedprox", "mu": mu}
    end = play([((1, 0), 0)], [((0, 1), 1)] * 2, method=method, local={"lr": eta, "steps": 2})
    assert_close(end.params, model(s / 3, -2 * s / 3, -s / 3))


@pytest.mark.parametrize("mu", [-0.1, float("nan"), float("inf"), "much", True])
def test_mu_out_of_range_is_refused(mu: Any, refused: Any) -> None:
    assert "method.mu" in refused(method={"name": "fedprox", "mu": mu})


def test_mu_must_be_given(refused: Any) -> None:
    assert "method.mu" in refused(method="fedprox")
