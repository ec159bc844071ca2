"""What a compiled step writes: equal operations once, what kernels read once; no number changes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from fedretain.engines.captured import straighten, without_layout
from fedretain.engines.settling import look_before_relu, maps_of, settle, share_equal

aten = torch.ops.aten
CLIENTS, BATCH, CHANNELS, SIDE = 2, 3, 20, 4


@torch.library.custom_op("fedretain_tests::kernel", mutates_args=())
def kernel(maps: Tensor, weights: Tensor) -> Tensor:
    """Stands for a convolution: something of maps [B, K·C, H, W] and weights [K·O, C, R, S]."""
    return (maps * weights.sum()).contiguous(memory_format=torch.channels_last)


@kernel.register_fake
def _(maps: Tensor, weights: Tensor) -> Tensor:
    return torch.empty_like(maps, memory_format=torch.channels_last)


KERNEL = kernel._opoverload


def recorded(function: Any, *given: Tensor) -> fx.GraphModule:
    """A function's operations as a captured step has them."""
    module = make_fx(function, tracing_mode="fake")(*given)
    without_layout(module.graph)
    module.recompile()
    return module


def targets(module: fx.GraphModule) -> list[Any]:
    """What is called, in order."""
    return [node.target for node in module.graph.nodes if node.op == "call_function"]


def beside(maps: Tensor) -> Tensor:
    """[K, B, C, H, W] as [B, K·C, H, W]."""
    return maps.permute(1, 0, 2, 3, 4).reshape(BATCH, CLIENTS * CHANNELS, SIDE, SIDE)


def apart(maps: Tensor) -> Tensor:
    """The other way."""
    return maps.reshape(BATCH, CLIENTS, CHANNELS, SIDE, SIDE).permute(1, 0, 2, 3, 4)


def random(*shape: int) -> Tensor:
    """The same numbers every time."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def test_equal_operations_are_computed_once() -> None:
    """The same operation of the same values, through several of them."""

    def function(a: Tensor) -> Tensor:
        return (a * 2).exp() + (a * 2).exp() + (a * 2.5).exp()

    given = random(5)
    module = recorded(function, given)
    share_equal(module.graph)
    module.recompile()
    assert targets(module).count(aten.mul.Tensor) == 2
    assert targets(module).count(aten.exp.default) == 2
    assert torch.equal(module(given), function(given))


def test_one_and_true_are_different_arguments() -> None:
    """1, 1.0 and True are equal in Python, and not the same argument."""
    given = torch.arange(3)
    module = recorded(lambda a: (a * 1, a * 1.0, a * True), given)
    share_equal(module.graph)
    module.recompile()
    assert targets(module).count(aten.mul.Tensor) == 3
    assert [value.dtype for value in module(given)] == [torch.int64, torch.float32, torch.int64]


def test_what_is_written_over_is_read_again() -> None:
    """A value before and after it was changed are two."""

    def function(a: Tensor) -> Tensor:
        b = a * 1
        first = b + 1
        b.mul_(3)
        return first + (b + 1)

    given = random(4)
    module = recorded(function, given)
    share_equal(module.graph)
    module.recompile()
    assert torch.equal(module(given), function(given))
    assert not torch.equal(module(given), 2 * (given + 1))


def test_random_numbers_are_drawn_twice() -> None:
    """Two draws are two."""
    module = recorded(lambda a: torch.rand_like(a) - torch.rand_like(a), random(4))
    share_equal(module.graph)
    module.recompile()
    assert targets(module).count(aten.rand_like.default) == 2


def function(maps: Tensor, weights: Tensor, given: Tensor) -> tuple[Tensor, Tensor]:
    """A value that two kernels and a sum read; weights in two places."""
    inner = (maps * 2).relu()
    one = kernel(beside(inner), weights.reshape(-1, *weights.shape[2:]).half().float())
    two = kernel(beside(inner), weights.half().float().reshape(-1, *weights.shape[2:]))
    return apart(one) + inner, two + given


def inputs() -> tuple[Tensor, Tensor, Tensor]:
    """Maps, weights and a gradient."""
    maps = random(CLIENTS, BATCH, CHANNELS, SIDE, SIDE)
    return maps, random(CLIENTS, 4, CHANNELS, 3, 3), random(BATCH, CLIENTS * CHANNELS, SIDE, SIDE)


def test_what_kernels_read_is_written_once() -> None:
    """Both kernels read one settled map, channels side by side, and so does who else wants it."""
    given = inputs()
    module = recorded(function, *given)
    before = module(*given)
    assert settle(module.graph, [KERNEL])
    straighten(module.graph)
    module.recompile()
    first, second = (node for node in module.graph.nodes if node.target == KERNEL)
    assert first.args[0] is second.args[0]
    maps = first.args[0]
    assert maps.meta["settled"]
    assert maps.meta["val"].is_contiguous(memory_format=torch.channels_last)
    relu = next(node for node in module.graph.nodes if node.target == aten.relu.default)
    assert len(relu.users) == 1, "everybody else reads the settled map"
    for one, other in zip(module(*given), before, strict=True):
        assert torch.equal(one, other)


def test_without_kernels_nothing_is_settled() -> None:
    """Models without convolutions stay as they are."""
    module = recorded(lambda a: a.relu() + 1, random(3))
    code = module.code
    assert not settle(module.graph, [KERNEL])
    module.recompile()
    assert module.code == code


def gradients(maps: Tensor, weights: Tensor, one: Tensor, other: Tensor) -> Tensor:
    """The gradient of a ReLU that two paths lead to."""
    before = apart(kernel(beside(maps), weights.reshape(-1, *weights.shape[2:]))) * 3
    met = aten.threshold_backward(apart(kernel(one, one)) + apart(kernel(other, other)), before.relu(), 0)
    return met.sum() + (met * before).sum()


def test_gradients_that_meet_are_added_once() -> None:
    """Their sum behind the ReLU is settled; the mask is that of what comes before the ReLU."""
    maps, weights, one = inputs()
    given = (maps, weights, one, one + 1)
    module = recorded(gradients, *given)
    before = module(*given)
    settle(module.graph, [KERNEL])
    straighten(module.graph)
    module.graph.eliminate_dead_code()
    module.recompile()
    (met,) = (node for node in module.graph.nodes if node.target == aten.threshold_backward.default)
    assert met.args[1].target == aten.mul.Tensor
    (turned,) = met.users
    assert turned.target == aten.permute.default
    assert torch.equal(module(*given), before)


@pytest.mark.parametrize(("both", "moved"), [(False, True), (True, False)], ids=["one map", "two maps"])
def test_the_mask_of_two_maps_is_read(both: bool, moved: bool) -> None:
    """What two maps were added up for is read behind the ReLU, where it is in memory anyway."""

    def function(maps: Tensor, more: Tensor, gradient: Tensor) -> Tensor:
        before = maps + more if both else maps + 1
        return aten.threshold_backward(gradient, before.relu(), 0)  # type: ignore[no-any-return]

    maps = random(CLIENTS, BATCH, CHANNELS, SIDE, SIDE)
    module = recorded(function, maps, maps * 2, maps * 3)
    (node,) = (node for node in module.graph.nodes if node.target == aten.threshold_backward.default)
    look_before_relu(node, [KERNEL])
    assert (node.args[1].target == aten.add.Tensor) == moved
    assert len(maps_of(node.args[0], [KERNEL])) == 1
