"""Where a recorded graph takes our kernels in place of PyTorch's operations."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor, fx, nn

from fedretain.engines.native.kernels import (
    LEAST_WIDTH,
    Gradients,
    Padding,
    add_scaled_,
    available,
    convolve,
    maps_gradient,
    pool,
    pool_backward,
    weights_gradient,
)
from fedretain.engines.nodes import alike, shape_of, strides_of, type_of

aten = torch.ops.aten

FULL = 16
"""Channels from which PyTorch's convolutions keep a vector of the processor full."""
MANY = 2**14
"""Parameters of a tensor from which passing by once saves time."""
LITTLE = 2_000_000
"""Products of a convolution below which calling PyTorch's takes longer than ours."""


def pool_in_one_pass(graph: fx.Graph) -> None:
    """2 × 2 max-pooling by our kernel, to the same bits, in a third to a fifth of the time that slices take."""
    for node in list(graph.nodes):
        if node.target != aten.max_pool2d_with_indices.default:
            continue
        maps, *window = node.args
        value = maps.meta.get("val")
        if window not in ([[2, 2]], [[2, 2], [2, 2]]) or node.kwargs or value is None or not value.is_contiguous():
            continue
        height, width = value.shape[-2:]
        if height % 2 or width % 2 or width < LEAST_WIDTH.get(value.dtype, width + 1) or not available(value.dtype):
            continue
        parts = {user.args[1]: user for user in node.users if user.target is operator.getitem}
        backward = set(parts[1].users) if 1 in parts else set()
        if any(user.target != aten.max_pool2d_with_indices_backward.default for user in backward):
            continue
        node.target, node.args = pool, (maps,)
        node.meta["fresh"] = True
        for user in backward:
            user.target, user.args = pool_backward, (user.args[0], user.args[-1])
            user.meta["fresh"] = True


def update_in_one_pass(graph: fx.Graph) -> None:
    """``w.add_(g.mul_(c))`` with a number c by our kernel, to the same bits: w and g pass by once, not twice."""
    for node in list(graph.nodes):
        if node.target is not aten.add_.Tensor or node.kwargs:
            continue
        numbers, change = node.args
        if not isinstance(change, fx.Node) or change.target is not aten.mul_.Tensor or set(change.users) != {node}:
            continue
        gradient, factor = change.args
        shape = shape_of(numbers)
        if shape is None or not alike(numbers, gradient) or shape_of(factor) != () or torch.Size(shape).numel() < MANY:
            continue
        same_order = strides_of(numbers) == strides_of(gradient) and numbers.meta["val"].is_contiguous()
        if same_order and available(type_of(numbers), "add_scaled"):
            node.target, node.args = add_scaled_, (numbers, gradient, factor)
            graph.erase_node(change)


def uses_kernels(model: nn.Module) -> bool:
    """Whether a model has layers for which there are kernels."""
    return any(isinstance(layer, nn.Conv2d) for layer in model.modules())


def few_channels(model: nn.Module) -> bool:
    """Whether a model has convolutions that our kernels do faster."""
    layers = [layer for layer in model.modules() if isinstance(layer, nn.Conv2d) and layer.stride == (1, 1)]
    return any(layer.in_channels < FULL and layer.out_channels <= FULL for layer in layers)


def convolve_few_channels(graph: fx.Graph) -> None:
    """Convolutions by our kernels where those are faster; their sums have another order, so the last bits differ."""
    for node in list(graph.nodes):
        if node.target == aten.convolution.default:
            maps, weights, bias, *how = node.args
            padding = _padding(maps, weights, how)
            outputs, _ = _channels(weights)
            if padding is not None and (outputs < FULL or _little(node, weights)):
                node.target, node.args = convolve, (maps, weights, bias, padding)
                node.meta["fresh"] = True
        elif node.target == aten.convolution_backward.default:
            gradient, maps, weights, _, *how, wanted = node.args
            padding = _padding(maps, weights, how)
            outputs, inputs = _channels(weights)
            few = inputs < FULL and outputs <= FULL
            if padding is not None and (few or _little(gradient, weights)):
                node.target, node.args = convolve_backward, (gradient, maps, weights, padding, wanted)
                node.meta["fresh"] = True


def convolve_backward(
    gradient: Tensor, maps: Tensor, weights: Tensor, padding: Padding, wanted: list[bool]
) -> Gradients:
    """The gradients of maps, weights and bias that are wanted."""
    of_maps = maps_gradient(gradient, maps, weights, padding) if wanted[0] else None
    of_weights, of_bias = weights_gradient(gradient, maps, weights, padding) if any(wanted[1:]) else (None, None)
    return of_maps, of_weights if wanted[1] else None, of_bias if wanted[2] else None


def _channels(weights: Any) -> tuple[int, int]:
    outputs, inputs, *_ = shape_of(weights) or (FULL, FULL)
    return outputs, inputs


def _little(out: Any, weights: Any) -> bool:
    made, window = shape_of(out), shape_of(weights)
    if made is None or window is None:
        return False
    return torch.Size(made).numel() * torch.Size(window[1:]).numel() < LITTLE


def _padding(maps: Any, weights: Any, how: list[Any]) -> Padding | None:
    """The padding of a convolution that our kernels can do; None for others."""
    image, window = shape_of(maps), shape_of(weights)
    if image is None or window is None or len(image) != 4 or type_of(maps) != type_of(weights):
        return None
    stride, padding, dilation, transposed, _, groups = how
    plain = [*stride, *dilation] == [1, 1, 1, 1] and not transposed and groups == 1
    sizes = list(zip(padding, image[2:], window[2:], strict=False))
    fits = len(sizes) == 2 and all(0 <= around < k <= size + 2 * around for around, size, k in sizes)
    if not (plain and fits and maps.meta["val"].is_contiguous() and available(type_of(maps))):
        return None
    return padding[0], padding[1]
