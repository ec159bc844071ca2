"""Several clients side by side: their data, batches and states as tensors with a leading client axis."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedretain.data.federation import Federation, Parts
from fedretain.data.transforms import crop_flip, draw_crop_flip
from fedretain.engines.engine import World
from fedretain.engines.schedule import Schedule, schedule
from fedretain.methods import Batch, Method, Own, Received
from fedretain.randomness import stream
from fedretain.tensors import Tensors

FETCHED = 2**24
"""Bytes of batches that are fetched at once."""
KEPT_DATA = 2**25
"""Bytes of examples up to which they are kept normalised, so that a round need not gather its clients' first."""
OVERHEAD = 16.0
"""The time of a step's operations before any client's share, in clients; decides how uneven clients are divided."""
CLIENT_HOOKS = ("init_client", "prepare", "penalty", "direction", "step", "upload", "finish")
"""The hooks that are given a client's own data and state."""


class Member(NamedTuple):
    """One client of one experiment."""

    world: World
    client: int
    state: Tensors | None
    """What it kept from its last round; None when it is seen for the first time."""
    which: int = 0
    """The number of its experiment within the stack."""

    @property
    def examples(self) -> int:
        """How many training examples it holds."""
        offsets = self.world.federation.train.offsets
        return int(offsets[self.client + 1] - offsets[self.client])


class Work(NamedTuple):
    """A round of one experiment, as an engine is asked to do it."""

    received: Received
    cohort: np.ndarray
    states: Callable[[int], Tensors | None]
    local_models: bool
    weights: Tensor | None = None
    """The p_k of the cohort, where nobody looks at single uploads."""
    upcoming: np.ndarray | None = None
    """The cohort of the next round, where it is known."""


