"""A function of tensors, recorded once for its shapes and played again as a flat list of operations.

Hooks, ``vmap`` and automatic differentiation cost Python time at every step, which for small models is most of the
time. A recording has none of it: it holds the operations that these led to, forward, backward and update alike.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_flatten, tree_unflatten

from fedretain.engines.fusing import call_directly, fuse, pool_by_slices
from fedretain.engines.hoisting import hoist, keeps_clients_apart
from fedretain.engines.native import Program, convolve_few_channels, pool_in_one_pass, update_in_one_pass
from fedretain.engines.rewriting import fold_constants, simplify, update_in_place, use_memory_again
from fedretain.engines.tracing import trace
from fedretain.methods import Received
from fedretain.tensors import Tensors


class Recording:
    """``function(carry, moving, fixed) -> (carry, result)``, recorded for the shapes of the arguments it is made with.

    It is played on flat lists of tensors: ``carry`` is what every play replaces (its tensors are given up to the
    recording and may be overwritten), ``moving`` differs from play to play, ``fixed`` stays. Python numbers that the
    function reads are part of the recording; where one of them holds for one round only, that is ``only_round``.
    """

    only_round: int | None = None
    program: Program | None = None
    """The same for kernels of our own, which play several steps at once."""

    def __init__(
        self,
        function: Callable[..., Any],
        carry: Any,
        moving: Any,
        fixed: Any,
        *,
        exact: bool = True,
        stacked: bool = False,
        for_capture: bool = False,
    ) -> None:
        """``exact``: a play gives the same bits as the function; else operations may be fused.

        ``stacked``: all tensors have a leading axis of clients, which no operation mixes.

        ``for_capture``: nothing is computed while recording, and a play leaves its arguments as they are. The result
        may be a list then.
        """
        groups = [tree_flatten(part) for part in (carry, moving, fixed)]
        specs = [spec for _, spec in groups]
        ends = [len(leaves) for leaves, _ in groups]

        def flat(*leaves: Any) -> list[Any]:
            parts, start = [], 0
            for spec, length in zip(specs, ends, strict=True):
                parts.append(tree_unflatten(list(leaves[start : start + length]), spec))
                start += length
            new, result = function(*parts)
            leaves_out, spec_out = tree_flatten(new)
            if spec_out != specs[0]:
                raise TypeError("a recorded step must give back what it was given, under the same names")
            return [*leaves_out, *(result if isinstance(result, list) else [result])]

        with torch.no_grad():
            given = [leaf for leaves, _ in groups for leaf in leaves]
            module = make_fx(flat, tracing_mode="fake")(*given) if for_capture else trace(flat, given)
        self.carried = ends[0]
        simplify(module.graph)
        on_cpu = all(leaf.device.type == "cpu" for leaf in given if isinstance(leaf, Tensor))
        if on_cpu and not for_capture:
            pool_in_one_pass(module.graph)
            pool_by_slices(module.graph)
            if not exact:
                fuse(module.graph)
                convolve_few_channels(module.graph)
        self.transposed: frozenset[int] = frozenset()
        """Which of the carry should lie transposed in memory."""
        self.first: fx.GraphModule | None = None
        if not for_capture:
            fold_constants(module)
            # Elsewhere a rate that becomes a Python number would wait for the device.
            self.transposed = update_in_place(module.graph, self.carried, exact=exact or not on_cpu)
            fold_constants(module)
            self.first, module = hoist(module, self.carried, ends[1])
            use_memory_again(module.graph)
            if on_cpu:
                update_in_one_pass(module.graph)
            self.program = Program(module) if on_cpu and stacked and not exact else None
            for part in (self.first, module):
                call_directly(part.graph)
                part.recompile()
        else:
            module.graph.eliminate_dead_code()  # whoever captures it rewrites it, and writes its code then
        self.module = module

    @property
    def reusable(self) -> bool:
        """Whether it serves any round."""
        return self.only_round is None

    def serves(self, round: int) -> bool:
        """Whether it may be played in this round."""
        return self.only_round in (None, round)

    def begin(self, carry: Sequence[Any], fixed: Sequence[Any]) -> list[Any]:
        """What is the same in all steps from here on, as long as they are steps of this recording."""
        assert self.first is not None
        values: list[Any] = self.first.forward(*carry, *fixed)
        return values

    def step(self, carry: Sequence[Any], moving: Sequence[Any], begun: Sequence[Any]) -> tuple[list[Any], Tensor]:
        """The new carry and the result."""
        *new, result = self.module.forward(*carry, *moving, *begun)
        return new, result

    @property
    def several(self) -> bool:
        """Whether one call plays several steps; known from the first step on."""
        return self.program is not None and bool(self.program.plans)

    @functools.cached_property
    def one_place(self) -> bool:
        """Whether clients that are played one after another may all use one place for their carry."""
        return self.first is not None and keeps_clients_apart(self.first, self.carried)

    def steps(
        self, carry: Sequence[Any], moving: Sequence[Sequence[Any]], begun: Sequence[Any]
    ) -> tuple[list[Any], list[Tensor]]:
        """Several steps: the carry after them, and the result of each."""
        if self.program is not None:
            return self.program(carry, moving, begun)
        results = []
        new = list(carry)
        for one in moving:
            new, result = self.step(new, one, begun)
            results.append(result)
        return new, results

    def play(self, carry: Sequence[Any], moving: Sequence[Any], fixed: Sequence[Any]) -> tuple[list[Any], Tensor]:
        """A single step."""
        return self.step(carry, moving, self.begin(carry, fixed))


class RoundWatch:
    """Notes whether a hook asked for the round's number, which a recording would freeze."""

    seen = False


class WatchedReceived(Received):
    """What the server broadcast, with an eye on its round."""

    watch: RoundWatch

    @classmethod
    def of(cls, shared: Sequence[Tensors], round: int, watch: RoundWatch) -> WatchedReceived:
        """From parameters, buffers and the server's part."""
        params, buffers, server = shared
        return cls(params, buffers, server, round).watched_by(watch)

    def watched_by(self, watch: RoundWatch) -> WatchedReceived:
        """The same, watched."""
        self.watch = watch
        return self

    @property
    def round(self) -> int:
        """The number of the round."""
        self.watch.seen = True
        return self[3]

    def _replace(self, **changes: Any) -> WatchedReceived:
        plain = Received(self.params, self.buffers, self.server, self[3])._replace(**changes)
        return WatchedReceived.of((plain.params, plain.buffers, plain.server), plain.round, self.watch)
