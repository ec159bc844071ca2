"""A recorded step of small models as a program for ``play``: all operations of one client, then those of the next.

What passes between two operations then stays in the nearest cache, and a step is one call. Graphs with an operation
that is not known here, or with larger products, are left to PyTorch.
"""

from __future__ import annotations

import functools
import inspect
import operator
from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, fx

from fedretain.engines.native.kernels import available, function

aten = torch.ops.aten

LARGEST = 2**18
"""Multiplications of a product above which PyTorch's is as fast."""
DEEPEST = 1024
"""As in ``playing.h``."""
REMEMBERED = 16
"""Layouts of arguments whose plans are kept."""

Layout = list[tuple[torch.Size, tuple[int, ...]] | None]


class Kind(IntEnum):
    """What an operation does; the order is that of ``playing.h``."""

    PRODUCT = 0
    RELU = 1
    MASK = 2
    SOFTMAX = 3
    PICK = 4
    PUT = 5
    ADD = 6
    SUBTRACT = 7
    MULTIPLY = 8
    DIVIDE = 9
    SUM = 10
    MEAN = 11
    AT_LEAST = 12
    FILL = 13


_FROM_NOTHING, _FROM_BIAS, _FROM_OUT = range(3)


class Operation(NamedTuple):
    """A row of the program; the columns are those of ``playing.h``."""

    kind: Kind
    out: int
    a: int = 0
    b: int = 0
    c: int = 0
    rows: int = 1
    length: int = 1
    depth: int = 0
    a_row: int = 0
    a_next: int = 0
    b_row: int = 0
    b_next: int = 0
    out_row: int = 0
    c_row: int = 0
    start: int = _FROM_NOTHING
    number: int = 0
    then: int = 0


class Unknown(Exception):
    """Something that the program cannot do."""


class Place(NamedTuple):
    """A value of one client: its buffer, shape and strides in numbers."""

    buffer: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    of: str = "reals"
    """Of what: "reals", "wholes", which name a class, or "truths"."""

    @property
    def contiguous(self) -> bool:
        """Whether its numbers lie in order without gaps."""
        return all(
            size == 1 or stride == expected
            for size, stride, expected in zip(self.shape, self.strides, _strides(self.shape), strict=True)
        )


class Matrix(NamedTuple):
    """A place as rows and columns."""

    rows: int
    length: int
    row: int
    next: int


class Step(NamedTuple):
    """A node of the graph as it was before anything else is done to it."""

    node: fx.Node
    op: str
    target: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class Program:
    """A module of a recorded step, played by the kernels where they can; up to the order of additions the same.

    Which of both plays a step depends on how its arguments lie in memory, never on what was played before.
    """

    def __init__(self, module: fx.GraphModule) -> None:
        self.steps = [Step(node, node.op, node.target, node.args, dict(node.kwargs)) for node in module.graph.nodes]
        self.otherwise = module
        self.plans: list[Plan] = []
        self.unknown: list[tuple[Layout, str]] = []
        """Arguments for which there is no plan, and what there is no operation for."""

    def __call__(
        self, carry: Sequence[Any], moving: Sequence[Sequence[Any]], begun: Sequence[Any]
    ) -> tuple[list[Any], list[Tensor]]:
        """The carry after as many steps as there are ``moving``, and the result of each."""
        first = [*carry, *moving[0], *begun]
        plan = self._plan_for(first)
        if plan is not None:
            given = [first, *([*carry, *one, *begun] for one in moving[1:])]
            if all(plan.goes_on(one, first) for one in given[1:]):
                return list(carry), plan(given)
        if len(moving) == 1:
            *new, result = self.otherwise.forward(*first)
            return new, [result]
        new, results = list(carry), []
        for one in moving:
            new, (result,) = self(new, [one], begun)
            results.append(result)
        return new, results

    def _plan_for(self, given: Sequence[Any]) -> Plan | None:
        layout = _layout(given)
        for plan in self.plans:
            if plan.layout == layout:
                return plan
        if any(known == layout for known, _ in self.unknown):
            return None
        if len(self.plans) + len(self.unknown) >= REMEMBERED:
            self.plans.clear()
            self.unknown.clear()
        try:
            self.plans.append(Plan(self.steps, given))
        except Unknown as error:
            self.unknown.append((layout, str(error)))
            return None
        return self.plans[-1]


