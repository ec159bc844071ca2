"""Questions about the nodes of a recorded graph: shapes, who reads whose memory, what may be overwritten."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

aten = torch.ops.aten

VIEWS = frozenset(
    {
        aten.view.default,
        aten._unsafe_view.default,
        aten.expand.default,
        aten.transpose.int,
        aten.t.default,
        aten.permute.default,
        aten.unsqueeze.default,
        aten.squeeze.dims,
        aten.squeeze.dim,
        aten.select.int,
        aten.slice.Tensor,
        aten.alias.default,
        aten.detach.default,
        aten.as_strided.default,
        aten.reshape.default,
        aten.unbind.int,
        aten.split.Tensor,
        operator.getitem,
    }
)

_FRESH = frozenset(
    {
        aten.bmm.default,
        aten.mm.default,
        aten.baddbmm.default,
        aten.addmm.default,
        aten.add.Tensor,
        aten.sub.Tensor,
        aten.mul.Tensor,
        aten.div.Tensor,
        aten.neg.default,
        aten.exp.default,
        aten.relu.default,
        aten.threshold_backward.default,
        aten.sum.dim_IntList,
    }
)
_FRESH_PARTS = frozenset({aten.convolution_backward.default})
"""Operations whose results are several tensors, each with memory of its own."""


def shape_of(node: Any) -> tuple[int, ...] | None:
    """The shape that was recorded, or None where there is no tensor."""
    shape = getattr(_value(node), "shape", None)
    return None if shape is None else tuple(shape)


def type_of(node: Any) -> Any:
    """The type of numbers that was recorded."""
    return getattr(_value(node), "dtype", None)


def strides_of(node: Any) -> tuple[int, ...] | None:
    """How the numbers lay in memory when they were recorded."""
    stride = getattr(_value(node), "stride", None)
    return tuple(stride() if callable(stride) else stride) if stride is not None else None


def key_of(arguments: Any) -> Any:
    """Equal for equal arguments only: 1, 1.0 and True are not."""
    if isinstance(arguments, (list, tuple)):
        return (list, *(key_of(part) for part in arguments))
    if isinstance(arguments, dict):
        return (dict, *((name, key_of(part)) for name, part in arguments.items()))
    return arguments if isinstance(arguments, fx.Node) else (type(arguments), str(arguments))


def alike(one: Any, other: Any) -> bool:
    """Whether two nodes have the same shape and type."""
    return shape_of(one) is not None and shape_of(one) == shape_of(other) and type_of(one) == type_of(other)


def writes(node: fx.Node) -> bool:
    """Whether a node changes its first argument."""
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable


def readers(node: fx.Node) -> set[fx.Node]:
    """Everything that reads a node's memory, through views too."""
    found: set[fx.Node] = set()
    waiting = list(node.users)
    while waiting:
        user = waiting.pop()
        if user not in found:
            found.add(user)
            if user.target in VIEWS:
                waiting.extend(user.users)
    return found


def views_into(node: fx.Node) -> fx.Node:
    """The node whose memory this one may lie in; itself where that is new."""
    while node.target in VIEWS and isinstance(node.args[0], fx.Node):
        node = node.args[0]
    return node


def fresh(node: fx.Node) -> bool:
    """Whether a node's memory is its own, through views that nobody else holds."""
    while node.target in VIEWS and node.target is not aten.expand.default:
        source = node.args[0]
        if not isinstance(source, fx.Node):
            return False
        if node.target is operator.getitem:
            own = source.target in _FRESH_PARTS or source.meta.get("fresh", False)
            return bool(own) and len(node.users) == 1
        if set(source.users) != {node}:
            return False
        node = source
    return node.target in _FRESH or bool(node.meta.get("fresh", False))


def _value(node: Any) -> Any:
    return node.meta.get("val", node.meta.get("tensor_meta")) if isinstance(node, fx.Node) else None
