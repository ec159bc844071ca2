"""A recorded graph made faster: what does nothing is dropped, constants are folded, memory is used again."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor, fx

from fedretain.engines.nodes import (
    VIEWS,
    alike,
    fresh,
    readers,
    shape_of,
    strides_of,
    type_of,
    views_into,
    writes,
)

aten = torch.ops.aten


def simplify(graph: fx.Graph) -> None:
    """Drop what does nothing: views to the same shape, a product with 1, a transposition and its inverse."""
    graph.eliminate_dead_code()
    for node in graph.nodes:
        if node.op != "call_function" or not isinstance(node.args[0] if node.args else None, fx.Node):
            continue
        source = node.args[0]
        same = shape_of(node) is not None and shape_of(node) == shape_of(source)
        if node.target in (aten.view.default, aten.expand.default, aten._unsafe_view.default, aten.reshape.default):
            if same:
                node.replace_all_uses_with(source)
        elif node.target == aten.mul.Scalar and node.args[1] == 1 and same:
            node.replace_all_uses_with(source)
        elif node.target == aten.transpose.int and source.target == aten.transpose.int:
            dimensions = len(shape_of(node) or ())
            if {d % dimensions for d in node.args[1:]} == {d % dimensions for d in source.args[1:]}:
                node.replace_all_uses_with(source.args[0])
    graph.eliminate_dead_code()


def fold_constants(module: fx.GraphModule) -> None:
    """Compute once what depends on nothing that is given, such as the gradient 1 that every loss begins with.

    Products with ones are what they are multiplied with.
    """
    graph = module.graph
    constant: dict[fx.Node, Any] = {}
    for node in list(graph.nodes):
        if node.op == "get_attr":
            constant[node] = getattr(module, str(node.target))
        elif node.target in (aten.ones_like.default, aten.zeros_like.default, aten.new_zeros.default):
            source = node.meta["val"]
            value = 1 if node.target is aten.ones_like.default else 0
            constant[node] = torch.full(source.shape, value, dtype=source.dtype, device=source.device)
        elif node.target is aten.ones.default:
            constant[node] = torch.ones(*node.args, **node.kwargs)
        elif node.op == "call_function" and isinstance(node.target, torch._ops.OpOverload):
            given = node.all_input_nodes
            if given and all(argument in constant for argument in given) and not writes(node):
                arguments, keys = fx.node.map_arg((node.args, node.kwargs), constant.__getitem__)
                constant[node] = node.target(*arguments, **keys)
    for node in graph.nodes:
        if node.target is aten.mul.Tensor:
            for one, other in (node.args, node.args[::-1]):
                if one in constant and alike(other, node) and bool((constant[one] == 1).all()):
                    node.replace_all_uses_with(other)
    for node, value in constant.items():
        if node.op == "get_attr" or not isinstance(value, Tensor) or all(user in constant for user in node.users):
            continue
        if any(user.op == "output" or (writes(user) and user.args[0] is node) for user in node.users):
            continue  # somebody may write into it
        name = f"_constant_{sum(1 for _ in module.buffers())}"
        module.register_buffer(name, value, persistent=False)
        with graph.inserting_before(node):
            node.replace_all_uses_with(graph.get_attr(name))
    graph.eliminate_dead_code()


_ELEMENTWISE: dict[Any, Any] = {
    aten.relu.default: aten.relu_.default,
    aten.exp.default: aten.exp_.default,
    aten.neg.default: aten.neg_.default,
    aten.add.Tensor: aten.add_.Tensor,
    aten.sub.Tensor: aten.sub_.Tensor,
    aten.mul.Tensor: aten.mul_.Tensor,
    aten.div.Tensor: aten.div_.Tensor,
}
_COMMUTES = (aten.add.Tensor, aten.mul.Tensor)


def use_memory_again(graph: fx.Graph) -> None:
    """An elementwise operation writes over its argument where that has no other reader: the same bits."""
    for node in list(graph.nodes):
        if node.op != "call_function" or node.kwargs:
            continue
        if node.target is aten.threshold_backward.default and _gives_up(node.args[0], node):
            gradient, output, threshold = node.args
            node.target, node.args = aten.threshold_backward.grad_input, (gradient, output, threshold)
            node.kwargs = {"grad_input": gradient}
        elif node.target in _ELEMENTWISE:
            if node.target in _COMMUTES and not _gives_up(node.args[0], node) and _gives_up(node.args[1], node):
                node.args = (node.args[1], node.args[0])
            if not _gives_up(node.args[0], node):
                continue
            node.target = _ELEMENTWISE[node.target]
        else:
            continue
        node.meta["fresh"] = True


def _gives_up(source: Any, node: fx.Node) -> bool:
    """Whether a node may write over its argument: memory of its own, read by nobody else, as the result would lie."""
    if not (isinstance(source, fx.Node) and alike(source, node) and strides_of(source) == strides_of(node)):
        return False
    if not fresh(source):
        return False
    passed: set[fx.Node] = {node}
    while source.target in VIEWS and source.target is not operator.getitem:
        passed.add(source)
        source = source.args[0]
    return readers(source) == passed


_IN_PLACE: dict[Any, Any] = {aten.add.Tensor: aten.add_.Tensor, aten.sub.Tensor: aten.sub_.Tensor}
_WORTH_TRANSPOSING = 16
"""Outputs of a layer from which products with its weights as [inputs, outputs] are the faster ones."""


def update_in_place(graph: fx.Graph, carried: int, *, exact: bool) -> frozenset[int]:
    """w + c·g without new memory: ``g.mul_(c)``, then ``w.add_(g)``; the same bits as ``w + c * g``.

    Only where nothing reads the old w afterwards; and g is overwritten only where it has no other reader. Where the
    last bits are free, a number c is a factor of the addition, and a gradient that is a batched product is added as it
    is made. Returns the numbers of those w that should lie transposed in memory.
    """
    order = {node: position for position, node in enumerate(graph.nodes)}
    placeholders: list[fx.Node] = [node for node in graph.nodes if node.op == "placeholder"]
    (output,) = (node for node in graph.nodes if node.op == "output")
    outputs: Any = output.args[0]
    carries = set(placeholders[:carried])
    transposed = set()
    for index in range(carried):
        old: fx.Node = placeholders[index]
        new = outputs[index]
        if not isinstance(new, fx.Node) or new.target not in _IN_PLACE or new.kwargs or new.args[0] is not old:
            continue
        change = new.args[1]
        if not isinstance(change, fx.Node) or not alike(change, old) or set(new.users) != {output}:
            continue
        if any(order[user] > order[new] for user in readers(old)):
            continue
        summed = new.target == aten.add.Tensor
        new.target = _IN_PLACE[new.target]
        if change.target != aten.mul.Tensor or set(change.users) != {new}:
            continue
        factor, gradient = change.args
        if not (isinstance(factor, fx.Node) and isinstance(gradient, fx.Node) and alike(gradient, old)):
            continue
        free = summed and not exact
        alone = set(gradient.users) == {change} and fresh(gradient)
        product = free and alone and gradient.target == aten.bmm.default and _may_wait(gradient.args, carries)
        if free and shape_of(factor) == () and (product or _may_wait([gradient], carries)):
            if _add_scaled(graph, old, new, factor, gradient, product=product):
                transposed.add(index)
        elif product and _one_per_client(factor):
            left, right = gradient.args
            change.args = (left, factor)
            new.target, new.args = aten.baddbmm_.default, (old, change, right)
        elif alone:
            change.target, change.args = aten.mul_.Tensor, (gradient, factor)
    return frozenset(transposed)


def _may_wait(parts: Any, carries: set[fx.Node]) -> bool:
    """Whether these can be read at the update too: they do not lie in what other updates change."""
    return not any(isinstance(part, fx.Node) and views_into(part) in carries for part in parts)


def _one_per_client(factor: fx.Node) -> bool:
    """Whether c·(a·b) may be taken as (c·a)·b: c is one number a client."""
    sides = shape_of(factor)
    return sides is not None and all(side == 1 for side in sides[-2:])


def _add_scaled(
    graph: fx.Graph, old: fx.Node, new: fx.Node, factor: fx.Node, gradient: fx.Node, *, product: bool
) -> bool:
    """w ← w + c·g with a number c; whether w is read transposed only, so that it had better lie that way.

    Then the product g = a·b is added as wᵀ ← wᵀ + c·bᵀ·aᵀ: PyTorch's batched product writes contiguous memory only.
    """
    with graph.inserting_before(new):
        number = _number(graph, factor)
        if not product:
            _add_directly(graph, old, new, gradient, number)
            return False
        left, right = gradient.args
        shape = shape_of(old)
        turned = all(_turns(user) for user in old.users if user is not new and user.op != "output")
        if not turned or shape is None or shape[1] < _WORTH_TRANSPOSING:
            new.target, new.args, new.kwargs = aten.baddbmm_.default, (old, left, right), {"alpha": number}
            return False
        sides = [_transposed(graph, side) for side in (old, right, left)]
        graph.call_function(aten.baddbmm_.default, tuple(sides), {"alpha": number})
    new.replace_all_uses_with(old)
    graph.erase_node(new)
    return True


def _number(graph: fx.Graph, factor: fx.Node) -> fx.Node:
    """The Python number that a tensor without axes holds, asked for once."""
    for user in factor.users:
        if user.target is aten._local_scalar_dense.default:
            return user
    with graph.inserting_after(factor):
        return graph.call_function(aten._local_scalar_dense.default, (factor,))


def _add_directly(graph: fx.Graph, old: fx.Node, new: fx.Node, gradient: fx.Node, number: fx.Node) -> None:
    """w ← w + c·g; for a sum over a batch, as a bias has it, as the product of ones with what is summed."""
    new.args, new.kwargs = (old, gradient), {"alpha": number}
    total = gradient.args[0] if gradient.target is aten.view.default else None
    if not isinstance(total, fx.Node) or total.target is not aten.sum.dim_IntList or set(total.users) != {gradient}:
        return
    if list(total.args[1:]) != [[1], True]:
        return
    values = total.args[0]
    sides, entries = shape_of(values), shape_of(old)
    if sides is None or len(sides) != 3 or entries != (sides[0], sides[2]) or type_of(values) != type_of(old):
        return
    rows = graph.call_function(aten.view.default, (old, [sides[0], 1, sides[2]]))
    like = {"dtype": type_of(old), "device": torch.device("cpu")}
    ones = graph.call_function(aten.ones.default, ([sides[0], 1, sides[1]],), like)
    graph.call_function(aten.baddbmm_.default, (rows, ones, values), {"alpha": number})
    new.replace_all_uses_with(old)
    graph.erase_node(new)


def _turns(node: fx.Node) -> bool:
    axes: Any = node.args[1:]
    return node.target is aten.transpose.int and sorted(axis % 3 for axis in axes) == [1, 2]


def _transposed(graph: fx.Graph, node: Any) -> Any:
    """A batch of matrices, each transposed."""
    if _turns(node):
        return node.args[0]
    return graph.call_function(aten.transpose.int, (node, 1, 2))
