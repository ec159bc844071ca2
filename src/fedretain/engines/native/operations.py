"""The graph's operations as those of ``play``; each function adds what it takes to a plan."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from fedretain.engines.native.places import (
    FROM_BIAS,
    FROM_NOTHING,
    FROM_OUT,
    Kind,
    Place,
    Unknown,
    expanded,
    flat,
    matrix_like,
    matrix_of,
    strides_of,
)

if TYPE_CHECKING:
    from fedretain.engines.native.program import Plan

aten = torch.ops.aten

LARGEST = 2**18
"""Multiplications of a product above which PyTorch's is as fast."""
DEEPEST = 1024
"""As in ``playing.h``."""


# ---------------------------------------------------------------------- views


def _view(plan: Plan, value: Any, shape: Sequence[int]) -> Place:
    place = plan.place(value, None)
    inner = list(shape[1:])
    if shape[0] != plan.clients or not place.contiguous:
        raise Unknown("a view across clients")
    if -1 in inner:
        known = -int(np.prod(inner, dtype=int))
        inner[inner.index(-1)] = int(np.prod(place.shape, dtype=int)) // known
    return place._replace(shape=tuple(inner), strides=strides_of(inner))


def _transpose(plan: Plan, value: Any, one: int, other: int) -> Place:
    place = plan.place(value, None)
    order = list(range(len(place.shape)))
    one, other = _axis(one, len(order) + 1), _axis(other, len(order) + 1)
    order[one], order[other] = order[other], order[one]
    return _chosen(place, order)


def _unsqueeze(plan: Plan, value: Any, axis: int) -> Place:
    place = plan.place(value, None)
    at = _axis(axis, len(place.shape) + 2)
    shape, strides = list(place.shape), list(place.strides)
    shape.insert(at, 1)
    strides.insert(at, 1)
    return place._replace(shape=tuple(shape), strides=tuple(strides))


def _squeeze(plan: Plan, value: Any, axes: Any) -> Place:
    place = plan.place(value, None)
    gone = {_axis(axis, len(place.shape) + 1) for axis in (axes if isinstance(axes, (list, tuple)) else [axes])}
    return _chosen(place, [at for at in range(len(place.shape)) if at not in gone or place.shape[at] != 1])


def _chosen(place: Place, axes: Sequence[int]) -> Place:
    shape, strides = (tuple(sizes[at] for at in axes) for sizes in (place.shape, place.strides))
    return place._replace(shape=shape, strides=strides)


def _axis(axis: int, count: int) -> int:
    """The number of an axis among those of one client, out of ``count`` with the clients'."""
    inner = axis % count - 1
    if inner < 0:
        raise Unknown("the clients' axis")
    return inner


def _item(plan: Plan, values: Any, which: int) -> Place:
    found = plan.values[values]
    if not isinstance(found, tuple) or isinstance(found, Place):
        raise Unknown("a part of something")
    part: Place = found[which]
    return part


# ---------------------------------------------------------------------- products


def _product(plan: Plan, out: Place, a: Place, b: Place, bias: Place | None, start: int, alpha: Any) -> Place:
    if len(a.shape) != 2 or len(b.shape) != 2 or a.shape[1] != b.shape[0]:
        raise Unknown("a product that is none of matrices")
    if out.strides[1] != 1 and out.shape[1] != 1:
        if start != FROM_OUT:
            raise Unknown("a transposed product")
        turned = [Place(one.buffer, one.shape[::-1], one.strides[::-1]) for one in (out, b, a)]
        _product(plan, turned[0], turned[1], turned[2], None, start, alpha)
        return out
    rows, length, depth = *out.shape, a.shape[1]
    if rows * length * depth > LARGEST or depth > DEEPEST:
        raise Unknown("a large product")
    bias_row = 0
    if bias is not None:
        if bias.shape[-1] != length or (length > 1 and bias.strides[-1] != 1):
            raise Unknown("a bias with gaps")
        bias_row = bias.strides[0] if len(bias.shape) == 2 and bias.shape[0] > 1 else 0
    return plan.emit(
        Kind.PRODUCT,
        out,
        a=a.buffer,
        b=b.buffer,
        c=(bias or out).buffer,
        rows=rows,
        length=length,
        depth=depth,
        a_row=a.strides[0],
        a_next=a.strides[1],
        b_row=b.strides[0],
        b_next=b.strides[1],
        out_row=out.strides[0],
        c_row=bias_row,
        start=start,
        number=0 if alpha == 1 else plan.factor(alpha),
    )


