"""A recording plays what was recorded, with updates in place only where nobody looks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from fedretain.engines.recording import Recording, RoundWatch, WatchedReceived
from fedretain.methods import Received
from fedretain.randomness import stream

Step = Callable[[dict[str, Tensor], Tensor, dict[str, Tensor]], tuple[dict[str, Tensor], Tensor]]


def numbers(*shape: int, purpose: str = "recording") -> Tensor:
    return torch.from_numpy(stream(0, purpose, *shape).normal(size=shape)).to(torch.float32)


def played(step: Step, carry: dict[str, Tensor], *, plays: int = 3, exact: bool = True) -> Recording:
    """Record a step, play it several times, and compare with the function itself; what is fixed must not change."""
    fixed = {"x": numbers(2, 3, 5), "y": numbers(2, 5, 3)}
    kept = {name: value.clone() for name, value in fixed.items()}
    moving = torch.tensor(0.25)
    recording = Recording(step, carry, moving, fixed, exact=exact)
    expected = {name: value.clone() for name, value in carry.items()}
    leaves = [value.clone() for value in carry.values()]
    for _ in range(plays):
        expected, told = step(expected, moving, fixed)
        leaves, result = recording.play(leaves, [moving], list(fixed.values()))
        tolerance = {"rtol": 0, "atol": 0} if exact else {"rtol": 1e-5, "atol": 1e-5}
        torch.testing.assert_close(result, told, **tolerance)
        for (name, value), mine in zip(expected.items(), leaves, strict=True):
            torch.testing.assert_close(mine, value, **tolerance, msg=lambda m, name=name: f"{name}: {m}")
    assert all(torch.equal(value, kept[name]) for name, value in fixed.items())
    return recording


def in_place(recording: Recording) -> list[str]:
    names = [str(node.target) for node in recording.module.graph.nodes if node.op == "call_method"]
    return [name for name in names if name.endswith("_")]


CARRY = {"a": numbers(2, 3, 3), "b": numbers(2, 3, 3, purpose="b")}


@pytest.mark.parametrize("exact", [True, False])
def test_an_update_that_nobody_else_sees_is_made_in_place(exact: bool) -> None:
    def step(carry: Any, rate: Tensor, fixed: Any) -> Any:
        gradient = torch.bmm(fixed["x"], fixed["y"])
        new = {"a": carry["a"] + -rate * gradient, "b": carry["b"] - rate * (gradient + carry["b"])}
        return new, carry["a"].sum()

    assert in_place(played(step, CARRY, exact=exact))


def _reads_old_after(carry: Any, rate: Tensor, fixed: Any) -> Any:
    new = carry["a"] + -rate * torch.bmm(fixed["x"], fixed["y"])
    return {"a": new, "b": carry["b"] - rate * (carry["a"] * 2)}, new.sum() + carry["a"].sum()


def _reads_a_view_of_old_after(carry: Any, rate: Tensor, fixed: Any) -> Any:
    view = carry["a"].transpose(1, 2).reshape(2, 3, 3)[:, 1:]
    new = carry["a"] + -rate * torch.bmm(fixed["x"], fixed["y"])
    return {"a": new, "b": carry["b"]}, (view * new[:, 1:]).sum()


def _hands_old_on(carry: Any, rate: Tensor, fixed: Any) -> Any:
    """The parameter of before becomes the memory of the next step."""
    return {"a": carry["a"] + -rate * torch.bmm(fixed["x"], fixed["y"]), "b": carry["a"]}, carry["b"].sum()


def _swaps(carry: Any, rate: Tensor, fixed: Any) -> Any:
    return {"a": carry["b"], "b": carry["a"]}, carry["a"].sum()


def _one_gradient_for_both(carry: Any, rate: Tensor, fixed: Any) -> Any:
    gradient = torch.bmm(fixed["x"], fixed["y"])
    return {name: value + -rate * gradient for name, value in carry.items()}, gradient.sum()


def _the_gradient_is_kept(carry: Any, rate: Tensor, fixed: Any) -> Any:
    """Momentum: what is added to the one is the next value of the other."""
    velocity = 0.5 * carry["b"] + torch.bmm(fixed["x"], fixed["y"])
    return {"a": carry["a"] + -rate * velocity, "b": velocity}, velocity.sum()


def _the_gradient_is_an_argument(carry: Any, rate: Tensor, fixed: Any) -> Any:
    """What stays fixed must not be scaled where it lies."""
    square = fixed["x"][:, :, :3]
    return {"a": carry["a"] + -rate * square, "b": carry["b"] - rate * fixed["y"][:, :3]}, square.sum()


def _the_gradient_is_the_other(carry: Any, rate: Tensor, fixed: Any) -> Any:
    return {"a": carry["a"] + -rate * carry["b"], "b": carry["b"] + -rate * carry["a"]}, carry["a"].sum()


def _a_product_with_the_other(carry: Any, rate: Tensor, fixed: Any) -> Any:
    """The product must be taken before its factor is updated."""
    product = torch.bmm(fixed["x"][:, :, :3], carry["b"])
    new = carry["b"] + -rate * torch.bmm(fixed["x"], fixed["y"])
    return {"a": carry["a"] + -rate * product, "b": new}, rate * 1


def _a_product_with_itself(carry: Any, rate: Tensor, fixed: Any) -> Any:
    """(c·x)·w added to w while it is read."""
    return {"a": carry["a"] + -rate * torch.bmm(fixed["x"][:, :, :3], carry["a"]), "b": carry["b"]}, rate * 1


def _the_other_first(carry: Any, rate: Tensor, fixed: Any) -> Any:
    """Names in another order than the updates."""
    product = torch.bmm(carry["a"], fixed["x"][:, :, :3])
    new_a = carry["a"] + -rate * torch.bmm(fixed["x"], fixed["y"])
    new_b = carry["b"] + -rate * product
    return {"a": new_a, "b": new_b}, rate * 1


def _a_factor_for_every_entry(carry: Any, rate: Tensor, fixed: Any) -> Any:
    """c·(x·y) entry by entry is not (c·x)·y."""
    scale, square = fixed["x"][:, :, :3].exp(), fixed["y"][:, :3]
    return {"a": carry["a"] + scale * torch.bmm(square, square), "b": carry["b"]}, rate * 1


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize(
    "step",
    [
        _reads_old_after,
        _reads_a_view_of_old_after,
        _hands_old_on,
        _swaps,
        _one_gradient_for_both,
        _the_gradient_is_kept,
        _the_gradient_is_an_argument,
        _the_gradient_is_the_other,
        _a_product_with_the_other,
        _a_product_with_itself,
        _the_other_first,
        _a_factor_for_every_entry,
    ],
)
def test_updates_in_place_change_nothing_that_is_read(step: Step, exact: bool) -> None:
    played(step, CARRY, exact=exact)


def _layer(carry: Any, rate: Tensor, fixed: Any) -> Any:
    """x·wᵀ + b of every client, and a step down the gradient of half its square: ∂w = zᵀ·x, ∂b = Σ z."""
    x = fixed["x"]
    z = torch.bmm(x, carry["w"].transpose(1, 2)) + carry["b"].unsqueeze(1)
    gradient = {"w": torch.bmm(z.transpose(1, 2), x), "b": z.sum(1, keepdim=True).view(carry["b"].shape)}
    return {name: value + -rate * gradient[name] for name, value in carry.items()}, z.square().sum((1, 2))


@pytest.mark.parametrize(("outputs", "transposed"), [(4, set()), (16, {0})])
def test_wide_weights_want_to_lie_transposed(outputs: int, transposed: set[int]) -> None:
    """Read only as wᵀ, they are updated as wᵀ + c·xᵀ·z. The numbers are the same whichever way they lie.

    Steps go on with what was begun: the views that were taken before the first one see every update.
    """
    carry = {"w": 0.1 * numbers(2, outputs, 5), "b": numbers(2, outputs, purpose="b")}
    fixed = {"x": numbers(2, 3, 5)}
    recording = Recording(_layer, carry, torch.tensor(0.01), fixed, exact=False)
    assert recording.transposed == transposed
    for turned in (False, True):
        expected = {name: value.clone() for name, value in carry.items()}
        leaves = [value.clone() for value in carry.values()]
        if turned:
            leaves[0] = leaves[0].mT.contiguous().mT
        begun = recording.begin(leaves, [fixed["x"]])
        for rate in (0.01, 0.02, 0.005):
            expected, told = _layer(expected, torch.tensor(rate), fixed)
            leaves, result = recording.step(leaves, [torch.tensor(rate)], begun)
            torch.testing.assert_close(result, told)
            for value, mine in zip(expected.values(), leaves, strict=True):
                torch.testing.assert_close(mine, value)


def test_a_bias_is_updated_by_one_product() -> None:
    """Σ z over a batch is the product of ones with z: two products and nothing else add to the parameters."""
    carry = {"w": numbers(2, 16, 5), "b": numbers(2, 16, purpose="b")}
    recording = Recording(_layer, carry, torch.tensor(0.01), {"x": numbers(2, 3, 5)}, exact=False)
    assert in_place(recording) == ["baddbmm_", "baddbmm_"]


def test_a_step_must_give_back_what_it_was_given() -> None:
    with pytest.raises(TypeError, match="under the same names"):
        Recording(lambda carry, rate, fixed: ({"other": carry["a"]}, rate), dict(CARRY), torch.tensor(1.0), {})


def test_the_round_is_watched() -> None:
    """Reading the parameters is not reading the round; a chain's members read it through a copy."""
    watch = RoundWatch()
    received = WatchedReceived.of(({}, {}, {"scaffold/c": torch.zeros(2)}), 7, watch)
    member = received._replace(server={"c": received.server["scaffold/c"]})
    assert list(member.server) == ["c"]
    assert isinstance(received, Received)
    assert not watch.seen
    assert member.round == 7
    assert watch.seen
