"""Recorded steps rewritten for a GPU: the passes that need none change no number."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch.func import grad, vmap
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F

from fedretain.engines.captured import (
    batch_convolutions,
    pool_side_by_side,
    straighten,
    sum_in_memory_order,
    without_layout,
    write_back,
)

aten = torch.ops.aten
CLIENTS, BATCH = 3, 5


def random(*shape: int) -> Tensor:
    """The same numbers every time."""
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(sum(shape)))


def recorded(function: Callable[..., Any], *given: Tensor) -> fx.GraphModule:
    """A function's operations."""
    with torch.no_grad():
        return make_fx(function)(*given)


def pooled(maps: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """Two poolings of every client's maps [B, K·C, H, W] with a bias each, and the gradients."""

    def one(maps: Tensor, bias: Tensor) -> Tensor:
        half = F.max_pool2d((maps + bias).relu(), 2)
        return F.max_pool2d((half * 2 + bias).relu(), 4).square().sum()

    apart = maps.reshape(BATCH, CLIENTS, -1, 8, 8)
    gradients: tuple[Tensor, Tensor] = vmap(grad(one, argnums=(0, 1)), in_dims=(1, 0), out_dims=(1, 0))(apart, bias)
    return gradients


def shapes_of(graph: fx.Graph, target: Any) -> set[tuple[int, ...]]:
    """The shapes that operations of a kind are given."""
    return {tuple(node.args[0].meta["val"].shape) for node in graph.nodes if node.target == target}


@pytest.mark.parametrize(("channels", "beside"), [(20, True), (6, False)], ids=["many", "few"])
def test_pooling_side_by_side(channels: int, beside: bool) -> None:
    """Maps of many channels are pooled as [B, K·C, H, W], others, which lie plane by plane, as [K·B, C, H, W]."""
    maps, bias = random(BATCH, CLIENTS * channels, 8, 8), random(CLIENTS, 1)
    module = recorded(pooled, maps, bias)
    without_layout(module.graph)
    pool_side_by_side(module.graph)
    sum_in_memory_order(module.graph)
    straighten(module.graph)
    module.graph.lint()
    module.recompile()
    torch.testing.assert_close(module(maps, bias), pooled(maps, bias), rtol=0, atol=0)
    shape = (BATCH, CLIENTS * channels) if beside else (CLIENTS * BATCH, channels)
    found = shapes_of(module.graph, aten.max_pool2d_with_indices.default)
    assert {sides[:2] for sides in found} == {shape}
    stacked = {tuple(node.meta["val"].shape[:2]) for node in module.graph.nodes if node.target == aten.reshape.default}
    assert ((CLIENTS * BATCH, channels) in stacked) is not beside, "turned around and back"


def test_sums_take_the_channels_last() -> None:
    """⟨w, w⟩ of every client's weights [O, C, R, S] adds up in the order [O, R, S, C]; the value is the same."""
    weights = random(CLIENTS, 4, 20, 3, 3)
    module = recorded(lambda weights: vmap(lambda w: (w * w).sum())(weights), weights)
    sum_in_memory_order(module.graph)
    module.recompile()
    torch.testing.assert_close(module(weights), weights.square().flatten(1).sum(1))
    assert shapes_of(module.graph, aten.sum.dim_IntList) == {(CLIENTS, 4, 3, 3, 20)}


@pytest.mark.parametrize(
    ("channels", "outputs", "stride", "kinds"),
    [
        (20, 24, 1, ["convolve", "convolve_input_gradient", "convolve_weight_gradient"]),
        (20, 24, 2, ["convolve", "convolve_input_gradient", "convolve_weight_gradient"]),
        (3, 6, 1, ["folded_convolve", "folded_convolve", "folded_weight_gradient"]),
    ],
)
def test_convolutions_of_many_clients(channels: int, outputs: int, stride: int, kinds: list[str]) -> None:
    """Forward and both gradients become ours, by the number of channels, and give maps of the same shapes."""
    maps = torch.empty(CLIENTS, BATCH, channels, 8, 8)
    weights, bias = torch.empty(CLIENTS, outputs, channels, 3, 3), torch.empty(CLIENTS, outputs)

    def all_gradients(maps: Tensor, weights: Tensor, bias: Tensor) -> Any:
        def one(maps: Tensor, weights: Tensor, bias: Tensor) -> Tensor:
            return F.conv2d(maps, weights, bias, stride, 1).square().sum()

        return vmap(grad(one, argnums=(0, 1, 2)))(maps, weights, bias)

    module = recorded(all_gradients, maps, weights, bias)
    without_layout(module.graph)
    batch_convolutions(module.graph)
    straighten(module.graph)
    module.graph.lint()
    module.recompile()
    ours = [str(node.target).split(".")[1] for node in module.graph.nodes if "fedretain" in str(node.target)]
    assert sorted(ours) == sorted(kinds)
    assert not any(node.target == aten.convolution.default for node in module.graph.nodes)
    made = module(*(tensor.to("meta") for tensor in (maps, weights, bias)))
    assert [tensor.shape for tensor in made] == [maps.shape, weights.shape, bias.shape]


def test_the_new_carry_is_written_over_the_old_one() -> None:
    """Also where the new values lie in the old ones' memory: here the two tensors change places."""
    first, second = random(4), random(4) + 1
    module = recorded(lambda a, b: [b.view(4), a + 1, (a * b).sum()], first, second)
    write_back(module.graph, 2)
    module.recompile()
    a, b = first.clone(), second.clone()
    (result,) = module(a, b)
    torch.testing.assert_close((a, b, result), (second, first + 1, (first * second).sum()))
