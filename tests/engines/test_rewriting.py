"""Rewritten graphs compute the same: what does nothing is dropped, memory is used again only where nobody looks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from fedretain.engines.rewriting import fold_constants, simplify, use_memory_again
from fedretain.randomness import stream

aten = torch.ops.aten


def numbers(*shape: int, purpose: str = "rewriting") -> Tensor:
    return torch.from_numpy(stream(0, purpose, *shape).normal(size=shape)).to(torch.float32)


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


@pytest.mark.parametrize(
    ("function", "left"),
    [
        (lambda x: aten.mul.Tensor(aten.ones_like.default(x), x) + 1, 1),
        (lambda x: aten.mul.Tensor(x, aten.expand.default(aten.ones.default([3, 1]), [2, 3, 5])) + 1, 1),
        (lambda x: aten.mul.Tensor(x, aten.zeros_like.default(x)) + 1, 2),
        (lambda x: aten.mul.Tensor(aten.ones.default([4, 2, 3, 5]), x) + 1, 2),
    ],
)
def test_a_product_with_ones_is_dropped(function: Callable[[Tensor], Tensor], left: int) -> None:
    """Unless they give it another shape."""
    x = numbers(2, 3, 5)
    module = make_fx(function)(x)
    fold_constants(module)
    module.recompile()
    assert sum(node.op == "call_function" for node in module.graph.nodes) == left
    assert torch.equal(module(x), function(x))


def rewritten(function: Callable[[Tensor], Any], argument: Tensor) -> tuple[Any, list[str]]:
    """The function with memory used again, and its operations that write in place."""
    module = make_fx(function)(argument)
    use_memory_again(module.graph)
    module.recompile()
    names = [str(node.target) for node in module.graph.nodes if node.op == "call_function"]
    return module, [name for name in names if name.split(".")[1].endswith("_") or "grad_input" in name]


@pytest.mark.parametrize(
    ("function", "in_place"),
    [
        (lambda x: (x * x).relu().exp(), ["aten.relu_.default", "aten.exp_.default"]),
        (lambda x: x.relu(), []),
        (lambda x: x.view(6, 5).exp(), []),
        (lambda x: (x * x).view(6, 5).exp(), ["aten.exp_.default"]),
        (lambda x: x * x.exp(), ["aten.mul_.Tensor"]),
        (lambda x: (lambda y: (y.exp(), y + x))(x * x), []),
        (lambda x: (lambda y: (y.transpose(1, 2).exp(), y.sum()))(x * x), []),
        (lambda x: (lambda y: y.transpose(1, 2).contiguous() * 2 * x.sum())(x * x), ["aten.mul_.Tensor"]),
        (lambda x: (lambda y: aten.threshold_backward(y, x, 0))(x * x), ["aten.threshold_backward.grad_input"]),
        (lambda x: (x[:, :1] * x[:, :1]) * x, []),
    ],
)
def test_only_memory_that_nobody_else_reads_is_written_over(
    function: Callable[[Tensor], Any], in_place: list[str]
) -> None:
    """Arguments, views of them, values that are read again and smaller operands stay; the numbers are the same."""
    x = numbers(2, 3, 5)
    kept = x.clone()
    module, found = rewritten(function, x)
    assert found == in_place
    torch.testing.assert_close(module(x), function(x), rtol=0, atol=0)
    assert torch.equal(x, kept)