class Plan:
    """The program for arguments of these shapes and strides."""

    def __init__(self, steps: Sequence[Step], given: Sequence[Any]) -> None:
        self.layout = _layout(given)
        tensors = [leaf for leaf in given if isinstance(leaf, Tensor)]
        self.clients, self.dtype = len(tensors[0]), tensors[0].dtype
        if not available(self.dtype, "play"):
            raise Unknown(f"no kernels for {self.dtype}")
        self.operations: list[Operation] = []
        self.given: list[tuple[int, int]] = []
        """(buffer, argument) of the arguments."""
        self.scalars: list[tuple[int, fx.Node]] = []
        """(buffer, node) of numbers that all clients share."""
        self.scratch: dict[int, Tensor] = {}
        self.advances: list[int] = []
        self.factors: list[Any] = [1.0]
        """Numbers of the operations, or the nodes that give them."""
        self.scalar_arguments: list[tuple[fx.Node, int]] = []
        self.before: list[Step] = []
        """What is computed of numbers alone, by PyTorch."""
        self.values: dict[fx.Node, Any] = {}
        self.numbers: set[fx.Node] = set()
        self.result = -1
        """The buffer of the step's result."""
        for step in steps:
            self._take(step, given)
        self._pack()

    def goes_on(self, given: Sequence[Any], first: Sequence[Any]) -> bool:
        """Whether a step can follow in the same call: the same numbers, and everything else lies as before."""
        for at, (leaf, before) in enumerate(zip(given, first, strict=True)):
            if leaf is before:
                continue
            if at in self.read_numbers or not isinstance(leaf, Tensor):
                return False
            if (leaf.shape, leaf.stride()) != self.layout[at]:
                return False
        return True

    def __call__(self, given: Sequence[Sequence[Any]]) -> list[Tensor]:
        """Play so many steps; the carry is changed in place. The results."""
        known: dict[fx.Node, Any] = {node: given[0][at] for node, at in self.scalar_arguments}
        for step in self.before:
            args = [known[arg] if isinstance(arg, fx.Node) else arg for arg in step.args]
            known[step.node] = step.target(*args, **step.kwargs)
        held = {buffer: torch.as_tensor(known[node], dtype=self.dtype) for buffer, node in self.scalars}
        results = torch.empty(len(given), self.clients, dtype=self.dtype)
        first, row = given[0], self.row
        for buffer, memory in held.items():
            row[buffer] = memory.data_ptr()
        for buffer, argument in self.given:
            row[buffer] = first[argument].data_ptr()
        rows = np.tile(row, (len(given), 1))
        for at, one in enumerate(given[1:], 1):
            for buffer, argument in self.given:
                if one[argument] is not first[argument]:
                    rows[at, buffer] = one[argument].data_ptr()
        rows[:, self.result] = results.data_ptr() + np.arange(len(given)) * (self.clients * self.dtype.itemsize)
        for at, node in self.open_factors:
            self.numbers_now[at] = float(known[node])
        failed = self.play(
            self.code.ctypes.data,
            len(self.code),
            rows.ctypes.data,
            rows.shape[1],
            self.steps.ctypes.data,
            self.numbers_now.ctypes.data,
            self.clients,
            len(given),
        )
        if failed:
            raise RuntimeError("a recorded step cannot be played by the kernels")
        return list(results)

    def _pack(self) -> None:
        self.play = function("play", self.dtype)
        self.code = np.array(_rectified(self.operations), dtype=np.int64)
        self.row = np.zeros(len(self.advances), dtype=np.int64)
        for buffer, memory in self.scratch.items():
            self.row[buffer] = memory.data_ptr()
        self.steps = np.array(self.advances, dtype=np.int64)
        self.open_factors = [(at, node) for at, node in enumerate(self.factors) if isinstance(node, fx.Node)]
        self.numbers_now = np.array([0.0 if isinstance(one, fx.Node) else float(one) for one in self.factors])
        read = {node for _, node in (*self.scalars, *self.open_factors)}
        read.update(node for step in self.before for node in _nodes(step.args))
        self.read_numbers = {at for node, at in self.scalar_arguments if node in read}

    # ------------------------------------------------------------------ nodes

    def _take(self, step: Step, arguments: Sequence[Any]) -> None:
        if step.op == "placeholder":
            self._argument(step.node, arguments)
        elif step.op == "output":
            self._results(step.args[0])
        elif step.op != "call_function":
            raise Unknown(step.op)
        elif _nodes(step.args) and not _nodes(step.kwargs.values()) and self.numbers.issuperset(_nodes(step.args)):
            self.before.append(step)
            self.numbers.add(step.node)
        else:
            emit = _emitted().get(step.target)
            if emit is None:
                raise Unknown(str(step.target))
            try:
                given = inspect.signature(emit).bind(self, *step.args, **step.kwargs)
            except TypeError as error:
                raise Unknown(f"{step.target}: {error}") from error
            self.values[step.node] = emit(*given.args, **given.kwargs)

    def _argument(self, node: fx.Node, given: Sequence[Any]) -> None:
        at = len(self.values)
        leaf = given[at]
        self.values[node] = None
        if not isinstance(leaf, Tensor):
            return
        if leaf.dim() == 0:
            self.numbers.add(node)
            self.scalar_arguments.append((node, at))
            return
        of = {self.dtype: "reals", torch.int64: "wholes", torch.bool: "truths"}.get(leaf.dtype)
        if len(leaf) != self.clients or of is None:
            raise Unknown(f"an argument of {tuple(leaf.shape)} {leaf.dtype}")
        buffer = self._buffer(leaf.stride(0) * leaf.element_size())
        self.given.append((buffer, at))
        self.values[node] = Place(buffer, tuple(leaf.shape[1:]), leaf.stride()[1:], of)

    def _results(self, nodes: Sequence[Any]) -> None:
        """The carry must have been changed in place; the result is one number a client."""
        *carry, result = nodes
        arguments = dict(self.given)
        for at, node in enumerate(carry):
            if arguments.get(self.place(node).buffer) != at:
                raise Unknown("a carry that is not changed in place")
        made = self.place(result)
        if made.buffer not in self.scratch or _matrix(made)[:2] != (1, 1):
            raise Unknown("a result that is not a number")
        del self.scratch[made.buffer]
        self.result, self.advances[made.buffer] = made.buffer, self.dtype.itemsize

    # ------------------------------------------------------------------ places

    def _buffer(self, advance: int) -> int:
        self.advances.append(advance)
        return len(self.advances) - 1

    def new(self, shape: Sequence[int]) -> Place:
        """Memory for a value of one client at a time."""
        buffer = self._buffer(0)
        self.scratch[buffer] = torch.zeros(max(1, int(np.prod(shape, dtype=int))), dtype=self.dtype)
        return Place(buffer, tuple(shape), _strides(shape))

    def constant(self, value: float) -> Place:
        """A number."""
        place = self.new(())
        self.scratch[place.buffer].fill_(value)
        return place

    def place(self, node: Any, of: str | None = "reals") -> Place:
        """Where a value of that kind, or of any, is; numbers that all clients share too."""
        if isinstance(node, (int, float)):
            return self.constant(node)
        if node in self.numbers:
            buffer = self._buffer(0)
            self.scalars.append((buffer, node))
            return Place(buffer, (), ())
        found = self.values.get(node)
        if not isinstance(found, Place) or of not in (None, found.of):
            raise Unknown(f"the value of {node}")
        return found

    def factor(self, value: Any) -> int:
        """Where the operations find a number."""
        if isinstance(value, fx.Node) and value not in self.numbers:
            raise Unknown(f"the number {value}")
        self.factors.append(value)
        return len(self.factors) - 1

    def emit(self, kind: Kind, out: Place, **columns: int) -> Place:
        """Add an operation."""
        self.operations.append(Operation(kind, out.buffer, **columns))
        return out


