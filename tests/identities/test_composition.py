"""Every pair of methods either trains or is refused with a reason; every loss goes with every method."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from fedretain.config import make_experiment
from fedretain.errors import ConfigError
from fedretain.losses import LOSSES
from fedretain.methods import METHODS, FedCurv, FedNova, FedProx, FedReg, Scaffold, chain
from fedretain.tensors import under_prefix

CHOSEN: dict[str, dict[str, Any]] = {
    "fedprox": {"mu": 0.1},
    "fedcurv": {"lam": 0.1},
    "fedreg": {"gamma": 0.4, "eta_s": 0.1, "ascent_steps": 2},
    "fedwavg": {"alpha": 0.3},
}

REFUSED = {
    frozenset({"fedreg", "fedprox"}): "the penalty of fedprox would have no effect",
    frozenset({"fedreg", "fedcurv"}): "the penalty of fedcurv would have no effect",
    frozenset({"fedreg", "scaffold"}): "the direction of scaffold would have no effect",
    frozenset({"fedreg", "fednova"}): "‖a‖₁ is not known for the local steps of fedreg",
    frozenset({"fedcurv", "fednova"}): "‖a‖₁ is not known for the local steps of fedcurv",
}
"""The pairs that cannot work together, each with its reason; all others must train."""


def component(name: str) -> dict[str, Any]:
    return {"name": name, **CHOSEN.get(name, {})}


def sound(played: Any) -> bool:
    tensors = [*played.params.values(), *played.ends[-1].state.server.values()]
    moved = any(not torch.equal(v, played.start.params[n]) for n, v in played.params.items())
    return moved and all(bool(t.isfinite().all()) for t in tensors) and played.rows[-1]["train_loss"] < 1e3


@pytest.mark.parametrize("pair", list(itertools.product(METHODS, repeat=2)), ids="+".join)
def test_every_ordered_pair_trains_or_is_refused_by_name_and_reason(pair: tuple[str, str], play: Any) -> None:
    """Two rounds, so that state comes back to the clients once."""
    first, second = pair
    reason = "the same method twice" if first == second else REFUSED.get(frozenset(pair))
    keys = {"method": [component(first), component(second)], "rounds": 2, "participation": 3, "loss": "wsm"}
    if reason is None:
        assert sound(play(**keys))
        return
    with pytest.raises(ConfigError) as caught:
        play(**keys)
    message = str(caught.value)
    assert reason in message
    assert f"{first} and {second} cannot be chained" in message or f"{second} and {first} cannot be chained" in message


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("loss", LOSSES)
def test_every_loss_trains_with_every_method(loss: str, method: str, play: Any) -> None:
    assert sound(play(method=component(method), loss=loss, rounds=2, participation=2))


def test_every_built_in_method_is_in_these_tests() -> None:
    """A method with required parameters that are not chosen here would only be seen to fail."""
    for name in METHODS:
        make_experiment({"method": component(name)}).build_method()


@pytest.mark.parametrize(
    ("methods", "names"),
    [
        ((FedNova(), FedProx(0.1), FedCurv(0.1)), "fednova and fedcurv"),
        ((FedCurv(0.1), FedProx(0.1), FedNova()), "fednova and fedcurv"),
        ((chain(FedProx(0.1), FedCurv(0.1)), FedNova()), "fednova and fedcurv"),
        ((chain(FedProx(0.1), FedNova()), FedProx(0.1)), "fedprox and fedprox"),
        ((chain(Scaffold(), FedProx(0.1)), FedReg(gamma=0.5, eta_s=0.1)), "scaffold and fedreg"),
    ],
)
def test_conflicts_are_found_among_three_and_inside_a_chain(methods: Any, names: str) -> None:
    with pytest.raises(ConfigError, match=f"{names} cannot be chained"):
        chain(*methods)


def test_a_chain_of_chains_is_one_chain() -> None:
    """FedNova hears of FedProx's μ wherever it stands."""
    flat = chain(FedNova(), Scaffold(), FedProx(0.3))
    assert chain(chain(FedNova(), Scaffold()), FedProx(0.3)) == flat
    assert chain(FedNova(), chain(Scaffold(), FedProx(0.3))) == flat
    assert chain(flat) == flat
    assert flat.methods[0].proximal == 0.3


