"""What is the same in every play is computed once, and is still right in the last of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from fedretain.engines.recording import Recording
from fedretain.randomness import stream


def numbers(*shape: int, purpose: str = "hoisting") -> Tensor:
    return torch.from_numpy(stream(0, purpose, *shape).normal(size=shape))


def names(part: Any) -> list[str]:
    return [str(node.target) for node in part.graph.nodes if node.op in ("call_function", "call_method")]


def played(step: Any, *, steps: int = 4) -> Recording:
    """Several steps from one beginning, against the function itself."""
    carry = {"a": numbers(2, 3, 3), "b": numbers(2, 3, 3, purpose="b")}
    fixed = {"x": numbers(2, 3, 3, purpose="x")}
    rate = torch.tensor(0.1, dtype=torch.float64)
    recording = Recording(step, carry, rate, fixed)
    expected = {name: value.clone() for name, value in carry.items()}
    leaves = [value.clone() for value in carry.values()]
    begun = recording.begin(leaves, list(fixed.values()))
    for _ in range(steps):
        expected, told = step(expected, rate, fixed)
        leaves, result = recording.step(leaves, [rate], begun)
        torch.testing.assert_close(result, told, rtol=0, atol=0)
        torch.testing.assert_close(leaves, list(expected.values()), rtol=0, atol=0)
    return recording


def _updated_where_it_lies(carry: Any, rate: Tensor, fixed: Any) -> Any:
    """a is read through a view and updated in place; exp(x) depends on nothing that changes."""
    product = torch.bmm(carry["a"].transpose(1, 2), fixed["x"].exp())
    return {"a": carry["a"] + -rate * product, "b": carry["b"] + -rate * carry["b"]}, product.sum()


def _replaced(carry: Any, rate: Tensor, fixed: Any) -> Any:
    """a is a new tensor after every step: a view of the first one would be of the past."""
    product = torch.bmm(carry["a"].transpose(1, 2), fixed["x"])
    return {"a": torch.maximum(product, carry["b"]), "b": carry["b"]}, product.sum()


def _written_over(carry: Any, rate: Tensor, fixed: Any) -> Any:
    """x·x is scaled by the rate where it lies, and so must be made anew for every step."""
    return {"a": carry["a"] + -rate * (fixed["x"] * fixed["x"]), "b": carry["b"] * 1.5}, carry["a"].sum()


def _exchanged(carry: Any, rate: Tensor, fixed: Any) -> Any:
    """The two change places, and one of them is turned."""
    return {"a": carry["b"].transpose(1, 2) * 0.5, "b": carry["a"] + -rate * fixed["x"]}, carry["b"].amax()


@pytest.mark.parametrize("step", [_updated_where_it_lies, _replaced, _written_over, _exchanged])
def test_steps_that_begin_once_are_the_steps_of_the_function(step: Any) -> None:
    played(step)


def test_what_is_computed_once() -> None:
    recording = played(_updated_where_it_lies)
    assert recording.first is not None
    assert "exp" in names(recording.first)
    assert "transpose" in names(recording.first)
    assert not {"exp", "transpose"} & set(names(recording.module))


def test_views_of_what_is_replaced_are_taken_in_every_step() -> None:
    recording = played(_replaced)
    assert recording.first is not None
    assert "transpose" not in names(recording.first)
    assert "transpose" in names(recording.module)


def _axis_added(carry: Any, rate: Tensor, fixed: Any) -> Any:
    """A bias goes to every row of its client."""
    made = carry["a"] + carry["b"].view(2, 1, 3, 3).transpose(1, 2).sum(2)
    return {"a": carry["a"] + -rate * made, "b": carry["b"] + -rate * made}, made.sum()


def _clients_merged(carry: Any, rate: Tensor, fixed: Any) -> Any:
    """All clients' numbers in one row, which one place for all of them could not show."""
    made = carry["a"].view(6, 3).sum(1).sum() + carry["b"]
    return {"a": carry["a"] + -rate * fixed["x"], "b": carry["b"] + -rate * made}, made.sum()


def _clients_last(carry: Any, rate: Tensor, fixed: Any) -> Any:
    made = carry["a"].transpose(-3, 1).sum(1).sum() + carry["b"]
    return {"a": carry["a"] + -rate * fixed["x"], "b": carry["b"] + -rate * made}, made.sum()


@pytest.mark.parametrize(
    ("step", "apart"),
    [(_updated_where_it_lies, True), (_axis_added, True), (_clients_merged, False), (_clients_last, False)],
)
def test_clients_that_may_share_a_place(step: Any, apart: bool) -> None:
    """Where every view of the carry keeps the axis of the clients."""
    assert played(step).one_place is apart
