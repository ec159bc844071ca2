"""A recorded graph in two parts: what is the same in every play is computed once, before the first of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from torch import fx

from fedretain.engines.nodes import VIEWS, readers, shape_of, views_into, writes


def hoist(module: fx.GraphModule, carried: int, moving: int) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Split ``f(*carry, *moving, *fixed)`` into ``first(*carry, *fixed)`` and ``then(*carry, *moving, *first)``.

    To the first part belongs what depends on fixed arguments and constants alone and is not written over, and the views
    of a carry that is updated where it lies.
    """
    graph = module.graph
    given = [node for node in graph.nodes if node.op == "placeholder"]
    carry, moved, fixed = given[:carried], given[carried : carried + moving], given[carried + moving :]
    (output,) = (node for node in graph.nodes if node.op == "output")
    results: Any = output.args[0]
    lasting = {old for old, new in zip(carry, results, strict=False) if new is old or _writes_into(new, old)}
    once: set[fx.Node] = set(fixed)
    for node in graph.nodes:
        if node.op in ("placeholder", "output"):
            continue
        sources = node.all_input_nodes
        seen = node.target in VIEWS and len(sources) == 1 and (sources[0] in lasting or sources[0] in once)
        if seen and sources[0] in lasting:
            lasting.add(node)
        elif all(source in once for source in sources) and not writes(node) and not _written(node):
            once.add(node)
    once |= lasting - set(carry)
    wanted = [node for node in once if any(user not in once for user in node.users) and node not in carry]
    order = {node: position for position, node in enumerate(graph.nodes)}
    wanted.sort(key=order.__getitem__)
    inside = [node for node in graph.nodes if node in once and node not in fixed]
    rest = [node for node in graph.nodes if node not in once and node.op not in ("placeholder", "output")]
    first = part_of(module, [*carry, *fixed], inside, wanted)
    then = part_of(module, [*carry, *moved, *wanted], rest, results)
    return first, then


def keeps_clients_apart(first: fx.GraphModule, carried: int) -> bool:
    """Whether all that the first part makes of the carry are views of it that keep its first axis."""
    of_carry = set(list(first.graph.nodes)[:carried])
    for node in first.graph.nodes:
        if node.op == "output" or not any(source in of_carry for source in node.all_input_nodes):
            continue
        shape, (_, *how) = shape_of(node.args[0]) or (), node.args
        if _name(node) == "view":
            keeps = bool(shape) and how[0][0] == shape[0]
        elif _name(node) == "transpose":
            keeps = bool(shape) and all(axis % len(shape) for axis in how)
        else:
            keeps = _name(node) == "unsqueeze" and how[0] % (len(shape) + 1) != 0
        if not keeps:
            return False
        of_carry.add(node)
    return True


def _name(node: fx.Node) -> str:
    """An operation's name, be it called as a method or not."""
    return str(getattr(node.target, "overloadpacket", node.target)).removeprefix("aten.")


def _writes_into(node: Any, memory: fx.Node) -> bool:
    return isinstance(node, fx.Node) and writes(node) and node.args[0] is memory


def _written(node: fx.Node) -> bool:
    """Whether somebody writes into a node's memory, through views too."""
    targets = [user.args[0] for user in readers(node) if writes(user)]
    return any(isinstance(target, fx.Node) and views_into(target) is node for target in targets)


def part_of(
    module: fx.GraphModule, given: Sequence[fx.Node], nodes: Iterable[fx.Node], results: Iterable[Any]
) -> fx.GraphModule:
    """A module of some of the nodes, called with the values of others."""
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for number, node in enumerate(given):
        copies[node] = graph.placeholder(f"given_{number}")
        copies[node].meta = dict(node.meta)

    def copy_of(node: fx.Node) -> fx.Node:
        if node not in copies and node.op == "get_attr":
            copies[node] = graph.node_copy(node)
        return copies[node]

    for node in nodes:
        for source in node.all_input_nodes:
            copy_of(source)
        copies[node] = graph.node_copy(node, copy_of)
    graph.output(fx.node.map_arg(list(results), copy_of))
    return fx.GraphModule(module, graph)
