"""Several methods as one: penalties add, directions and uploads fold, states are kept apart by method name."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from fedretain.errors import ConfigError
from fedretain.methods.method import Aggregate, Batch, Method, Own, Received, Task
from fedretain.tensors import Tensors, under_prefix, with_prefix

if TYPE_CHECKING:
    from fedretain.config import LocalSettings

_ONE_OWNER = {
    "step": "each replaces the whole local step",
    "combine": "each decides alone how the server combines the uploads",
}


def chain(*methods: Method) -> Method:
    """One method that does what all of them do, in the order given; a pair that cannot compose is refused."""
    if not methods:
        raise ConfigError("method: an empty chain; name at least one method, for example fedavg")
    methods = tuple(part for method in methods for part in parts(method))
    if len(methods) == 1:
        return methods[0].beside(())
    for i, second in enumerate(methods):
        for first in methods[:i]:
            if reason := conflict(first, second):
                raise ConfigError(f"method: {first.name} and {second.name} cannot be chained: {reason}")
    return Chain(tuple(m.beside([other for other in methods if other is not m]) for m in methods))


def conflict(first: Method, second: Method) -> str | None:
    """Why two methods cannot work together, or None."""
    if first.name == second.name:
        return "the same method twice; their states would share one name"
    for hook, reason in _ONE_OWNER.items():
        if first.uses(hook) and second.uses(hook):
            return reason
    for whole, part in ((first, second), (second, first)):
        if whole.uses("step"):
            for hook in ("penalty", "direction"):
                if part.uses(hook):
                    return f"{whole.name} replaces the local step, so the {hook} of {part.name} would have no effect"
    return None


@dataclass(frozen=True)
class Chain(Method):
    """The composition made by ``chain``; its state names are ``method/name``."""

    methods: tuple[Method, ...]

    @property
    def name(self) -> str:
        """The members' names, joined by +."""
        return "+".join(method.name for method in self.methods)

    def uses(self, hook: str) -> bool:
        """Whether any member changes the hook."""
        return any(method.uses(hook) for method in self.methods)

    @property
    def averaging(self) -> Literal["examples", "uniform"]:
        """Uniform as soon as one member asks for it."""
        return "uniform" if any(m.averaging == "uniform" for m in self.methods) else "examples"

    def local(self, settings: LocalSettings) -> LocalSettings:
        """Every member's prescription, one after the other."""
        for method in self.methods:
            settings = method.local(settings)
        return settings

    def freezes(self, name: str) -> bool:
        """Frozen as soon as one member freezes it."""
        return any(method.freezes(name) for method in self.methods)

    def check(self, local: LocalSettings) -> None:
        """Every member must accept the local settings."""
        for method in self.methods:
            method.check(local)

    def init_client(self, params: Tensors, own: Own) -> Tensors:
        """The members' states side by side."""
        return _together((m, m.init_client(params, _own(m, own))) for m in self.methods)

    def prepare(self, received: Received, own: Own, task: Task) -> Tensors:
        """Every member prepares for itself."""
        return _together((m, m.prepare(_received(m, received), _own(m, own), task)) for m in self.methods)

    def penalty(self, params: Tensors, received: Received, own: Own) -> Tensor:
        """Penalties add."""
        terms = [m.penalty(params, _received(m, received), _own(m, own)) for m in self.methods if m.uses("penalty")]
        return torch.stack(terms).sum() if terms else torch.zeros(())

    def direction(self, gradient: Tensors, params: Tensors, received: Received, own: Own) -> Tensors:
        """Directions fold: each member corrects what the one before it made."""
        for m in self.methods:
            if m.uses("direction"):
                gradient = m.direction(gradient, params, _received(m, received), _own(m, own))
        return gradient

    def step(
        self, params: Tensors, batch: Batch, index: int, received: Received, own: Own, task: Task
    ) -> tuple[Tensors, Tensor]:
        """The step of the one member that has its own."""
        (m,) = (m for m in self.methods if m.uses("step"))
        return m.step(params, batch, index, _received(m, received), _own(m, own), task)

    def upload(self, delta: Tensors, received: Received, own: Own, task: Task) -> Tensors:
        """Uploads fold."""
        for m in self.methods:
            delta = m.upload(delta, _received(m, received), _own(m, own), task)
        return delta

    def finish(self, params: Tensors, received: Received, own: Own, task: Task) -> tuple[Tensors, Tensors]:
        """The members' new states and extra uploads side by side."""
        ends = [(m, m.finish(params, _received(m, received), _own(m, own), task)) for m in self.methods]
        states = _together((m, state) for m, (state, _) in ends)
        return states, _together((m, extra) for m, (_, extra) in ends)

    def init_server(self, params: Tensors) -> Tensors:
        """The members' server states side by side."""
        return _together((m, m.init_server(params)) for m in self.methods)

    def broadcast(self, server: Tensors) -> Tensors:
        """What any member broadcasts."""
        return _together((m, m.broadcast(under_prefix(m.name, server))) for m in self.methods)

    def weigh(self, weights: Tensor, extras: Tensors) -> Tensor:
        """Weights fold."""
        for m in self.methods:
            weights = m.weigh(weights, under_prefix(m.name, extras))
        return weights

    def combine(self, aggregate: Aggregate, received: Received) -> Tensors:
        """The combination of the one member that has its own, else the weighted mean."""
        for m in self.methods:
            if m.uses("combine"):
                return m.combine(_aggregate(m, aggregate), _received(m, received))
        return aggregate.delta

    def update_server(self, server: Tensors, aggregate: Aggregate) -> Tensors:
        """Every member updates its own state."""
        return _together(
            (m, m.update_server(under_prefix(m.name, server), _aggregate(m, aggregate))) for m in self.methods
        )


def parts(method: Method) -> Sequence[Method]:
    """The members of a chain, or the method itself."""
    return method.methods if isinstance(method, Chain) else (method,)


def _together(by_method: Iterable[tuple[Method, Tensors]]) -> Tensors:
    return {k: v for method, tensors in by_method for k, v in with_prefix(method.name, tensors).items()}


def _received(method: Method, received: Received) -> Received:
    return received._replace(server=under_prefix(method.name, received.server))


def _own(method: Method, own: Own) -> Own:
    return own._replace(state=under_prefix(method.name, own.state), prepared=under_prefix(method.name, own.prepared))


def _aggregate(method: Method, aggregate: Aggregate) -> Aggregate:
    return aggregate._replace(
        mean=under_prefix(method.name, aggregate.mean), total=under_prefix(method.name, aggregate.total)
    )
