"""Every method has a setting in which it is FedAvg."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fedretain.optimizers import ServerOptimizer
from fedretain.tensors import add

UNIFORM = {"server": {"weights": "uniform"}}


@pytest.mark.parametrize(
    ("method", "local"),
    [
        ({"name": "fedprox", "mu": 0.0}, {}),
        ({"name": "fedprox", "mu": 0.0}, {"momentum": 0.9, "weight_decay": 1e-3}),
        ({"name": "fedprox", "mu": 0.0}, {"optimizer": "adam", "lr": 0.01}),
        ({"name": "fedcurv", "lam": 0.0}, {}),
        ({"name": "fedcurv", "lam": 0.0}, {"momentum": 0.9}),
    ],
)
def test_no_penalty_is_fedavg_bit_for_bit(play: Any, assert_same_bits: Any, method: Any, local: Any) -> None:
    """The penalty's gradient is 0·(…), and g + 0 has the bits of g."""
    keys = {"participation": 3, "loss": "wsm", "local": local}
    assert_same_bits(play(method=method, **keys).params, play(method="fedavg", **keys).params)


@pytest.mark.parametrize("option", ["I", "II"])
def test_first_round_of_scaffold_is_fedavg_bit_for_bit(play: Any, assert_same_bits: Any, option: str) -> None:
    """c_k = c = 0, so g − c_k + c = g; from the second round on it is another method."""
    scaffold = play(method={"name": "scaffold", "option": option})
    fedavg = play(method="fedavg")
    assert_same_bits(scaffold.ends[0].state.params, fedavg.ends[0].state.params)
    assert not torch.equal(scaffold.params["classifier.weight"], fedavg.params["classifier.weight"])


@pytest.mark.parametrize(
    ("local", "prox"),
    [({}, []), ({"momentum": 0.8}, []), ({"weight_decay": 0.01}, []), ({}, [{"name": "fedprox", "mu": 0.7}])],
)
def test_fednova_with_equally_many_steps_is_fedavg(play: Any, assert_close: Any, local: Any, prox: list[Any]) -> None:
    """Equal ‖a_k‖₁ = a: τ_eff = a·Σ p_k = a, which cancels the division; the clients' p_k are not equal."""
    local = {**local, "steps": 4}
    nova = play(method=["fednova", *prox], local=local)
    assert_close(nova.params, play(method=prox or "fedavg", local=local).params)
    unequal = {**local, "steps": None, "epochs": 1}
    other = play(method=["fednova", *prox], local=unequal).params["classifier.bias"]
    assert not torch.allclose(other, play(method=prox or "fedavg", local=unequal).params["classifier.bias"], rtol=1e-4)


@pytest.mark.parametrize("loss", ["ce", "wsm"])
def test_fedreg_without_corrections_is_uniform_fedavg_bit_for_bit(play: Any, assert_same_bits: Any, loss: str) -> None:
    """γ = 1: θ_γ = 1·θ + 0·w; zero weights take nothing back; the server takes the plain mean of unequal clients."""
    method = {"name": "fedreg", "gamma": 1.0, "eta_s": 0.3, "pseudo_weight": 0.0, "perturbed_weight": 0.0}
    fedreg = play(method=method, loss=loss, local={"epochs": 2})
    assert_same_bits(fedreg.params, play(method="fedavg", loss=loss, local={"epochs": 2}, **UNIFORM).params)
    assert fedreg.rows[0]["clients"]["weight"] == [0.2] * 5


@pytest.mark.parametrize(
    ("one", "other"),
    [((1.0, 0.0, 0.0), (0.9, 0.0, 0.0)), ((1.0, 0.0, 0.0), (1.0, 1.0, 0.0)), ((1.0, 1.0, 0.0), (1.0, 1.0, 1.0))],
)
def test_each_part_of_fedreg_has_an_effect(play: Any, one: tuple[float, ...], other: tuple[float, ...]) -> None:
    """Otherwise the identity above would say nothing: γ, then the pseudo weight, then the perturbed weight."""
    common = {"name": "fedreg", "eta_s": 0.15, "eta_p": 0.1}
    ends = [
        play(method={**common, "gamma": gamma, "pseudo_weight": s, "perturbed_weight": p}, local={"epochs": 3}).params
        for gamma, s, p in (one, other)
    ]
    assert not torch.allclose(ends[0]["classifier.weight"], ends[1]["classifier.weight"], rtol=1e-6)


def test_fedwavg_with_alpha_0_is_fedavg(play: Any, assert_close: Any) -> None:
    """W = (1 − 0) + 0·… = 1 for all, although the counts differ."""
    keys = {"participation": 3, "rounds": 6, "local": {"epochs": 4, "lr": 0.5}}
    fedwavg, fedavg = play(method={"name": "fedwavg", "alpha": 0.0}, **keys), play(**keys)
    assert_close(fedwavg.params, fedavg.params, rtol=1e-11, atol=1e-12)
    counts = {float(u.extras["count"]) for u in fedwavg.uploads[-1].values()}
    assert len(counts) > 1
    other = play(method={"name": "fedwavg", "alpha": 0.5}, **keys)
    assert not torch.allclose(other.params["classifier.weight"], fedavg.params["classifier.weight"], rtol=1e-4)


def test_plain_server_optimiser_is_the_weighted_mean_of_the_local_models(play: Any, assert_close: Any) -> None:
    """w + 1·Σ p_k (w_k − w) = Σ p_k w_k, p_k = n_k / Σ_{S_t} n over the participants of the round."""
    played = play(participation=3, server={"optimizer": "sgd", "lr": 1.0})
    for end, uploads in zip(played.ends, played.uploads, strict=True):
        sizes = {k: len(played.world.federation.train[k]) for k in uploads}
        mean = {n: torch.zeros_like(v) for n, v in played.params.items()}
        for k, upload in uploads.items():
            mean = add(mean, {n: sizes[k] / sum(sizes.values()) * v[0] for n, v in upload.params.items()})
        assert_close(end.state.params, mean)


def test_server_momentum_0_is_plain_bit_for_bit(play: Any, assert_same_bits: Any) -> None:
    """m ← 0·m + Δ."""
    plain = play(participation=3, server={"lr": 0.7})
    assert_same_bits(
        play(participation=3, server={"optimizer": "momentum", "momentum": 0, "lr": 0.7}).params, plain.params
    )


def test_server_learning_rate_scales_the_change_of_a_round() -> None:
    """w(η) − w = η·(w(1) − w)."""
    params, delta = {"w": torch.tensor([1.0, -2.0]).double()}, {"w": torch.tensor([0.25, 0.5]).double()}
    moved, _ = ServerOptimizer("sgd", lr=0.5).update(params, delta, {})
    assert moved["w"].tolist() == [1.125, -1.75]
