"""Batch and group norm as pure functions: padding left out, running statistics replaced, gradients in few passes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm


class Padding:
    """Which examples of the batch now in the model are real; batch norm asks."""

    weights: Tensor | None = None
    needs_two: bool = False
    """Set once a batch norm has seen maps of one pixel, where a batch of one example has no variance."""
    explicit: bool = False
    """Write norms out in simple operations: ``vmap`` gives PyTorch's own a layout that costs copies."""

    @contextmanager
    def of(self, weights: Tensor | None) -> Iterator[None]:
        """For the duration of a call."""
        self.weights = weights
        try:
            yield
        finally:
            self.weights = None


def with_functional_norms(module: nn.Module, padding: Padding) -> nn.Module:
    """The module with its batch and group norms replaced."""
    if isinstance(module, _BatchNorm):
        return FunctionalBatchNorm(module, padding)
    if isinstance(module, nn.GroupNorm):
        return FunctionalGroupNorm(module, padding)
    for parent in list(module.modules()):
        for name, child in parent.named_children():
            if isinstance(child, (_BatchNorm, nn.GroupNorm)):
                setattr(parent, name, with_functional_norms(child, padding))
    return module


class BatchNormalise(torch.autograd.Function):
    """y = (x − m)·r·weight + bias with m = Σ s·x, v = Σ s·(x − m)² and r = 1/√(v + ε), over the axes but the channels'.

    s is what each value counts: 1/n or, for padding, 0. With the gradient g of y, A = Σ g and B = Σ g·(x − m),

        dx = r·weight·(g − s·A − s·(x − m)·r²·B),  dweight = r·B,  dbias = A.

    Differentiated operation by operation it would take twice as many passes over all values.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(
        maps: Tensor, share: Tensor | float, weight: Tensor | None, bias: Tensor | None, eps: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """(y, m, v)."""
        values, over, shape = _exact(maps), *_axes(maps)
        if isinstance(share, Tensor):
            mean = (values * share).sum(over)
            variance = ((values - mean.reshape(shape)).square() * share).sum(over)
        else:
            variance, mean = torch.var_mean(values, over, correction=0)
        factor = torch.rsqrt(variance + eps)
        normal = (values - mean.reshape(shape)) * _times(factor, weight).reshape(shape)
        return _plus(normal, bias, shape).to(maps.dtype), mean, variance

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
        """Keep what the gradient is made of."""
        maps, ctx.share, weight, bias, ctx.eps = inputs
        ctx.affine = weight is not None, bias is not None
        given = (ctx.share, weight)
        ctx.save_for_backward(maps, *output[1:], *(tensor for tensor in given if isinstance(tensor, Tensor)))
        ctx.padded = isinstance(ctx.share, Tensor)
        if ctx.padded:
            ctx.share = None
        ctx.mark_non_differentiable(*output[1:])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        """The gradient with respect to x, weight and bias."""
        maps, mean, variance, *rest = ctx.saved_tensors
        share = rest.pop(0) if ctx.padded else ctx.share
        weight = rest.pop(0) if ctx.affine[0] else None
        over, shape = _axes(maps)
        centred, given = _exact(maps) - mean.reshape(shape), _exact(gradient)
        a, b = given.sum(over), (given * centred).sum(over)
        factor = torch.rsqrt(variance + ctx.eps)
        common = (a.reshape(shape) + centred * (factor.square() * b).reshape(shape)) * share
        of_maps = (given - common) * _times(factor, weight).reshape(shape)
        return of_maps.to(maps.dtype), None, factor * b if ctx.affine[0] else None, a if ctx.affine[1] else None, None


class GroupNormalise(torch.autograd.Function):
    """y = (x − m)·r·weight + bias, m and v of each example and group; see ``BatchNormalise``.

    Per example and channel A = Σ g and B = Σ g·(x − m) over the pixels; the sums over a group are Σ weight·A and
    Σ weight·B, those over the examples are dbias and dweight.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(maps: Tensor, weight: Tensor, bias: Tensor, groups: int, eps: float) -> tuple[Tensor, Tensor, Tensor]:
        """(y, m, r)."""
        values = _in_groups(_exact(maps), groups)
        variance, mean = torch.var_mean(values, list(range(2, values.dim())), correction=0, keepdim=True)
        factor, shape = torch.rsqrt(variance + eps), _axes(maps)[1]
        normal = ((values - mean) * factor).reshape(maps.shape)
        return _plus(normal * weight.reshape(shape), bias, shape).to(maps.dtype), mean, factor

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
        """Keep what the gradient is made of."""
        maps, weight, _, ctx.groups, _ = inputs
        ctx.save_for_backward(maps, weight, *output[1:])
        ctx.mark_non_differentiable(*output[1:])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        """The gradient with respect to x, weight and bias."""
        maps, weight, mean, factor = ctx.saved_tensors
        centred, given = _in_groups(_exact(maps), ctx.groups) - mean, _in_groups(_exact(gradient), ctx.groups)
        pixels = list(range(3, centred.dim()))
        a, b = given.sum(pixels, keepdim=True), (given * centred).sum(pixels, keepdim=True)
        weights = weight.reshape(1, ctx.groups, -1, *[1] * len(pixels))
        share = mean.numel() / maps.numel()
        of_mean, of_factor = (weights * a).sum(2, keepdim=True) * share, (weights * b).sum(2, keepdim=True) * share
        of_maps = (given * weights - of_mean - centred * (factor.square() * of_factor)) * factor
        of_weight, of_bias = (b * factor).sum(0).flatten(), a.sum(0).flatten()
        return of_maps.reshape(maps.shape).to(maps.dtype), of_weight, of_bias, None, None


