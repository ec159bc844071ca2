"""Many clients at once on a GPU: a local step is one CUDA graph that finds its batch by a counter on the device.

Nothing is decided on the host within a round: parameters, optimiser and losses stay in fixed tensors that every replay
reads and writes, the round's batches lie on the device as numbers of examples, and a replay takes the next of them.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from fedretain.data.transforms import crop_flip
from fedretain.engines.ahead import Ahead, next_members
from fedretain.engines.captured import InPlace, Replay
from fedretain.engines.engine import Uploads, World
from fedretain.engines.functional import Carry, Moving
from fedretain.engines.recording import Recording, RoundWatch, WatchedReceived
from fedretain.engines.stack import Member, Stack, Work, roomy
from fedretain.engines.steps import Each
from fedretain.engines.vectorised import VectorisedEngine
from fedretain.errors import ConfigError
from fedretain.methods import Batch, Own, Received
from fedretain.tensors import Tensors

LOG = logging.getLogger("fedretain")
COMPILE_AFTER = 60.0
"""Seconds of replays before a step is compiled: about what compiling costs, so that short runs do without."""
COMPILE_AGAIN_AFTER = 5.0
"""The same where an earlier run has compiled it: the compiler finds it in its cache, and capturing is what it costs."""
WORTH = 3
"""A run that is expected to take so many times as long compiles at once."""
SHARE_FOR_DATA = 0.25
"""Share of the free memory that the normalised dataset may take."""


class GraphedEngine(VectorisedEngine):
    """The vectorised engine for a GPU: steps are captured, convolutions run client by client in one kernel."""

    gathers = False
    for_capture = True

    def __init__(
        self,
        *worlds: World,
        at_once: int | None = None,
        compile_after: float = COMPILE_AFTER,
        expected: float = math.nan,
    ) -> None:
        """``expected``: seconds that all rounds will take without the compiler, where that is known."""
        _check_device(worlds[0].federation.device)
        super().__init__(*worlds, at_once=at_once)
        self.model.padding.explicit = True
        self.compile_after = compile_after
        self.expected = expected
        self.pool = torch.cuda.graph_pool_handle()
        self.data = _normalised(self.world)
        self.ahead = Ahead(gather=self.gathers)
        self.works: Sequence[Work] = ()
        self.waiting = 0
        """Participants of the round whose training has not begun."""
        self.places: dict[Any, Places] = {}
        self.preparations: dict[Any, Preparation] = {}
        self.plain = False
        """Set once a step could not be captured: steps are then played as in the vectorised engine."""
        self.plain_preparation = False
        """The same for the method's ``prepare``, which may look at the round's number."""

    def close(self) -> None:
        """Give the captured graphs and their memory back."""
        self.places.clear()
        self.preparations.clear()

    def train_all(self, works: Sequence[Work]) -> Iterator[tuple[int, Uploads]]:
        """As in the vectorised engine; keeps in mind who will be next."""
        self.works = works
        yield from super().train_all(works)

    def _buckets(self, members: Sequence[Member]) -> list[np.ndarray]:
        self.waiting = len(members)
        return super()._buckets(members)

    def _stacked(self, members: Sequence[Member], round: int) -> Stack:
        self.waiting -= len(members)
        return self.ahead.take(members, round)

    def _look_ahead(self) -> None:
        """Draw the next round's batches while this round's last stack trains, if memory holds all clients at once."""
        members = next_members(self.worlds, self.works)
        if members and self.waiting == 0 and (self.at_once is None or self.at_once >= len(members)):
            groups = [[members[at] for at in bucket] for bucket in super()._buckets(members)]
            self.ahead.make(groups, self.works[0].received.round + 1)

    def _steps(self, each: Each, clients: Stack, carry: Carry) -> tuple[Carry, Tensor]:
        """All local steps, replayed; played one by one where a method's step cannot be captured."""
        if not self.plain:
            try:
                return self._replayed(each, clients, carry)
            except torch.cuda.OutOfMemoryError:
                raise
            except (NotReusable, RuntimeError) as error:
                LOG.info("engine: graphed plays steps one by one, which is slower: %s", error)
                self.close()
                self.plain = True
        self.for_capture = False
        own = [leaf.clone(memory_format=torch.contiguous_format) for leaf in tree_flatten(carry)[0]]
        return super()._steps(each, clients, tree_unflatten(own, tree_flatten(carry)[1]))

    def _start(self, name: str, value: Tensor, count: int) -> Tensor:
        """As it was received: it is copied to its place, or before steps are played one by one."""
        return value if self.many else value.expand(count, *value.shape)

    def _replayed(self, each: Each, clients: Stack, carry: Carry) -> tuple[Carry, Tensor]:
        total, count = clients.plan.lengths.shape
        fixed = self.steps.fixed(each)
        shapes = [leaf.shape if isinstance(leaf, Tensor) else leaf for leaf in tree_flatten(fixed)[0]]
        key = (count, clients.rows.shape[2], roomy(total), tuple(shapes))
        places = self.places.get(key)
        if places is None:
            places = self.places[key] = Places(self, carry, fixed, clients, roomy(total))
        kinds = places.kinds(clients, self.many)
        places.load(carry, fixed, clients, each.lr)
        shares = {kind: kinds.count(kind) / len(kinds) for kind in dict.fromkeys(kinds)}
        captured = [places.ensure(kind, share, each.received.round) for kind, share in shares.items()]
        if any(captured):
            places.load(carry, fixed, clients, each.lr)  # capturing a step takes one
        start = time.perf_counter()
        for kind in kinds:
            places.replays[kind]()
        history = places.history[:total].clone()
        self._look_ahead()
        if self.compile_after < float("inf"):
            torch.cuda.synchronize()
            places.note(kinds, time.perf_counter() - start)
        return places.taken(), history

    def _prepared(self, each: Each) -> Tensors:
        """What the method makes of the received model, replayed."""
        if self.plain_preparation:
            return super()._prepared(each)
        if not isinstance(each.lr, Tensor):
            each = each._replace(lr=torch.tensor(each.lr, dtype=torch.float64, device=self.world.federation.device))
        key = tuple(leaf.shape if isinstance(leaf, Tensor) else leaf for leaf in _leaves(each))
        found = self.preparations.get(key)
        if found is None:
            try:
                found = self.preparations[key] = Preparation(self, each)
            except torch.cuda.OutOfMemoryError:
                raise
            except (NotReusable, RuntimeError) as error:
                LOG.info("engine: graphed does not capture the method's prepare: %s", error)
                self.plain_preparation = True
                return super()._prepared(each)
        return found(each)


