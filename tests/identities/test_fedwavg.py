"""FedWAvg: the counts against old local models kept here, and the weights against the paper's lines 14 and 15."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.func import functional_call

import fedretain
from fedretain.methods import FedWAvg
from fedretain.tensors import Tensors


def correct(played: Any, params: Tensors, client: int) -> torch.Tensor:
    inputs, labels = played.world.federation.examples(played.world.federation.train[client])
    return functional_call(played.world.model, params, (inputs,)).argmax(-1) == labels


@pytest.mark.parametrize("period", [1, 2, 3])
@pytest.mark.parametrize("participation", [1.0, 3])
def test_counts_and_weights(play: Any, period: int, participation: Any) -> None:
    """Old local models are kept here, as the client must not; eight rounds.

    F starts at 1. In every ``period``-th round a client that has trained before counts the examples that its last
    local model had right and the received model has wrong; otherwise its last count stands. N is the cohort's size.
    """
    alpha = 0.6
    played = play(
        method={"name": "fedwavg", "alpha": alpha, "period": period},
        participation=participation,
        rounds=8,
        local={"epochs": 4, "lr": 0.5},
    )
    known: dict[int, Tensors] = {}
    counts = dict.fromkeys(range(5), 1)
    seen: set[int] = set()
    for received, uploads, row in zip(played.received, played.uploads, played.rows, strict=True):
        for k, upload in uploads.items():
            if k in known and received.round % period == 0:
                counts[k] = int((correct(played, known[k], k) & ~correct(played, received.params, k)).sum())
            assert upload.extras.keys() == {"count"}
            assert upload.extras["count"].shape == (1,)
            assert int(upload.extras["count"]) == counts[k]
            known[k] = {n: v[0] for n, v in upload.params.items()}
            seen.add(counts[k])
        f = np.array([counts[k] for k in uploads], dtype=float)
        p = np.array([len(played.world.federation.train[k]) for k in uploads], dtype=float)
        weights = p * ((1 - alpha) + alpha * len(f) * f / f.sum() if f.sum() else 1)
        np.testing.assert_allclose(row["clients"]["weight"], weights / weights.sum(), rtol=1e-13)
    assert len(seen) > 2


def test_model_is_the_weighted_mean(play: Any, assert_close: Any) -> None:
    """w ← Σ p_k W_k w_k / Σ p_k W_k with the weights that the metrics report."""
    played = play(method={"name": "fedwavg", "alpha": 0.7}, rounds=4, local={"epochs": 4, "lr": 0.5})
    for uploads, end, row in zip(played.uploads, played.ends, played.rows, strict=True):
        weights = row["clients"]["weight"]
        mean = {
            n: sum(w * u.params[n][0] for w, u in zip(weights, uploads.values(), strict=True)) for n in end.state.params
        }
        assert_close(end.state.params, mean, rtol=1e-11, atol=1e-13)


def weigh(alpha: float, weights: list[float], counts: list[float]) -> list[float]:
    extras = {"count": torch.tensor(counts)}
    found: list[float] = FedWAvg(alpha=alpha).weigh(torch.tensor(weights, dtype=torch.float64), extras).tolist()
    return found


@pytest.mark.parametrize("counts", [[4.0, 4.0, 4.0], [0.0, 0.0, 0.0], [1.0, 1.0, 1.0]])
def test_equal_counts_even_zero_are_fedavg(counts: list[float]) -> None:
    """F_k = f > 0: W = (1 − α) + α·3·f/(3f) = 1. ΣF = 0: W = 1 by definition."""
    assert weigh(0.8, [0.5, 0.3, 0.2], counts) == pytest.approx([0.5, 0.3, 0.2], rel=1e-14)


def test_weights_by_hand() -> None:
    """α = ½, F = (3, 1, 0), ΣF = 4: W = ½ + ½·3·F/4 = (13/8, 7/8, 1/2).

    p = (1/5, 2/5, 2/5): p·W = (13/40, 14/40, 8/40), divided by 35/40.
    """
    assert weigh(0.5, [0.2, 0.4, 0.4], [3, 1, 0]) == pytest.approx([13 / 35, 14 / 35, 8 / 35], rel=1e-14)


def test_equal_sizes_are_line_15_of_the_paper(play: Any, assert_close: Any) -> None:
    """θ_g ← (1/N)·Σ θ_n·W[n], not divided by ΣW: with equal sizes ΣW = N. Four clients of twelve examples."""
    rng = np.random.default_rng(3)
    owners = np.repeat(np.arange(4), 12)
    labels = np.where(rng.random(48) < 0.7, owners, rng.integers(0, 4, 48))
    inputs = (rng.normal(size=(48, 6)) + np.eye(4, 6)[labels]).astype(np.float32)
    names = owners.astype(str)
    data = fedretain.from_arrays(inputs, labels, inputs, labels, columns={"owner": (names, names)})
    alpha = 0.3
    played = play(data, method={"name": "fedwavg", "alpha": alpha}, rounds=5, local={"epochs": 5, "lr": 0.5})
    unequal = False
    for uploads, end in zip(played.uploads, played.ends, strict=True):
        f = np.array([float(u.extras["count"]) for u in uploads.values()])
        w = (1 - alpha) + alpha * (f / f.sum() * 4) if f.sum() else np.ones(4)
        unequal |= len(set(f)) > 1
        paper = {n: sum(w[i] * u.params[n][0] for i, u in enumerate(uploads.values())) / 4 for n in end.state.params}
        assert_close(end.state.params, paper, rtol=1e-11, atol=1e-13)
    assert unequal


def test_frozen_classifier_keeps_its_bits_and_the_rest_learns(play: Any) -> None:
    keys = {"local": {"momentum": 0.9, "weight_decay": 0.01}}
    played = play(method={"name": "fedwavg", "alpha": 0.3, "freeze_classifier": True}, **keys)
    for name, value in played.params.items():
        assert torch.equal(value, played.start.params[name]) == name.startswith("classifier.")


def test_only_correctness_bits_and_the_count_are_kept_on_the_client(play: Any) -> None:
    played = play(method={"name": "fedwavg", "alpha": 0.3})
    for k, state in played.states(3).items():
        assert set(state) == {"count", "known", "correct"}
        assert state["correct"].dtype == torch.bool
        # A whole number: kept real numbers may be rounded to half precision, where 257 is 256.
        assert state["count"].dtype == torch.int32
        assert torch.equal(
            state["correct"], correct(played, {n: v[0] for n, v in played.uploads[-1][k].params.items()}, k)
        )
