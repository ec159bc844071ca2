"""A loop that was recorded turn by turn, found again, so that its body is compiled once.

FedReg's ``prepare`` climbs ten times: the same three hundred operations ten times in a row, and PyTorch's compiler
would work on each of them by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, fx
from torch.utils._pytree import tree_leaves, tree_map_only

from fedretain.engines.hoisting import part_of
from fedretain.engines.nodes import alike, key_of, shape_of, type_of, writes

LEAST_TURNS = 3
LEAST_SAVED = 100
"""So many operations less to compile are worth a loop."""

Compile = Callable[[fx.GraphModule, Sequence[Any]], Callable[..., Any]]
"""Makes a function of a module and of the tensors that it will be called with."""


class Loop(NamedTuple):
    """Operations in a row that repeat themselves."""

    turns: list[list[fx.Node]]
    first: dict[int, fx.Node]
    """What the first turn reads where the others read what the turn before made, by its place in a turn."""


def find_loop(graph: fx.Graph) -> Loop | None:
    """The longest repetition, if each turn does the same with what the turn before hands on; else None."""
    nodes = [node for node in graph.nodes if node.op == "call_function"]
    start, end, period = _longest_repetition(nodes)
    if end - start < LEAST_TURNS * period or end - start - period < LEAST_SAVED:
        return None
    start = _where_least_is_handed_on(nodes, start, end, period)
    turns = [nodes[at : at + period] for at in range(start, end - period + 1, period)]
    return _checked(turns) if len(turns) >= LEAST_TURNS else None


def _longest_repetition(nodes: Sequence[fx.Node]) -> tuple[int, int, int]:
    """Where operations, whatever they read, repeat those a period earlier: start, end and period."""
    numbers: dict[Any, int] = {}
    kind = np.array([numbers.setdefault(_kind(node), len(numbers)) for node in nodes])
    best = (0, 0, 0)
    for period in range(1, len(kind) // LEAST_TURNS + 1):
        differ = np.flatnonzero(kind[period:] != kind[:-period])
        bounds = np.concatenate([[-1], differ, [len(kind) - period]])
        longest = np.diff(bounds).argmax()
        start, length = int(bounds[longest]) + 1, int(bounds[longest + 1] - bounds[longest]) - 1
        if length > best[1] - best[0] - best[2]:
            best = (start, start + length + period, period)
    return best


def _kind(node: fx.Node) -> Any:
    """What an operation is, whatever tensors it reads."""
    arguments = tree_map_only(fx.Node, lambda _: fx.Node, (node.args, node.kwargs))
    return node.target, key_of(arguments), shape_of(node), type_of(node)


def _where_least_is_handed_on(nodes: Sequence[fx.Node], start: int, end: int, period: int) -> int:
    """Where a turn should begin: any place will do, and between some of them there are many values."""
    at = {node: position for position, node in enumerate(nodes)}
    alive = np.zeros(len(nodes) + 1, dtype=np.int64)
    for position in range(start, end):
        last = max((at.get(user, position) for user in nodes[position].users), default=position)
        alive[position + 1] += 1
        alive[last + 1] -= 1
    second = np.cumsum(alive)[start + period : start + 2 * period]
    return start + int(second.argmin())


def _checked(turns: list[list[fx.Node]]) -> Loop | None:
    """A loop, if the turns read alike and only the last one's results are read behind it."""
    place = {node: (turn, at) for turn, nodes in enumerate(turns) for at, node in enumerate(nodes)}
    first: dict[int, fx.Node] = {}
    for at, usual in enumerate(turns[1]):
        for turn, nodes in enumerate(turns):
            for reference, own in zip(_reads(usual), _reads(nodes[at]), strict=True):
                earlier, where = place.get(reference, (None, 0))
                if earlier is None:
                    expected = reference
                elif turn + earlier == 0:
                    expected = first.setdefault(where, own)
                else:
                    expected = turns[turn + earlier - 1][where]
                if own is not expected:
                    return None
    for node, (turn, at) in place.items():
        read_behind = any(user not in place for user in node.users)
        if writes(node) or (read_behind and not (turn == len(turns) - 1 and at in first)):
            return None
    if any(given in place or not alike(given, turns[0][at]) for at, given in first.items()):
        return None
    return Loop(turns, first)


def _reads(node: fx.Node) -> list[fx.Node]:
    return [leaf for leaf in tree_leaves((node.args, node.kwargs)) if isinstance(leaf, fx.Node)]


class Rolled:
    """A module with a loop, as three functions: what comes before it, one turn, what comes after."""

    def __init__(self, module: fx.GraphModule, loop: Loop, given: Sequence[Any], compiled: Compile) -> None:
        graph = module.graph
        inputs = [node for node in graph.nodes if node.op == "placeholder"]
        inside = {node for turn in loop.turns for node in turn}
        behind = _behind(graph, inside)
        before = [node for node in graph.nodes if node.op == "call_function" and node not in inside | behind]
        after = [node for node in graph.nodes if node in behind]
        (output,) = (node for node in graph.nodes if node.op == "output")
        results = list(output.args[0])
        handed = [loop.turns[-1][at] for at in loop.first]
        in_turns = _read(loop.turns[1], {*inputs, *before})
        in_after = _read([*after, output], {*inputs, *before})
        kept = [node for node in dict.fromkeys([*loop.first.values(), *in_turns, *in_after]) if node not in inputs]
        known = {node: slot for slot, node in enumerate([*inputs, *kept])}

        self.turns = len(loop.turns)
        self.first = [known[node] for node in loop.first.values()]
        self.in_turns, self.in_after = [known[node] for node in in_turns], [known[node] for node in in_after]
        part = part_of(module, inputs, before, kept)
        self.before = compiled(part, given) if kept else lambda *_: []
        values = self._values(given)
        turn = [loop.turns[0][at] for at in loop.first]
        part = part_of(module, [*turn, *in_turns], loop.turns[1], [loop.turns[1][at] for at in loop.first])
        now = _on(values[slot] for slot in self.first)
        self.turn = compiled(part, [*now, *(values[slot] for slot in self.in_turns)])
        part = part_of(module, [*handed, *in_after], after, results)
        self.after = compiled(part, [*now, *(values[slot] for slot in self.in_after)])

    def _values(self, given: Sequence[Any]) -> list[Any]:
        return [*given, *self.before(*given)]

    def __call__(self, *given: Any) -> list[Any]:
        """All of it."""
        values = self._values(given)
        handed = _on(values[slot] for slot in self.first)
        fixed = [values[slot] for slot in self.in_turns]
        for _ in range(self.turns):
            handed = _on(self.turn(*handed, *fixed))
        results: list[Any] = self.after(*handed, *(values[slot] for slot in self.in_after))
        return results


def _on(values: Iterable[Tensor]) -> list[Tensor]:
    """What is handed on, lying the same way in every turn."""
    return [value.clone(memory_format=torch.contiguous_format) for value in values]


def _behind(graph: fx.Graph, inside: set[fx.Node]) -> set[fx.Node]:
    """What needs the loop's results, or overwrites something that the loop may read."""
    found: set[fx.Node] = set()
    for node in graph.nodes:
        needs = any(source in inside or source in found for source in node.all_input_nodes)
        if node.op == "call_function" and node not in inside and (needs or writes(node)):
            found.add(node)
    return found


def _read(nodes: Iterable[fx.Node], of: set[fx.Node]) -> list[fx.Node]:
    return list(dict.fromkeys(source for node in nodes for source in node.all_input_nodes if source in of))