def _rectified(operations: Sequence[Operation]) -> list[Operation]:
    """Products with the ReLU that follows them in one."""
    found: list[Operation] = []
    for one in operations:
        last = found[-1] if found else None
        same = last is not None and last.kind == Kind.PRODUCT and one.kind == Kind.RELU and last.out == one.out == one.a
        if same and last is not None and last.out_row == last.length and last.rows * last.length == one.length:
            found[-1] = last._replace(then=1)
        else:
            found.append(one)
    return found


def _layout(given: Sequence[Any]) -> Layout:
    return [(leaf.shape, leaf.stride()) if isinstance(leaf, Tensor) else None for leaf in given]


def _nodes(args: Any) -> list[fx.Node]:
    return [arg for arg in args if isinstance(arg, fx.Node)]


def _strides(shape: Sequence[int]) -> tuple[int, ...]:
    strides = [1]
    for size in reversed(shape[1:]):
        strides.insert(0, strides[0] * size)
    return tuple(strides) if shape else ()


def _matrix(place: Place) -> Matrix:
    """A place of at most two axes that are longer than 1."""
    long = [(size, stride) for size, stride in zip(place.shape, place.strides, strict=True) if size != 1]
    if len(long) > 2:
        if not place.contiguous:
            raise Unknown(f"a value of {place.shape}")
        long = [(int(np.prod(place.shape, dtype=int)), 1)]
    rows, columns = [(1, 0), (1, 0), *long][-2:]
    return Matrix(rows[0], columns[0], rows[1], columns[1])


def _flat(*places: Place) -> dict[str, int]:
    if not all(place.contiguous for place in places):
        raise Unknown("gaps in memory")
    return {"rows": 1, "length": int(np.prod(places[0].shape, dtype=int))}


# ---------------------------------------------------------------------- views


def _view(plan: Plan, value: Any, shape: Sequence[int]) -> Place:
    place = plan.place(value, None)
    inner = list(shape[1:])
    if shape[0] != plan.clients or not place.contiguous:
        raise Unknown("a view across clients")
    if -1 in inner:
        known = -int(np.prod(inner, dtype=int))
        inner[inner.index(-1)] = int(np.prod(place.shape, dtype=int)) // known
    return place._replace(shape=tuple(inner), strides=_strides(inner))


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
        if start != _FROM_OUT:
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
    return _product(plan, plan.new((a.shape[0], b.shape[1])), a, b, None, _FROM_NOTHING, 1)