def _bmm(plan: Plan, one: Any, other: Any) -> Place:
    a, b = plan.place(one), plan.place(other)
    return _product(plan, plan.new((a.shape[0], b.shape[1])), a, b, None, FROM_NOTHING, 1)


def _baddbmm(plan: Plan, start: Any, one: Any, other: Any, alpha: Any = 1) -> Place:
    a, b, bias = plan.place(one), plan.place(other), plan.place(start)
    return _product(plan, plan.new((a.shape[0], b.shape[1])), a, b, bias, FROM_BIAS, alpha)


def _baddbmm_(plan: Plan, start: Any, one: Any, other: Any, alpha: Any = 1) -> Place:
    out = plan.place(start)
    a, b = plan.place(one), plan.place(other)
    if out.shape != (a.shape[0], b.shape[1]):
        raise Unknown("a sum of other shape")
    return _product(plan, out, a, b, None, FROM_OUT, alpha)


# ---------------------------------------------------------------------- number by number


def _elementwise(kind: Kind, *, in_place: bool) -> Callable[..., Place]:
    def emit(plan: Plan, one: Any, other: Any) -> Place:
        a, b = plan.place(one), plan.place(other)
        if len(a.shape) != len(b.shape) and not (a.everybody or b.everybody):
            raise Unknown("values of other rank")
        shape = np.broadcast_shapes(a.shape, b.shape)
        if in_place and (shape != a.shape or a.everybody):
            raise Unknown("a smaller value in place")
        out = a if in_place else plan.new(shape)
        to = matrix_of(out)
        if to.next != 1 and to.length != 1:
            raise Unknown("columns with gaps")
        columns: dict[str, int] = {}
        for name, place in (("a", a), ("b", b)):
            wide = expanded(place, shape)
            matrix = matrix_like(wide, shape)
            columns |= {name: place.buffer, f"{name}_row": matrix.row, f"{name}_next": matrix.next}
        return plan.emit(kind, out, rows=to.rows, length=to.length, out_row=to.row, **columns)

    return emit


def _fill(plan: Plan, value: Any, mask: Any, number: float) -> Place:
    a, b = plan.place(value), plan.place(mask, "truths")
    if len(a.shape) != len(b.shape) or np.broadcast_shapes(a.shape, b.shape) != a.shape:
        raise Unknown("a mask of other shape")
    out = plan.new(a.shape)
    to, where = matrix_of(out), matrix_like(expanded(b, a.shape), a.shape)
    source = matrix_like(a, a.shape)
    return plan.emit(
        Kind.FILL,
        out,
        a=a.buffer,
        b=b.buffer,
        rows=to.rows,
        length=to.length,
        a_row=source.row,
        a_next=source.next,
        b_row=where.row,
        b_next=where.next,
        out_row=to.row,
        number=plan.factor(number),
    )


def _relu(*, in_place: bool) -> Callable[..., Place]:
    def emit(plan: Plan, value: Any) -> Place:
        a = plan.place(value)
        out = a if in_place else plan.new(a.shape)
        return plan.emit(Kind.RELU, out, a=a.buffer, **flat(a, out))

    return emit


def _mask(plan: Plan, gradient: Any, value: Any, threshold: float, grad_input: Any = None) -> Place:
    a, b = plan.place(gradient), plan.place(value)
    out = plan.new(a.shape) if grad_input is None else plan.place(grad_input)
    if threshold != 0 or a.shape != b.shape or out.shape != a.shape:
        raise Unknown("a threshold")
    return plan.emit(Kind.MASK, out, a=a.buffer, b=b.buffer, **flat(a, b, out))


def _negative(plan: Plan, value: Any) -> Place:
    return _elementwise(Kind.MULTIPLY, in_place=False)(plan, value, -1.0)


def _at_least(plan: Plan, value: Any, least: Any = None, most: Any = None) -> Place:
    a = plan.place(value)
    if most is not None or not isinstance(least, (int, float)):
        raise Unknown("a clamp")
    out = plan.new(a.shape)
    return plan.emit(Kind.AT_LEAST, out, a=a.buffer, number=plan.factor(least), **flat(a))


# ---------------------------------------------------------------------- rows


def _softmax(plan: Plan, value: Any, axes: Sequence[int], keepdim: bool = False) -> tuple[Place, Place]:
    a = plan.place(value)
    if [_axis(axis, len(a.shape) + 1) for axis in axes] != [len(a.shape) - 1] or len(a.shape) != 2:
        raise Unknown("a softmax over other axes")
    if a.strides[1] != 1 and a.shape[1] != 1:
        raise Unknown("columns with gaps")
    logs = plan.new((a.shape[0], 1) if keepdim else a.shape[:1])
    shares = plan.new(a.shape)
    plan.emit(Kind.SOFTMAX, logs, a=a.buffer, c=shares.buffer, rows=a.shape[0], length=a.shape[1], a_row=a.strides[0])
    return logs, shares