class NotReusable(Exception):
    """A step that reads the round's number holds for one round only."""


class Places:
    """The fixed tensors of a stack's shape, and its captured steps by kind (some batches padded, some clients idle)."""

    def __init__(self, engine: GraphedEngine, carry: Carry, fixed: Any, clients: Stack, steps: int) -> None:
        self.engine = engine
        self.shapes = {tuple(p.shape) for p in engine.world.model.parameters() if p.dim() == 4}
        (leaves, self.carry_spec), (fixed_leaves, self.fixed_spec) = tree_flatten(carry), tree_flatten(fixed)
        self.carry = [self._place(leaf) for leaf in leaves]
        self.fixed = [self._place(leaf) if isinstance(leaf, Tensor) else leaf for leaf in fixed_leaves]
        _, count, width = clients.rows.shape
        device, dtype = clients.rows.device, clients.real.dtype
        self.counter = torch.zeros(1, dtype=torch.int64, device=device)
        self.rows = torch.zeros(steps, count, width, dtype=torch.int64, device=device)
        self.real = torch.zeros(steps, count, width, dtype=dtype, device=device)
        self.rates = torch.zeros(steps, count, dtype=dtype, device=device)
        self.rate = torch.zeros((), dtype=dtype, device=device)
        self.history = torch.zeros(steps, count, dtype=dtype, device=device)
        self.draws = None
        if clients.draws is not None:
            self.draws = torch.zeros(steps, count, width, 3, dtype=torch.int64, device=device)
        self.steps: dict[tuple[bool, bool], InPlace] = {}
        self.replays: dict[tuple[bool, bool], Replay] = {}
        self.compiling: dict[tuple[bool, bool], Compiling] = {}

    def _place(self, leaf: Tensor) -> Tensor:
        """Memory for a tensor; convolutions' weights with their channels side by side."""
        if tuple(leaf.shape[-4:]) in self.shapes and leaf.dim() in (4, 5):
            last = leaf.movedim(-3, -1)
            return torch.zeros(last.shape, dtype=leaf.dtype, device=leaf.device).movedim(-1, -3)
        return torch.zeros(leaf.shape, dtype=leaf.dtype, device=leaf.device)

    def kinds(self, clients: Stack, many: bool) -> list[tuple[bool, bool]]:
        """Of every step: whether some batch has padding, and whether clients have rates of their own."""
        idle = (clients.plan.lengths == 0).any(1).tolist()
        return [(not full, many or some) for full, some in zip(clients.full, idle, strict=True)]

    def load(self, carry: Carry, fixed: Any, clients: Stack, lr: float | Tensor) -> None:
        """Put a round's values in their places."""
        total = len(clients.rows)
        self.counter.zero_()
        self.rows[:total] = clients.numbers.flatten()[clients.rows]
        self.real[:total] = clients.real
        busy = torch.from_numpy(clients.plan.lengths > 0).to(self.rates.device, self.rates.dtype)
        self.rates[:total] = busy * lr
        self.rate.copy_(self.rates[0, 0])
        if self.draws is not None and clients.draws is not None:
            self.draws[:total] = clients.draws
        torch._foreach_copy_(self.carry, tree_flatten(carry)[0])
        pairs = zip(self.fixed, tree_flatten(fixed)[0], strict=True)
        kept = [(place, leaf) for place, leaf in pairs if isinstance(place, Tensor)]
        torch._foreach_copy_([place for place, _ in kept], [leaf for _, leaf in kept])

    def taken(self) -> Carry:
        """The parameters and running statistics where the round ended, in memory of their own."""
        ended = [place.clone(memory_format=torch.contiguous_format) for place in self.carry]
        end = tree_unflatten(ended, self.carry_spec)
        assert isinstance(end, Carry)
        return end

    def moving(self, kind: tuple[bool, bool]) -> tuple[Batch, Moving]:
        """The batch that the counter points at, its number and rate."""
        padded, own_rates = kind
        federation = self.engine.world.federation
        at = self.rows.index_select(0, self.counter)[0]
        chosen = at.flatten()
        if self.draws is not None:
            draws = self.draws.index_select(0, self.counter)[0].flatten(0, 1)
            inputs = federation.normalise(crop_flip(federation.inputs.index_select(0, chosen), draws))
        elif self.engine.data is None:
            inputs = federation.normalise(federation.inputs.index_select(0, chosen))
        else:
            inputs = self.engine.data.index_select(0, chosen)
        weights = self.real.index_select(0, self.counter)[0] if padded else None
        rate = self.rates.index_select(0, self.counter)[0] if own_rates else self.rate
        labels = federation.labels.index_select(0, chosen).reshape(at.shape)
        return Batch(inputs.reshape(*at.shape, *inputs.shape[1:]), labels, weights), Moving(self.counter[0], rate)

    def ensure(self, kind: tuple[bool, bool], share: float, round: int) -> bool:
        """Record and capture a kind of step, compile it where that is worth it; whether anything was captured.

        ``share``: how many of the steps are of this kind.
        """
        if kind not in self.steps:
            carry = tree_unflatten(self.carry, self.carry_spec)
            fixed = tree_unflatten(self.fixed, self.fixed_spec)
            recording = self.engine.steps.record(
                carry, self.moving(kind), fixed, round, own_rates=kind[1], idle=kind[1], for_capture=True
            )
            if not recording.reusable:
                raise NotReusable("it reads the round's number")
            self.steps[kind] = InPlace(recording)
            self.compiling[kind] = Compiling(self.engine.compile_after, share * self.engine.expected)
        step = self.steps[kind]
        if self.compiling[kind].due(step, lambda: self._leaves(kind)):
            self.replays.pop(kind, None)
            step.compile(self._leaves(kind))
        elif kind in self.replays:
            return False

        def one() -> None:
            (loss,) = step(self._leaves(kind))
            self.history.index_copy_(0, self.counter, loss.reshape(1, -1))
            self.counter.add_(1)

        self.counter.zero_()
        self.replays[kind] = Replay(one, self.engine.pool)
        return True

    def _leaves(self, kind: tuple[bool, bool]) -> list[Any]:
        """What a step is called with."""
        return [*self.carry, *tree_flatten(self.moving(kind))[0], *self.fixed]

    def note(self, kinds: list[tuple[bool, bool]], seconds: float) -> None:
        """Add up how long each kind of step has been replayed."""
        for kind in kinds:
            self.compiling[kind].seconds += seconds / len(kinds)


