"""Composition: penalties add, directions and weights fold, states stay apart, and impossible pairs are refused."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import pytest
import torch
from pydantic import Field

from fedretain.errors import ConfigError
from fedretain.methods import Aggregate, Batch, FedAvg, Method, Own, Received, chain
from fedretain.tensors import squared_distance


@dataclass(frozen=True)
class Pull(Method):
    strength: Annotated[float, Field(ge=0)]

    def penalty(self, params, received, own):
        return self.strength * squared_distance(params, received.params)


@dataclass(frozen=True)
class Drift(Method):
    """Keeps a counter on the client and one on the server."""

    def init_client(self, params, own):
        return {"count": torch.tensor(0.0)}

    def init_server(self, params):
        return {"rounds": torch.tensor(0.0)}

    def broadcast(self, server):
        return server

    def direction(self, gradient, params, received, own):
        return {name: value + own.state["count"] + received.server["rounds"] for name, value in gradient.items()}

    def finish(self, params, received, own, task):
        return {"count": own.state["count"] + 1}, {"seen": own.state["count"]}

    def weigh(self, weights, extras):
        return weights * (1 + extras["seen"])

    def update_server(self, server, aggregate):
        return {"rounds": server["rounds"] + aggregate.total["seen"]}


@dataclass(frozen=True)
class Double(Method):
    def direction(self, gradient, params, received, own):
        return {name: 2 * value for name, value in gradient.items()}

    def combine(self, aggregate, received):
        return {name: 2 * value for name, value in aggregate.delta.items()}


@dataclass(frozen=True)
class OwnStep(Method):
    def step(self, params, batch, index, received, own, task):
        return params, torch.tensor(0.0)


@dataclass(frozen=True)
class OtherStep(OwnStep):
    pass


@dataclass(frozen=True)
class OtherCombine(Double):
    pass


PARAMS = {"w": torch.tensor([1.0, 2.0])}


def received(server=None) -> Received:
    return Received(PARAMS, {}, server or {}, 1)


def own(state=None) -> Own:
    number = torch.tensor(1)
    return Own(Batch(torch.zeros(1, 1), torch.zeros(1)), torch.ones(2), number, number, state or {}, {})


def test_penalties_add() -> None:
    """‖(2, 2) − (1, 2)‖² = 1, so 0.5 + 0.25·1."""

    @dataclass(frozen=True)
    class Constant(Method):
        def penalty(self, params, received, own):
            return torch.tensor(0.5)

    method = chain(Constant(), Pull(0.25))
    assert method.penalty({"w": torch.tensor([2.0, 2.0])}, received(), own()).item() == 0.75


def test_directions_fold_in_order_and_see_only_their_own_state() -> None:
    """Drift adds count + rounds = 3 + 4 = 7, Double doubles: (1 + 7)·2; the other order: 1·2 + 7."""
    state, server = {"drift/count": torch.tensor(3.0)}, {"drift/rounds": torch.tensor(4.0)}
    gradient = {"w": torch.tensor([1.0, 1.0])}
    first = chain(Drift(), Double()).direction(gradient, PARAMS, received(server), own(state))
    other = chain(Double(), Drift()).direction(gradient, PARAMS, received(server), own(state))
    assert first["w"].tolist() == [16, 16]
    assert other["w"].tolist() == [9, 9]


def test_states_and_uploads_are_kept_by_method_name() -> None:
    method = chain(FedAvg(), Drift(), Pull(0.1))
    state = method.init_client(PARAMS, own())
    assert set(state) == {"drift/count"}
    new, extras = method.finish(PARAMS, received({"drift/rounds": torch.tensor(0.0)}), own(state), None)
    assert new["drift/count"].item() == 1
    assert set(extras) == {"drift/seen"}
    server = method.init_server(PARAMS)
    aggregate = Aggregate(PARAMS, {}, {"drift/seen": torch.tensor(5.0)}, 2, 10)
    assert method.update_server(server, aggregate) == {"drift/rounds": torch.tensor(5.0)}
    assert method.broadcast(server) == server
    weights = method.weigh(torch.tensor([0.5, 0.5]), {"drift/seen": torch.tensor([0.0, 1.0])})
    assert weights.tolist() == [0.5, 1.0]


def test_members_with_the_same_names_in_their_states_do_not_mix() -> None:
    """Drift and its twin keep count = 1 and 10 on the client, rounds = 100 and 1000 on the server.

    Directions: 1 + (1 + 100) + (10 + 1000) = 1112. Weights: ½·(1 + 1)·(1 + 10) = 11. Server: 100 + 1 and 1000 + 10.
    """

    @dataclass(frozen=True)
    class Twin(Drift):
        pass

    method = chain(Drift(), Twin())
    state = {"drift/count": torch.tensor(1.0), "twin/count": torch.tensor(10.0)}
    server = {"drift/rounds": torch.tensor(100.0), "twin/rounds": torch.tensor(1000.0)}
    turned = method.direction({"w": torch.ones(2)}, PARAMS, received(server), own(state))
    assert turned["w"].tolist() == [1112, 1112]
    new, extras = method.finish(PARAMS, received(server), own(state), None)
    assert new == {"drift/count": torch.tensor(2.0), "twin/count": torch.tensor(11.0)}
    assert extras == {"drift/seen": torch.tensor(1.0), "twin/seen": torch.tensor(10.0)}
    stacked = {name: value.unsqueeze(0) for name, value in extras.items()}
    assert method.weigh(torch.tensor([0.5]), stacked).tolist() == [11]
    after = method.update_server(server, Aggregate(PARAMS, extras, extras, 1, 1))
    assert after == {"drift/rounds": torch.tensor(101.0), "twin/rounds": torch.tensor(1010.0)}


def test_hyper_parameters_need_not_be_hashable() -> None:
    """A list in the experiment file is a list here."""

    @dataclass(frozen=True)
    class Layers(Drift):
        names: list[str]

    method = chain(Layers(["a", "b"]), Pull(0.1))
    assert set(method.init_client(PARAMS, own())) == {"layers/count"}
    assert set(method.init_server(PARAMS)) == {"layers/rounds"}
    assert set(method.finish(PARAMS, received(), own({"layers/count": torch.tensor(0.0)}), None)[1]) == {"layers/seen"}


def test_a_chain_uses_what_its_members_use() -> None:
    method = chain(Pull(0.1), Drift())
    assert method.uses("penalty")
    assert method.uses("direction")
    assert not method.uses("step")
    assert not FedAvg().uses("penalty")
    assert chain(Pull(0.1)) == Pull(0.1)
    assert chain(Double(), Drift()).combine(Aggregate(PARAMS, {}, {}, 1, 1), received())["w"].tolist() == [2, 4]


@pytest.mark.parametrize(
    ("pair", "reason"),
    [
        ((OwnStep(), OtherStep()), "ownstep and otherstep cannot be chained: each replaces the whole local step"),
        ((Double(), OtherCombine()), "double and othercombine .* each decides alone"),
        ((OwnStep(), Pull(0.1)), "ownstep replaces the local step, so the penalty of pull would have no effect"),
        ((Drift(), OwnStep()), "ownstep replaces the local step, so the direction of drift would have no effect"),
        ((Pull(0.1), Pull(0.2)), "pull and pull .* same method twice"),
    ],
)
def test_pairs_that_cannot_compose_are_refused(pair, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        chain(*pair)


def test_an_empty_chain_is_refused() -> None:
    with pytest.raises(ConfigError, match="empty chain"):
        chain()


@pytest.mark.parametrize("value", [-0.1, float("nan"), float("inf"), "much", True])
def test_hyper_parameters_are_checked_by_their_type_hints(value) -> None:
    with pytest.raises(ConfigError, match=r"pull\.strength"):
        Pull(value)