def _logs(plan: Plan, value: Any, axes: Sequence[int], keepdim: bool = False) -> Place:
    return _softmax(plan, value, axes, keepdim)[0]


def _pick(plan: Plan, value: Any, axis: int, index: Any) -> Place:
    a, at = plan.place(value), plan.place(index, "wholes")
    if len(a.shape) != 2 or _axis(axis, 3) != 1 or at.shape != (a.shape[0], 1) or a.strides[1] != 1:
        raise Unknown("a gather")
    out = plan.new(at.shape)
    columns = {"rows": a.shape[0], "length": a.shape[1], "a_row": a.strides[0], "b_row": at.strides[0]}
    return plan.emit(Kind.PICK, out, a=a.buffer, b=at.buffer, **columns)


def _put(*, in_place: bool) -> Callable[..., Place]:
    def emit(plan: Plan, value: Any, axis: int, index: Any, source: Any) -> Place:
        a, at, what = plan.place(value), plan.place(index, "wholes"), plan.place(source)
        if len(a.shape) != 2 or _axis(axis, 3) != 1 or at.shape != (a.shape[0], 1) or what.shape != at.shape:
            raise Unknown("a scatter")
        out = a if in_place else _elementwise(Kind.MULTIPLY, in_place=False)(plan, value, 1.0)
        if out.strides[1] != 1:
            raise Unknown("columns with gaps")
        return plan.emit(
            Kind.PUT,
            out,
            b=at.buffer,
            c=what.buffer,
            rows=a.shape[0],
            length=a.shape[1],
            out_row=out.strides[0],
            b_row=at.strides[0],
            c_row=what.strides[0],
        )

    return emit


def _reduced(kind: Kind) -> Callable[..., Place]:
    def emit(plan: Plan, value: Any, axes: Sequence[int], keepdim: bool = False) -> Place:
        a = plan.place(value)
        if len(axes) != 1 or len(a.shape) > 2:
            raise Unknown("a sum over several axes")
        gone = _axis(axes[0], len(a.shape) + 1)
        kept = [at for at in range(len(a.shape)) if at != gone]
        shape = tuple(1 if at == gone else size for at, size in enumerate(a.shape))
        out = plan.new(shape if keepdim else tuple(a.shape[at] for at in kept))
        rows, row = (a.shape[kept[0]], a.strides[kept[0]]) if kept else (1, 0)
        columns = {"rows": rows, "length": a.shape[gone], "a_row": row, "a_next": a.strides[gone]}
        return plan.emit(kind, out, a=a.buffer, **columns)

    return emit


@functools.cache
def emitted() -> dict[Any, Callable[..., Any]]:
    """What the program can do, by the graph's operations."""
    from fedretain.engines import fusing

    each = {"add": Kind.ADD, "sub": Kind.SUBTRACT, "mul": Kind.MULTIPLY, "div": Kind.DIVIDE}
    found: dict[Any, Callable[..., Any]] = {
        aten.view.default: _view,
        aten.reshape.default: _view,
        aten.transpose.int: _transpose,
        aten.unsqueeze.default: _unsqueeze,
        aten.squeeze.dims: _squeeze,
        aten.squeeze.dim: _squeeze,
        operator.getitem: _item,
        aten.bmm.default: _bmm,
        aten.baddbmm.default: _baddbmm,
        aten.baddbmm_.default: _baddbmm_,
        aten.relu.default: _relu(in_place=False),
        aten.relu_.default: _relu(in_place=True),
        aten.threshold_backward.default: _mask,
        aten.threshold_backward.grad_input: _mask,
        aten.neg.default: _negative,
        aten.clamp.default: _at_least,
        aten.masked_fill.Scalar: _fill,
        fusing.log_sum_exp_and_softmax: _softmax,
        fusing.log_sum_exp: _logs,
        aten.gather.default: _pick,
        aten.scatter_add.default: _put(in_place=False),
        aten.scatter_add_.default: _put(in_place=True),
        aten.sum.dim_IntList: _reduced(Kind.SUM),
        aten.mean.dim: _reduced(Kind.MEAN),
    }
    for name, kind in each.items():
        found[getattr(aten, name).Tensor] = _elementwise(kind, in_place=False)
        found[getattr(aten, f"{name}_").Tensor] = _elementwise(kind, in_place=True)
    return found
