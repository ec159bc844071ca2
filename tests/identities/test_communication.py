"""What a method sends, from the bytes that the metrics report."""

from __future__ import annotations

from typing import Any

import pytest

FEDPROX = {"name": "fedprox", "mu": 0.1}
FEDCURV = {"name": "fedcurv", "lam": 0.1}
FEDWAVG = {"name": "fedwavg", "alpha": 0.1}
FEDREG = {"name": "fedreg", "gamma": 0.5, "eta_s": 0.1, "ascent_steps": 1}

MODEL = (6 * 5 + 5 + 5 * 4 + 4) * 8
"""Bytes of the 6-5-4 network in float64."""


@pytest.mark.parametrize(
    ("method", "up", "down"),
    [
        ("fedavg", MODEL, MODEL),
        ("fedsgd", MODEL, MODEL),
        (FEDPROX, MODEL, MODEL),
        (FEDREG, MODEL, MODEL),
        ("scaffold", 2 * MODEL, 2 * MODEL),
        ({"name": "scaffold", "option": "I"}, 2 * MODEL, 2 * MODEL),
        (FEDCURV, 3 * MODEL, 3 * MODEL),
        ("fednova", MODEL + 8, MODEL),
        (FEDWAVG, MODEL + 4, MODEL),
        (["scaffold", FEDCURV], 4 * MODEL, 4 * MODEL),
        (["scaffold", FEDWAVG, "fednova"], 2 * MODEL + 4 + 8, 2 * MODEL),
    ],
)
def test_bytes_of_a_round(play: Any, method: Any, up: int, down: int) -> None:
    """SCAFFOLD adds c_k and c, FedCurv two sums of the model's size, FedNova and FedWAvg one number; three clients."""
    for row in play(method=method, participation=3, rounds=2).rows:
        assert row["upload_bytes"] == 3 * up
        assert row["download_bytes"] == 3 * down