class FunctionalBatchNorm(nn.Module):
    """Batch norm that replaces its running statistics in place of writing into them, and leaves padding out.

    With weights w ∈ {0, 1}: mean = Σ w x / Σ w over examples and pixels, var likewise; the running variance takes the
    unbiased one, as ``torch.nn.BatchNorm2d`` does.
    """

    weight: Tensor | None
    bias: Tensor | None
    running_mean: Tensor | None
    running_var: Tensor | None
    num_batches_tracked: Tensor | None

    def __init__(self, norm: _BatchNorm, padding: Padding) -> None:
        super().__init__()
        self.eps, self.momentum, self.padding = norm.eps, norm.momentum, padding
        self.register_parameter("weight", norm.weight)
        self.register_parameter("bias", norm.bias)
        for name in ("running_mean", "running_var", "num_batches_tracked"):
            self.register_buffer(name, getattr(norm, name))

    def forward(self, maps: Tensor) -> Tensor:
        """Normalised feature maps [B, C, …]."""
        if not self.training and self.running_mean is not None:
            return torch.nn.functional.batch_norm(
                maps, self.running_mean, self.running_var, self.weight, self.bias, False, 0.0, self.eps
            )
        normal, mean, variance, count = self._by_batch(maps)
        if self.training and self.running_mean is not None:
            assert self.running_var is not None
            assert self.num_batches_tracked is not None
            seen = self.num_batches_tracked + 1
            factor = 1 / seen.to(mean.dtype) if self.momentum is None else self.momentum
            unbiased = variance.detach() * count / (count - 1).clamp(min=1)
            self.running_mean = self.running_mean + factor * (mean.detach() - self.running_mean)
            self.running_var = self.running_var + factor * (unbiased - self.running_var)
            self.num_batches_tracked = seen
        return normal

    def _by_batch(self, maps: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Normalised by the batch's own statistics; these, and over how many values they went."""
        weights, pixels = self.padding.weights, maps[0, 0].numel()
        if pixels == 1:
            self.padding.needs_two = True
        if weights is None and not self.padding.explicit:
            normal = torch.nn.functional.batch_norm(maps, None, None, self.weight, self.bias, True, 0.0, self.eps)
            variance, mean = torch.var_mean(_exact(maps.detach()), _axes(maps)[0], correction=0)
            return normal, mean, variance, mean.new_full((), len(maps) * pixels)
        share: Tensor | float = 1 / (len(maps) * pixels)
        count = _exact(maps).new_full((), len(maps) * pixels)
        if weights is not None:
            count = (weights.sum() * pixels).to(count.dtype).clamp(min=1)
            share = weights.to(count.dtype).reshape(-1, *[1] * (maps.dim() - 1)) / count
        normal, mean, variance = BatchNormalise.apply(maps, share, self.weight, self.bias, self.eps)  # type: ignore[no-untyped-call]
        return normal, mean, variance, count


class FunctionalGroupNorm(nn.Module):
    """Group norm of each example, as ``torch.nn.GroupNorm``."""

    weight: Tensor | None
    bias: Tensor | None

    def __init__(self, norm: nn.GroupNorm, padding: Padding) -> None:
        super().__init__()
        self.groups, self.eps, self.padding = norm.num_groups, norm.eps, padding
        self.register_parameter("weight", norm.weight)
        self.register_parameter("bias", norm.bias)

    def forward(self, maps: Tensor) -> Tensor:
        """Normalised feature maps [B, C, …]."""
        if not self.padding.explicit or self.weight is None:
            return torch.nn.functional.group_norm(maps, self.groups, self.weight, self.bias, self.eps)
        normal: Tensor
        normal, _, _ = GroupNormalise.apply(maps, self.weight, self.bias, self.groups, self.eps)  # type: ignore[no-untyped-call]
        return normal


def _axes(maps: Tensor) -> tuple[list[int], list[int]]:
    """All axes but the channels'; and the shape of one number a channel."""
    return [0, *range(2, maps.dim())], [1, -1, *[1] * (maps.dim() - 2)]


def _in_groups(maps: Tensor, groups: int) -> Tensor:
    batch, channels, *sides = maps.shape
    return maps.reshape(batch, groups, channels // groups, *sides)


def _times(factor: Tensor, weight: Tensor | None) -> Tensor:
    return factor if weight is None else factor * weight


def _plus(normal: Tensor, bias: Tensor | None, shape: list[int]) -> Tensor:
    return normal if bias is None else normal + bias.reshape(shape)


def _exact(maps: Tensor) -> Tensor:
    """In the precision of the statistics."""
    return maps.to(torch.float32) if maps.dtype in (torch.bfloat16, torch.float16) else maps