class Compiling:
    """When a step is worth compiling: it has been replayed for long enough, or surely will be."""

    def __init__(self, after: float, expected: float) -> None:
        self.after, self.expected, self.seconds = after, expected, 0.0
        self.done = False
        self.before: bool | None = None
        """Whether an earlier run has compiled it; None as long as nobody has looked."""

    def due(self, step: InPlace, leaves: Callable[[], list[Any]]) -> bool:
        """Whether to compile it now, which is said once."""
        if self.done or self.after == float("inf"):
            return False
        if self._worth(COMPILE_AGAIN_AFTER) and self.before is None:
            self.before = step.compiled_before(leaves())
        self.done = self._worth(COMPILE_AGAIN_AFTER if self.before else self.after)
        return self.done

    def _worth(self, cost: float) -> bool:
        return self.seconds >= cost or self.expected >= WORTH * cost


class Preparation:
    """A method's ``prepare`` for a stack, captured."""

    def __init__(self, engine: GraphedEngine, each: Each) -> None:
        self.inputs = [leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in _leaves(each)]
        watch = RoundWatch()

        def hook(method: Any, received: Received, own: Own, task: Any) -> Tensors:
            watched = WatchedReceived.of((received.params, received.buffers, received.server), received.round, watch)
            made: Tensors = method.prepare(watched, own, task)
            return made

        def make(carry: Any, moving: Any, fixed: Any) -> tuple[Any, list[Tensor]]:
            own, (params, buffers, server), numbers, lr = fixed
            received = Received(params, buffers, server, each.received.round)
            made, self.spec = tree_flatten(engine._mapped(Each(received, own, numbers, lr), hook))
            return carry, made

        fixed = tree_unflatten(self.inputs, tree_flatten(_parts(each))[1])
        self.whole = InPlace(Recording(make, (), (), fixed, for_capture=True))
        if watch.seen:
            raise NotReusable("it reads the round's number")
        self.engine, self.compiling = engine, Compiling(engine.compile_after, engine.expected)
        self.replay: Replay | None = None
        self.made: list[Tensor] = []
        """Where every replay leaves what was made."""
        self._capture()

    def _run(self) -> None:
        self.made = self.whole(self.inputs)

    def _capture(self) -> Replay:
        """Captured, and compiled once that is worth it."""
        if self.compiling.due(self.whole, lambda: self.inputs):
            self.replay, self.made = None, []
            self.whole.compile(self.inputs)
        if self.replay is None:
            self.replay = Replay(self._run, self.engine.pool)
        return self.replay

    def __call__(self, each: Each) -> Tensors:
        """What the method makes of what was received now."""
        replay = self._capture()
        for place, leaf in zip(self.inputs, _leaves(each), strict=True):
            if isinstance(place, Tensor):
                place.copy_(leaf)
        start = time.perf_counter()
        replay()
        if not self.compiling.done and self.engine.compile_after < float("inf"):
            torch.cuda.synchronize()
            self.compiling.seconds += time.perf_counter() - start
        made: Tensors = tree_unflatten([tensor.clone() for tensor in self.made], self.spec)
        return made


def _check_device(device: torch.device) -> None:
    if device.type != "cuda":
        raise ConfigError(f"engine: graphed needs a CUDA device, not {device.type}; use engine: auto")


def _parts(each: Each) -> tuple[Any, ...]:
    return each.own, each.received[:3], each.numbers, each.lr


def _leaves(each: Each) -> list[Any]:
    return tree_flatten(_parts(each))[0]


def _normalised(world: World) -> Tensor | None:
    """All examples as the model sees them, if they fit and are not augmented first."""
    federation = world.federation
    size = federation.inputs.numel() * torch.empty((), dtype=federation.normalise.dtype).element_size()
    free = torch.cuda.mem_get_info(federation.device)[0]
    if world.local.augment != "none" or size > SHARE_FOR_DATA * free:
        return None
    parts = np.array_split(np.arange(len(federation.inputs)), max(1, size // 2**30))
    data = torch.empty(federation.inputs.shape, dtype=federation.normalise.dtype, device=federation.device)
    for part in parts:
        if len(part):
            data[part[0] : part[-1] + 1] = federation.normalise(federation.inputs[part[0] : part[-1] + 1])
    return data