def _baddbmm(plan: Plan, start: Any, one: Any, other: Any, alpha: Any = 1) -> Place:
    a, b, bias = plan.place(one), plan.place(other), plan.place(start)
    return _product(plan, plan.new((a.shape[0], b.shape[1])), a, b, bias, _FROM_BIAS, alpha)


def _baddbmm_(plan: Plan, start: Any, one: Any, other: Any, alpha: Any = 1) -> Place:
    out = plan.place(start)
    a, b = plan.place(one), plan.place(other)
    if out.shape != (a.shape[0], b.shape[1]):
        raise Unknown("a sum of other shape")
    return _product(plan, out, a, b, None, _FROM_OUT, alpha)


# ---------------------------------------------------------------------- number by number


def _elementwise(kind: Kind, *, in_place: bool) -> Callable[..., Place]:
    def emit(plan: Plan, one: Any, other: Any) -> Place:
        a, b = plan.place(one), plan.place(other)
        if a.shape and b.shape and len(a.shape) != len(b.shape):
            raise Unknown("values of other rank")
        shape = np.broadcast_shapes(a.shape, b.shape)
        if in_place and shape != a.shape:
            raise Unknown("a smaller value in place")
        out = a if in_place else plan.new(shape)
        to = _matrix(out)
        if to.next != 1 and to.length != 1:
            raise Unknown("columns with gaps")
        columns: dict[str, int] = {}
        for name, place in (("a", a), ("b", b)):
            wide = _expanded(place, shape)
            matrix = _matrix_like(wide, shape)
            columns |= {name: place.buffer, f"{name}_row": matrix.row, f"{name}_next": matrix.next}
        return plan.emit(kind, out, rows=to.rows, length=to.length, out_row=to.row, **columns)

    return emit


def _expanded(place: Place, shape: tuple[int, ...]) -> Place:
    """With strides of 0 along axes that it lacks."""
    if not place.shape:
        return Place(place.buffer, shape, (0,) * len(shape))
    strides = tuple(0 if size == 1 else stride for size, stride in zip(place.shape, place.strides, strict=True))
    return Place(place.buffer, shape, strides)


def _matrix_like(place: Place, shape: tuple[int, ...]) -> Matrix:
    long = [stride for size, stride in zip(shape, place.strides, strict=True) if size != 1]
    if len(long) > 2:
        same = Place(place.buffer, shape, place.strides)
        if same.contiguous:
            return Matrix(1, int(np.prod(shape, dtype=int)), 0, 1)
        if any(long):
            raise Unknown(f"a value of {shape}")
        long = [0]
    rows, columns = [0, 0, *long][-2:]
    return Matrix(1, 1, rows, columns)


def _fill(plan: Plan, value: Any, mask: Any, number: float) -> Place:
    a, b = plan.place(value), plan.place(mask, "truths")
    if len(a.shape) != len(b.shape) or np.broadcast_shapes(a.shape, b.shape) != a.shape:
        raise Unknown("a mask of other shape")
    out = plan.new(a.shape)
    to, where = _matrix(out), _matrix_like(_expanded(b, a.shape), a.shape)
    source = _matrix_like(a, a.shape)
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
        return plan.emit(Kind.RELU, out, a=a.buffer, **_flat(a, out))

    return emit


def _mask(plan: Plan, gradient: Any, value: Any, threshold: float, grad_input: Any = None) -> Place:
    a, b = plan.place(gradient), plan.place(value)
    out = plan.new(a.shape) if grad_input is None else plan.place(grad_input)
    if threshold != 0 or a.shape != b.shape or out.shape != a.shape:
        raise Unknown("a threshold")
    return plan.emit(Kind.MASK, out, a=a.buffer, b=b.buffer, **_flat(a, b, out))


def _negative(plan: Plan, value: Any) -> Place:
    return _elementwise(Kind.MULTIPLY, in_place=False)(plan, value, -1.0)


def _at_least(plan: Plan, value: Any, least: Any = None, most: Any = None) -> Place:
    a = plan.place(value)
    if most is not None or not isinstance(least, (int, float)):
        raise Unknown("a clamp")
    out = plan.new(a.shape)
    return plan.emit(Kind.AT_LEAST, out, a=a.buffer, number=plan.factor(least), **_flat(a))


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
    return plan.emit(Kind.PICK, out, a=a.buffer, b=at.buffer, rows=a.shape[0], a_row=a.strides[0], b_row=at.strides[0])


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
def _emitted() -> dict[Any, Callable[..., Any]]:
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