class Stack(NamedTuple):
    """What a round needs to know of several clients."""

    members: Sequence[Member]
    plan: Schedule
    sizes: np.ndarray
    numbers: Tensor
    """[clients, room]: which examples of the dataset each client holds; the first one again where there is none."""
    own: Own
    draws: Tensor | None
    """[steps, clients, batch, 3]: the random numbers of the augmentation."""

    @property
    def size(self) -> int:
        """Bytes of the inputs of all steps in single precision."""
        return self.rows.numel() * int(np.prod(self.members[0].world.federation.shape)) * 4

    def batch(self, step: int) -> Batch:
        """The batches of a step; ``weights`` only where some are shorter than others."""
        federation, at = self.members[0].world.federation, self.rows[step]
        weights = None if self.full[step] else self.real[step]
        if self.draws is None and self.own.data.inputs is not self.own.data.labels:
            inputs, labels = self.own.data.inputs.flatten(0, 1), self.own.data.labels.flatten(0, 1)
            return Batch(inputs[at], labels[at], weights)
        chosen = self.numbers.flatten()[at]
        raw = federation.inputs[chosen]
        if self.draws is not None:
            raw = crop_flip(raw.flatten(0, 1), self.draws[step].flatten(0, 1)).reshape(raw.shape)
        return Batch(federation.normalise(raw), federation.labels[chosen], weights)

    def widths(self) -> list[int]:
        """How many clients take part in each step: the first ones, as long as those with fewer steps stand behind.

        All of them where their steps are the same; else as many as have steps left, rounded up to eighths of the stack
        and, below that, to powers of two from 8 on: few clients wait for others, and few shapes are recorded.
        """
        steps, count = self.plan.steps, len(self.members)
        if (steps == steps[0]).all() or (np.diff(steps) > 0).any():
            return [count] * len(self.rows)
        part = max(8, (1 << count.bit_length()) // 8)
        busy = (self.plan.lengths > 0).sum(1).tolist()
        return [
            min(count, -(-clients // part) * part if clients > part else max(8, 1 << (clients - 1).bit_length()))
            for clients in busy
        ]

    def batches(self, dataset: Tensor | None = None) -> Iterator[Batch]:
        """The batches of all steps, several fetched at once where they are small, each of its step's clients alone.

        ``dataset`` holds all examples as the model sees them, where somebody keeps them so.
        """
        gathered = self.own.data.inputs is not self.own.data.labels
        if self.draws is not None or not (gathered or dataset is not None):
            for step, clients in enumerate(self.widths()):
                inputs, all_labels, weights = self.batch(step)
                yield Batch(inputs[:clients], all_labels[:clients], None if weights is None else weights[:clients])
            return
        held, rows = self.own.data.inputs.flatten(0, 1), self.rows
        if dataset is not None:
            held, rows = dataset, self.numbers.flatten()[rows]
        labels = self.own.data.labels.flatten()
        start = 0
        for clients, run in groupby(self.widths()):
            end = start + sum(1 for _ in run)
            yield from self._fetched(held, rows, labels, range(start, end), clients)
            start = end

    def _fetched(self, held: Tensor, rows: Tensor, labels: Tensor, steps: range, clients: int) -> Iterator[Batch]:
        """The batches of some steps, for the first so many clients."""
        width = rows.shape[2]
        at_once = max(1, FETCHED // (clients * width * held[0].numel() * held.element_size()))
        for start in range(steps.start, steps.stop, at_once):
            here = slice(start, min(start + at_once, steps.stop))
            inputs = held.index_select(0, rows[here, :clients].flatten()).reshape(-1, clients, width, *held.shape[1:])
            chosen = labels.index_select(0, self.rows[here, :clients].flatten()).reshape(-1, clients, width)
            real = self.real[here, :clients]
            fetched = zip(inputs.unbind(), chosen.unbind(), real.unbind(), self.full[here], strict=True)
            for some_inputs, some_labels, weights, full in fetched:
                yield Batch(some_inputs, some_labels, None if full else weights)

    rows: Tensor
    """[steps, clients, batch]: positions in the clients' data laid end to end."""
    real: Tensor
    """[steps, clients, batch]: 1 for an example, 0 for padding."""
    full: Sequence[bool]
    """[steps]: whether no client's batch has padding."""


def stack(members: Sequence[Member], round: int, *, gather: bool = True) -> Stack:
    """Put clients side by side; their examples go to one shape, with weight 0 for padding.

    Where no hook looks at a client's data, they are gathered only if asked for (``gather``); batches are then read
    from the dataset.
    """
    world = members[0].world
    federation, local = world.federation, world.local
    held = _holdings(members)
    sizes = held.sizes
    room = int(sizes.max()) if held.even else roomy(int(sizes.max()))
    width = min(local.batch_size, room)
    plan = schedule([(m.world.seed, m.client) for m in members], round, sizes, local, width)
    numbers = held.numbers(room)
    at = federation.on_device(numbers)
    real = torch.from_numpy(np.arange(room) < sizes[:, None]).to(federation.device)
    labels = federation.labels[at]
    classes = torch.zeros(len(members), federation.classes, dtype=torch.int64, device=federation.device)
    classes.scatter_add_(1, labels, real.to(torch.int64))
    dtype = federation.normalise.dtype
    augmented = local.augment != "none"
    needs_data = (gather and not augmented) or any(world.method.uses(hook) for hook in CLIENT_HOOKS)
    inputs = federation.normalise(federation.inputs[at]) if needs_data else labels
    own = Own(
        data=Batch(inputs, labels, None if bool((sizes == room).all()) else real.to(dtype)),
        class_counts=classes,
        examples=torch.from_numpy(sizes).to(federation.device),
        steps=torch.from_numpy(plan.steps).to(federation.device),
        state={},
        prepared={},
    )
    offsets = np.arange(len(members))[None, :, None] * room
    taken = np.arange(width) < plan.lengths[..., None]
    return Stack(
        members,
        plan,
        sizes,
        at,
        own,
        _augmentation(members, round, plan) if augmented else None,
        federation.on_device(plan.positions + offsets),
        torch.from_numpy(taken).to(federation.device, dtype),
        (plan.lengths == width).all(1).tolist(),
    )


class Prepared(NamedTuple):
    """What was made for a round that had not begun."""

    round: int
    clients: list[int]
    stack: Stack
    batches: list[Batch] | None

    def fits(self, members: Sequence[Member], round: int) -> bool:
        """Whether it is what is asked for now."""
        return self.round == round and self.clients == [member.client for member in members]


def normalised(world: World) -> Tensor | None:
    """All examples as the model sees them, if they take little memory and are not augmented first."""
    federation = world.federation
    if world.local.augment != "none" or federation.inputs.numel() * federation.normalise.dtype.itemsize > KEPT_DATA:
        return None
    return federation.normalise(federation.inputs)


class _Holdings(NamedTuple):
    """Which examples some clients hold."""

    groups: list[tuple[Parts, np.ndarray, np.ndarray]]
    """Those of one experiment: everybody's examples, their positions among the clients, their numbers."""
    sizes: np.ndarray

    @property
    def even(self) -> bool:
        """Whether all clients of all these experiments hold the same number of examples."""
        return all(parts.even for parts, _, _ in self.groups)

    def numbers(self, room: int) -> np.ndarray:
        """[clients, room]: which examples of the dataset each holds; the first one again where there is none."""
        columns = np.arange(room)
        within = np.where(columns < self.sizes[:, None], columns, 0)
        found = np.empty(within.shape, dtype=np.int64)
        for parts, at, clients in self.groups:
            found[at] = parts.indices[parts.offsets[clients][:, None] + within[at]]
        return found


def _holdings(members: Sequence[Member]) -> _Holdings:
    clients = np.array([member.client for member in members])
    which = np.array([member.which for member in members])
    sizes = np.empty(len(members), dtype=np.int64)
    groups = []
    for experiment in np.unique(which).tolist() if which.any() else [int(which[0])]:
        (at,) = np.nonzero(which == experiment)
        parts = members[int(at[0])].world.federation.train
        sizes[at] = parts.sizes[clients[at]]
        groups.append((parts, at, clients[at]))
    return _Holdings(groups, sizes)


def sizes_of(members: Sequence[Member]) -> np.ndarray:
    """How many training examples each client holds."""
    return _holdings(members).sizes


def kept_states(members: Sequence[Member], fresh: Tensors, room: int, per_example: frozenset[str]) -> Tensors:
    """The states that the clients kept, and the ``fresh`` one of those seen for the first time."""
    if all(member.state is None for member in members):
        return fresh
    columns: Tensors = {}
    for name, values in fresh.items():
        kept = []
        for index, member in enumerate(members):
            value = values[index] if member.state is None else member.state[name]
            if name in per_example and len(value) < room:
                value = torch.cat([value, value.new_zeros((room - len(value), *value.shape[1:]))])
            kept.append(value)
        columns[name] = torch.stack(kept)
    return columns


def per_example_state(method: Method, params: Tensors, federation: Federation) -> frozenset[str]:
    """The names of the states that hold one entry per training example: those whose length follows the client's."""
    shapes: list[dict[str, torch.Size]] = []
    for examples in (2, 3):
        device, shape = federation.device, (examples, *federation.shape)
        data = Batch(
            torch.zeros(shape, dtype=federation.normalise.dtype, device=device),
            torch.zeros(examples, dtype=torch.int64, device=device),
        )
        counts = torch.zeros(federation.classes, dtype=torch.int64, device=device)
        number = torch.tensor(examples, device=device)
        state = method.init_client(params, Own(data, counts + examples, number, number, {}, {}))
        shapes.append({name: value.shape for name, value in state.items()})
    return frozenset(name for name, shape in shapes[0].items() if shapes[1][name] != shape)


def like_costs(steps: np.ndarray, parts: int) -> list[int]:
    """Where clients in the order of their steps, most of them first, are cut so that the dearest part is cheapest.

    A part costs Σ steps, and ``OVERHEAD`` for every step of its first client.
    """
    sums = np.concatenate([[0], np.cumsum(steps)])

    def cuts(limit: float) -> list[int]:
        ends = [0]
        while ends[-1] < len(steps):
            start = ends[-1]
            allowed = limit + sums[start] - OVERHEAD * steps[start]
            ends.append(max(start + 1, int(np.searchsorted(sums, allowed, "right")) - 1))
        return ends[1:-1]

    low, high = 0.0, float(sums[-1] + OVERHEAD * steps[0])
    while high - low > 1:
        middle = (low + high) / 2
        low, high = (low, middle) if len(cuts(middle)) < parts else (middle, high)
    return cuts(high)


def in_buckets(steps: np.ndarray, cost: Callable[[int], float]) -> list[np.ndarray]:
    """Positions of clients, sorted by their steps and cut into equal parts, so that few wait for one that takes more.

    ``cost(clients)`` is the time of a step with so many clients; the cheapest number of parts among 1, 2, 4 and 8 wins.
    """
    order = np.argsort(-steps, kind="stable")
    candidates = [np.array_split(order, parts) for parts in (1, 2, 4, 8) if parts <= len(order)]
    return min(candidates, key=lambda parts: sum(int(steps[part].max()) * cost(len(part)) for part in parts))


def roomy(size: int) -> int:
    """The next of 1, 2, 3, 4, 6, 8, 12, 16, …: few different shapes, at most half as much again."""
    power = 1 << max(0, size - 1).bit_length()
    return power * 3 // 4 if power >= 4 and size <= power * 3 // 4 else power


def _augmentation(members: Sequence[Member], round: int, plan: Schedule) -> Tensor:
    """The draws of ``LoopEngine``: one stream per client, as long and wide as that client's own batches."""
    steps, clients, width = plan.positions.shape
    draws = np.zeros((steps, clients, width, 3), dtype=np.int64)
    for column, member in enumerate(members):
        own_steps, widest = int(plan.steps[column]), int(plan.lengths[:, column].max())
        rng = stream(member.world.seed, "augment", round, member.client)
        draws[:own_steps, column, :widest] = draw_crop_flip(rng, own_steps, widest)
    return torch.from_numpy(draws).to(members[0].world.federation.device)