@pytest.mark.parametrize("order", [["scaffold", "fedwavg"], ["fedwavg", "scaffold"]])
def test_a_chain_of_scaffold_and_fedwavg_keeps_both_states_apart(
    order: list[str], play: Any, assert_close: Any
) -> None:
    """With α = 0 FedWAvg changes nothing, so SCAFFOLD's c_k and c are those of SCAFFOLD alone; with SCAFFOLD beside it
    FedWAvg still uploads one count, and only SCAFFOLD's c is broadcast.
    """
    components = {"scaffold": "scaffold", "fedwavg": {"name": "fedwavg", "alpha": 0.0}}
    both = play(method=[components[name] for name in order], participation=3, rounds=5)
    alone = play(method="scaffold", participation=3, rounds=5)
    assert_close(both.params, alone.params, rtol=1e-10, atol=1e-12)
    end = both.ends[-1]
    assert_close(under_prefix("scaffold", end.state.server), alone.ends[-1].state.server, rtol=1e-10, atol=1e-12)
    assert len(end.state.server) == len(alone.ends[-1].state.server)
    ours, theirs = both.states(5), alone.states(5)
    assert ours.keys() == theirs.keys() == end.clients.keys()
    for k, state in ours.items():
        assert_close(under_prefix("scaffold", state), theirs[k], rtol=1e-10, atol=1e-12)
        assert set(under_prefix("fedwavg", state)) == {"count", "known", "correct"}
        assert all(name.startswith(("scaffold/", "fedwavg/")) for name in state)
    for upload in both.uploads[-1].values():
        assert set(under_prefix("fedwavg", upload.extras)) == {"count"}


def test_a_chain_of_fedcurv_and_fedwavg_counts_what_fedwavg_alone_counts(play: Any) -> None:
    """λ = 0: the models are FedWAvg's, so every count and weight of every round is."""
    keys = {"participation": 3, "rounds": 6, "local": {"epochs": 4, "lr": 0.5}}
    fedwavg = {"name": "fedwavg", "alpha": 0.5}
    alone = play(method=fedwavg, **keys)
    both = play(method=[{"name": "fedcurv", "lam": 0.0}, fedwavg], **keys)
    assert len({float(u.extras["count"]) for u in alone.uploads[-1].values()}) > 1
    for one, two, row_one, row_two in zip(alone.uploads, both.uploads, alone.rows, both.rows, strict=True):
        assert [float(u.extras["count"]) for u in one.values()] == [
            float(u.extras["fedwavg/count"]) for u in two.values()
        ]
        assert row_one["clients"]["weight"] == row_two["clients"]["weight"]


def test_fednova_beside_fedwavg_averages_norms_with_the_new_weights(play: Any, assert_close: Any) -> None:
    """w ← w + τ_eff·Σ q_k Δ_k/‖a_k‖₁, τ_eff = Σ q_k ‖a_k‖₁, with FedWAvg's weights q in both sums."""
    played = play(method=["fednova", {"name": "fedwavg", "alpha": 0.6}], rounds=4, local={"epochs": 4, "lr": 0.5})
    for received, uploads, end, row in zip(played.received, played.uploads, played.ends, played.rows, strict=True):
        q, steps = row["clients"]["weight"], row["clients"]["steps"]
        effective = sum(a * b for a, b in zip(q, steps, strict=True))
        expected = {
            n: w + effective * sum(q[k] * (u.params[n][0] - w) / steps[k] for k, u in uploads.items())
            for n, w in received.params.items()
        }
        assert_close(end.state.params, expected, rtol=1e-11, atol=1e-13)
