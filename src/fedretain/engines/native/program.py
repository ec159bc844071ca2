"""A recorded step of small models as a program for ``play``: all operations of one client, then those of the next.

What passes between two operations then stays in the nearest cache, and a step is one call. Graphs with an operation
that is not known here, or with larger products, are left to PyTorch.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, fx

from fedretain.engines.native.kernels import available, function
from fedretain.engines.native.operations import emitted
from fedretain.engines.native.places import Kind, Operation, Place, Unknown, matrix_of, strides_of

REMEMBERED = 16
"""Layouts of arguments whose plans are kept."""

_OUT_OF_RANGE = 2
"""As in ``playing.h``."""

Layout = list[tuple[torch.Size, tuple[int, ...]] | None]


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

    def plan_for(self, given: Sequence[Any], others: Sequence[Sequence[Any]]) -> Plan | None:
        """The plan of a step, if the others can follow in the same call, be it for fewer clients; else None."""
        plan = self._plan_for(given)
        return plan if plan is not None and all(plan.goes_on(one, given, fewer=True) for one in others) else None

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

    def goes_on(self, given: Sequence[Any], first: Sequence[Any], *, fewer: bool = False) -> bool:
        """Whether a step can follow in the same call: the same numbers, and everything else lies as before.

        ``fewer``: it may be a step of the first clients alone.
        """
        for at, (leaf, before) in enumerate(zip(given, first, strict=True)):
            if leaf is before:
                continue
            if at in self.read_numbers or not isinstance(leaf, Tensor):
                return False
            shape, stride = self.layout[at] or ((), ())
            same = leaf.shape == shape or (fewer and leaf.shape[1:] == shape[1:] and len(leaf) < len(before))
            if not same or leaf.stride() != stride:
                return False
        return True

    def __call__(self, given: Sequence[Sequence[Any]]) -> list[Tensor]:
        """Play so many steps; the carry is changed in place. The results."""
        results = list(torch.empty(len(given), self.clients, dtype=self.dtype))
        rows = self.rows(given, results)
        check(
            self.play(
                self.code.ctypes.data,
                len(self.code),
                rows.ctypes.data,
                rows.shape[1],
                self.steps.ctypes.data,
                self.numbers_now.ctypes.data,
                self.clients,
                len(given),
            )
        )
        return results

    def rows(self, given: Sequence[Sequence[Any]], results: Sequence[Tensor]) -> np.ndarray:
        """The addresses of all buffers in each step; a step's result goes to its place in ``results``.

        The numbers of these steps are put in their places, where they stay until the next call.
        """
        known: dict[fx.Node, Any] = {node: given[0][at] for node, at in self.scalar_arguments}
        for step in self.before:
            args = [known[arg] if isinstance(arg, fx.Node) else arg for arg in step.args]
            known[step.node] = step.target(*args, **step.kwargs)
        self.held = {buffer: torch.as_tensor(known[node], dtype=self.dtype) for buffer, node in self.scalars}
        first, row = given[0], self.row
        for buffer, memory in self.held.items():
            row[buffer] = memory.data_ptr()
        for buffer, argument in self.given:
            row[buffer] = first[argument].data_ptr()
        rows = np.tile(row, (len(given), 1))
        for at, one in enumerate(given[1:], 1):
            for buffer, argument in self.given:
                if one[argument] is not first[argument]:
                    rows[at, buffer] = one[argument].data_ptr()
        rows[:, self.result] = [result.data_ptr() for result in results]
        for at, node in self.open_factors:
            self.numbers_now[at] = float(known[node])
        return rows

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
            emit = emitted().get(step.target)
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
        if made.buffer not in self.scratch or matrix_of(made)[:2] != (1, 1):
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
        return Place(buffer, tuple(shape), strides_of(shape))

    def constant(self, value: float) -> Place:
        """A number."""
        place = self.new(())
        self.scratch[place.buffer].fill_(value)
        return place._replace(everybody=True)

    def place(self, node: Any, of: str | None = "reals") -> Place:
        """Where a value of that kind, or of any, is; numbers that all clients share too."""
        if isinstance(node, (int, float)):
            return self.constant(node)
        if node in self.numbers:
            buffer = self._buffer(0)
            self.scalars.append((buffer, node))
            return Place(buffer, (), (), everybody=True)
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


class Part(NamedTuple):
    """Steps of one kind: their plan, their arguments, and which of all steps they are."""

    plan: Plan
    given: list[list[Any]]
    which: list[int]


def play_summed(
    parts: Sequence[Part], ends: np.ndarray, place: Sequence[Tensor], start: Sequence[Tensor], shares: Tensor
) -> tuple[list[Tensor], Tensor]:
    """One client after another from the same start to its own end, all in one ``place``.

    Σ p·(where one ended − start), and the results [steps, clients], 0 where a client had done all its steps.
    """
    dtype, total = parts[0].plan.dtype, sum(len(part.which) for part in parts)
    results = torch.zeros(total, len(ends), dtype=dtype)
    programs, steps = [], np.empty((total, 2), dtype=np.int64)
    kept = []  # the kernel knows addresses alone
    for number, (plan, given, which) in enumerate(parts):
        rows = plan.rows(given, [results[step] for step in which])
        steps[which, 0] = number
        steps[which, 1] = rows.ctypes.data + np.arange(len(which)) * rows.strides[0]
        factors = plan.numbers_now.copy()
        programs.append((plan.code.ctypes.data, len(plan.code), plan.steps.ctypes.data, factors.ctypes.data))
        kept.append((rows, factors, plan.held))
    sums = [torch.zeros_like(one) for one in start]
    summed = [
        (here.data_ptr(), begin.data_ptr(), added.data_ptr(), begin.numel())
        for here, begin, added in zip(place, start, sums, strict=True)
    ]
    tables = [np.array(table, dtype=np.int64) for table in (programs, steps, ends, summed)]
    weights = shares.to(torch.float64)
    addresses = [table.ctypes.data for table in tables]
    check(function("play_summed", dtype)(*addresses[:3], len(ends), addresses[3], len(summed), weights.data_ptr()))
    return sums, results


def check(failed: int) -> None:
    """Raise what a kernel could not do."""
    if failed == _OUT_OF_RANGE:
        raise ValueError("a label is none of the model's outputs")
    if failed:
        raise RuntimeError("a recorded step cannot be played by the kernels")


def _layout(given: Sequence[Any]) -> Layout:
    return [(leaf.shape, leaf.stride()) if isinstance(leaf, Tensor) else None for leaf in given]


def _nodes(args: Any) -> list[fx.Node]:
    return [arg for arg in args if isinstance(arg, fx.Node)]
