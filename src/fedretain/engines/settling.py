"""What a compiled step writes into memory, and how often: equal operations once, what kernels read once.

PyTorch's compiler gives every kernel that it did not write itself a copy of its own of what the kernel reads, made
anew from whatever it was made of, and lays a value that is read twice and turned around out as its axes are numbered.
Without this, a gradient that goes into two convolutions is written twice and turned around, and weights in half
precision are written up to six times.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import fx

from fedretain.engines.folding import FEW_CHANNELS
from fedretain.engines.nodes import key_of, shape_of, type_of, views_into, writes

aten = torch.ops.aten

_TURNS = (aten.reshape.default, aten.permute.default)
_CLIENTS_FIRST = [1, 0, 2, 3, 4]


def share_equal(graph: fx.Graph) -> None:
    """Compute once what is computed twice."""
    changed = {views_into(node.args[0]) for node in graph.nodes if node.op == "call_function" and writes(node)}
    seen: dict[Any, fx.Node] = {}
    for node in list(graph.nodes):
        if node.op != "call_function" or not _pure(node):
            continue
        if any(views_into(source) in changed for source in node.all_input_nodes):
            continue
        first = seen.setdefault((node.target, key_of((node.args, node.kwargs))), node)
        if first is not node:
            node.replace_all_uses_with(first)
            graph.erase_node(node)


def _pure(node: fx.Node) -> bool:
    if not isinstance(node.target, torch._ops.OpOverload):
        return node.target is operator.getitem
    return not node.target._schema.is_mutable and torch.Tag.nondeterministic_seeded not in node.target.tags


class Turn(NamedTuple):
    """A reshape or permutation."""

    target: Any
    how: Any
    shape: tuple[int, ...]
    """Of the result."""


def settle(graph: fx.Graph, kernels: Sequence[Any]) -> bool:
    """Write what kernels read once, with its channels side by side; everybody reads it there. Whether there is any.

    The same for what is pooled between them, and for the gradient where two paths meet before a ReLU: what follows
    would add them up again every time.
    """
    if not any(node.target in kernels for node in graph.nodes):
        return False
    settled: set[fx.Node] = set()
    gradients = [node for node in graph.nodes if _of_maps(node)]
    for node in gradients:
        look_before_relu(node, kernels)
    for node in list(graph.nodes):
        if node.target in kernels or node.meta.get("beside"):
            for given in list(node.all_input_nodes):
                _settle(graph, *_back(given), kernels, settled)
        elif node in gradients and len(maps_of(node.args[0], kernels)) > 1:
            clients, batch, channels, *sides = _shape(node)
            apart, beside = (batch, clients, channels, *sides), (batch, clients * channels, *sides)
            turns = [Turn(aten.permute.default, _CLIENTS_FIRST, apart), Turn(aten.reshape.default, beside, beside)]
            _settle(graph, node, turns, kernels, settled)
    return True


def _of_maps(node: fx.Node) -> bool:
    return node.target == aten.threshold_backward.default and len(_shape(node)) == 5 and _shape(node)[2] > FEW_CHANNELS


def look_before_relu(node: fx.Node, kernels: Sequence[Any]) -> None:
    """The gradient of max(0, p) asks whether p > 0; p itself tells, where it is made of one map that is read anyway."""
    after: Any = node.args[1]
    if after.target == aten.relu.default and len(maps_of(after.args[0], kernels)) == 1:
        node.replace_input_with(after, after.args[0])


def maps_of(node: Any, kernels: Sequence[Any]) -> set[fx.Node]:
    """The maps in memory that a value is computed from."""
    size, found, waiting, seen = _size(node), set(), [node], set()
    while waiting:
        one = waiting.pop()
        if one in seen:
            continue
        seen.add(one)
        if _size(one) < size:
            continue
        written = one.target in kernels or one.target is operator.getitem or "settled" in one.meta
        if written or one.op != "call_function":
            found.add(one)
        else:
            waiting += one.all_input_nodes
    return found


def _back(node: fx.Node) -> tuple[fx.Node, list[Turn]]:
    """Where a value comes from, through reshapes and permutations, and these from the first on."""
    turns: list[Turn] = []
    while node.target in _TURNS:
        turns.insert(0, Turn(node.target, node.args[1], _shape(node)))
        node = node.args[0]  # type: ignore[assignment]
    return node, turns


def _settle(graph: fx.Graph, source: fx.Node, turns: list[Turn], kernels: Sequence[Any], settled: set[fx.Node]) -> None:
    from torch._inductor.inductor_prims import force_stride_order

    end_shape = turns[-1].shape if turns else _shape(source)
    if source.op != "call_function" or source.target in kernels or source in settled or len(end_shape) != 4:
        return
    if not type_of(source).is_floating_point:
        return
    settled.add(source)
    users = list(source.users)
    shapes = [_shape(source), *(turn.shape for turn in turns)]
    with graph.inserting_before(source.next):
        end = source
        for turn in turns:
            end = _turned(graph, turn, end)
        laid = torch.empty(end_shape, dtype=type_of(source), device="meta", memory_format=torch.channels_last)
        end = graph.call_function(force_stride_order, (end, list(laid.stride())))
        end.meta = {"val": laid, "settled": True}
        settled.add(end)
        for turn, shape in zip(reversed(turns), reversed(shapes[:-1]), strict=True):
            how = list(shape) if turn.target == aten.reshape.default else _inverse(turn.how)
            end = _turned(graph, Turn(turn.target, how, shape), end)
    for user in users:
        user.replace_input_with(source, end)


def _turned(graph: fx.Graph, turn: Turn, node: fx.Node) -> fx.Node:
    made = graph.call_function(turn.target, (node, list(turn.how)))
    made.meta["val"] = torch.empty(turn.shape, dtype=type_of(node), device="meta")
    return made


def _inverse(order: Sequence[int]) -> list[int]:
    return [list(order).index(axis) for axis in range(len(order))]


def _shape(node: fx.Node) -> tuple[int, ...]:
    return shape_of(node) or ()


def _size(node: fx.Node) -> int:
    shape = shape_of(node)
    return 0 if shape is None else torch.Size(shape).numel()
