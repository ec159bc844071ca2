"""A loop that was recorded turn by turn is found again, and the three parts of it give the same numbers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from fedretain.engines import rolling
from fedretain.engines.rolling import Loop, Rolled, find_loop

Function = Callable[[Tensor, Tensor], list[Tensor]]


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rolling, "LEAST_SAVED", 6)


def recorded(function: Function) -> tuple[fx.GraphModule, list[Tensor]]:
    """A function of two matrices, written down."""
    draws = torch.Generator().manual_seed(0)
    given = [torch.randn(3, 3, dtype=torch.float64, generator=draws) for _ in range(2)]
    return make_fx(function)(*given), given


def parts_of(module: fx.GraphModule, loop: Loop, given: Sequence[Tensor]) -> tuple[Rolled, list[fx.GraphModule]]:
    """The module in three parts, which are not compiled."""
    parts: list[fx.GraphModule] = []

    def as_it_is(part: fx.GraphModule, given: Sequence[Any]) -> fx.GraphModule:
        part.graph.lint()
        part(*(leaf.clone() for leaf in given))
        parts.append(part)
        return part

    return Rolled(module, loop, given, as_it_is), parts


def climb(x: Tensor, w: Tensor) -> list[Tensor]:
    """Five turns of three operations around one value, with something that does not change in them."""
    scale = w.exp()
    x = x + 1
    for _ in range(5):
        x = x + (x @ scale).sign() * 0.1
    return [x.sum(), scale]


def two_values(x: Tensor, w: Tensor) -> list[Tensor]:
    """Two values that change places in every turn."""
    a, b = x * 2, w * 3
    for _ in range(4):
        a, b = b.sin(), a + b
    return [a - b]


def from_the_arguments(x: Tensor, w: Tensor) -> list[Tensor]:
    """Nothing before the loop, and its result is what is asked for."""
    for _ in range(4):
        x = (x @ w).tanh() + x
    return [x]


@pytest.mark.parametrize(
    ("function", "turns", "handed"),
    [(climb, 5, 1), (two_values, 4, 2), (from_the_arguments, 4, 1)],
    ids=["climb", "two", "arguments"],
)
def test_rolled(function: Function, turns: int, handed: int) -> None:
    """The same bits, from parts that are as small as they should be."""
    module, given = recorded(function)
    loop = find_loop(module.graph)
    assert loop is not None
    assert (len(loop.turns), len(loop.first)) == (turns, handed)
    rolled, parts = parts_of(module, loop, given)
    assert all(len(part.graph.nodes) < len(module.graph.nodes) for part in parts)
    for scale in (1.0, -2.0):
        other = [leaf * scale for leaf in given]
        torch.testing.assert_close(list(rolled(*other)), function(*other), rtol=0, atol=0)


def test_what_is_overwritten_is_overwritten_last() -> None:
    """An argument that the turns read keeps its value until they are done."""

    def function(x: Tensor, w: Tensor) -> list[Tensor]:
        halved = w / 2
        made = x
        for _ in range(4):
            made = (made @ w).tanh() + x
        w.copy_(halved)
        return [made]

    module, given = recorded(function)
    loop = find_loop(module.graph)
    assert loop is not None
    rolled, _ = parts_of(module, loop, [leaf.clone() for leaf in given])
    one, other = ([leaf.clone() for leaf in given] for _ in range(2))
    torch.testing.assert_close(list(rolled(*one)), function(*other), rtol=0, atol=0)
    torch.testing.assert_close(one, other, rtol=0, atol=0)


def another_matrix(x: Tensor, w: Tensor) -> list[Tensor]:
    """Layers of a network: each turn has weights of its own."""
    for row in range(3):
        x = (x * w[row]).tanh() + x
    return [x]


def all_turns(x: Tensor, w: Tensor) -> list[Tensor]:
    """A history of the turns."""
    made = [x]
    for _ in range(4):
        made.append((made[-1] @ w).tanh() + 1)
    return [torch.stack(made)]


def two_turns(x: Tensor, w: Tensor) -> list[Tensor]:
    """Too short."""
    for _ in range(2):
        x = (x @ w).tanh().sin().cos().exp().tanh() + x
    return [x]


def overwriting(x: Tensor, w: Tensor) -> list[Tensor]:
    """Turns that change an argument."""
    for _ in range(4):
        w.add_(x @ w)
    return [x + w]


def second_last(x: Tensor, w: Tensor) -> list[Tensor]:
    """Each turn reads what the last two made."""
    a, b = x, w
    for _ in range(5):
        a, b = b, (a @ b).tanh().sin()
    return [b]


@pytest.mark.parametrize(
    "function", [another_matrix, all_turns, two_turns, overwriting, second_last], ids=lambda function: function.__name__
)
def test_not_a_loop(function: Function) -> None:
    """Whatever looks alike but is not is left as it is."""
    assert find_loop(recorded(function)[0].graph) is None


def test_a_graph_without_operations() -> None:
    """Nothing to find."""
    assert find_loop(recorded(lambda x, w: [x, w])[0].graph) is None
