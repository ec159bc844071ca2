"""A recording plays what was recorded: pooling by slices, updates in place only where nobody looks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from fedretain.engines.recording import Recording, RoundWatch, WatchedReceived, halve, halve_backward, simplify
from fedretain.methods import Received
from fedretain.randomness import stream

aten = torch.ops.aten
Step = Callable[[dict[str, Tensor], Tensor, dict[str, Tensor]], tuple[dict[str, Tensor], Tensor]]


def numbers(*shape: int, purpose: str = "recording") -> Tensor:
    return torch.from_numpy(stream(0, purpose, *shape).normal(size=shape)).to(torch.float32)


@pytest.mark.parametrize("kind", ["normal", "ties", "all equal", "negative", "relu", "zeros"])
@pytest.mark.parametrize("shape", [(2, 3, 4, 6), (1, 1, 2, 2), (5, 2, 3, 8, 4)])
def test_halving_is_max_pooling(kind: str, shape: tuple[int, ...]) -> None:
    """Values and gradient to the bit; with ties the gradient goes to the first in reading order."""
    maps = numbers(*shape)
    maps = {
        "normal": maps,
        "ties": (maps * 1.5).round(),
        "all equal": torch.full_like(maps, -2.5),
        "negative": -maps.abs() - 1,
        "relu": maps.relu(),
        "zeros": torch.zeros_like(maps),
    }[kind]
    flat = maps.flatten(0, -4) if maps.dim() > 4 else maps
    flat = flat.clone().requires_grad_()
    pooled = F.max_pool2d(flat, 2)
    gradient = numbers(*pooled.shape, purpose="gradient")
    (expected,) = torch.autograd.grad(pooled, flat, gradient)
    values, rows = halve(maps)
    assert torch.equal(values.reshape(pooled.shape), pooled.detach())
    back = halve_backward(gradient.reshape(values.shape), maps, rows)
    assert torch.equal(back.reshape(expected.shape), expected)


def test_a_tie_by_hand() -> None:
    """[[1, 2], [2, 0]]: the first 2 in reading order is the upper right one, and gets the whole gradient of 5."""
    maps = torch.tensor([[[[1.0, 2.0], [2.0, 0.0]]]])
    values, rows = halve(maps)
    assert values.item() == 2
    assert halve_backward(torch.tensor([[[[5.0]]]]), maps, rows).tolist() == [[[[0, 5], [0, 0]]]]


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
    names = [str(node.target) for node in recording.module.graph.nodes if node.op == "call_function"]
    return [name for name in names if name.split(".")[1].endswith("_") and not name.startswith("aten._")]


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


def test_a_step_must_give_back_what_it_was_given() -> None:
    with pytest.raises(TypeError, match="under the same names"):
        Recording(lambda carry, rate, fixed: ({"other": carry["a"]}, rate), dict(CARRY), torch.tensor(1.0), {})


def traced(function: Callable[[Tensor], Tensor], argument: Tensor) -> tuple[Any, int, int]:
    module = make_fx(function)(argument)
    before = sum(node.op == "call_function" for node in module.graph.nodes)
    simplify(module.graph)
    module.recompile()
    return module, before, sum(node.op == "call_function" for node in module.graph.nodes)


@pytest.mark.parametrize(
    ("function", "left"),
    [
        (lambda x: aten.view(x, [2, 3, 5]) + 1, 1),
        (lambda x: aten.expand(x, [2, 3, 5]) + 1, 1),
        (lambda x: aten.mul.Scalar(x, 1) + 1, 1),
        (lambda x: aten.mul.Scalar(x, 2) + 1, 2),
        (lambda x: aten.view(x, [6, 5]) + 1, 2),
        (lambda x: aten.transpose.int(aten.transpose.int(x, 1, 2), 2, 1) + 1, 1),
        (lambda x: aten.transpose.int(aten.transpose.int(x, 1, 2), -1, -2) + 1, 1),
        (lambda x: aten.transpose.int(aten.transpose.int(x, 1, 2), 0, 1) + 1, 3),
    ],
)
def test_what_does_nothing_is_dropped(function: Callable[[Tensor], Tensor], left: int) -> None:
    x = numbers(2, 3, 5)
    module, before, after = traced(function, x)
    assert after == left <= before
    assert torch.equal(module(x), function(x))


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
