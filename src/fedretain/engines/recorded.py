"""One client after another like the loop engine, with the steps played from a recording: to the same bits, or not."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from fedretain.engines.engine import World
from fedretain.engines.functional import Carry, FunctionalModel, Moving, local_step
from fedretain.engines.loop import LoopEngine, LoopTask, copied
from fedretain.engines.recording import Recording, RoundWatch, WatchedReceived
from fedretain.engines.shared import dump_names
from fedretain.methods import Batch, Own, Received
from fedretain.tensors import Tensors

WORTH_RECORDING = 3
"""Steps of one batch size before it is recorded: the odd last batch of a client may never come again."""


@dataclass(frozen=True)
class RecordedEngine(LoopEngine):
    """The loop engine without its Python time, for models without running statistics and ordinary local steps.

    ``exact`` recordings give the loop engine's bits; others may sum in another order, where that is faster.
    """

    exact: bool = True
    recordings: dict[Any, Recording] = field(default_factory=dict)
    seen: dict[Any, int] = field(default_factory=dict)
    model: list[FunctionalModel] = field(default_factory=list)

    def _local_steps(
        self, received: Received, own: Own, task: LoopTask, batches: Iterator[Batch]
    ) -> tuple[Tensors, list[Tensor]]:
        """As in the loop engine; a batch size that comes up often is played."""
        if not recordable(self.world):
            return super()._local_steps(received, own, task, batches)
        if not self.model:
            self.model.append(FunctionalModel(self.world))
        params = copied(received.params)
        carry = Carry(params, {}, self.world.local.build_optimizer().init(params))
        leaves, spec = tree_flatten(carry)
        fixed = self._fixed(received, own)
        fixed_leaves, rate = tree_flatten(fixed)[0], torch.tensor(task.lr, dtype=torch.float64)
        losses = []
        current: Recording | None = None
        begun: list[Any] = []
        for index, batch in enumerate(batches):
            moving = (batch, Moving(torch.tensor(index), rate))
            recording = self._recording(tree_unflatten(leaves, spec), moving, fixed, received.round)
            if recording is None:
                current = None
                now = tree_unflatten(leaves, spec)
                carry, loss = local_step(self.world, self.model[0], now, *moving, received, fixed[1])
                leaves = tree_flatten(carry)[0]
            else:
                if recording is not current:
                    current, begun = recording, recording.begin(leaves, fixed_leaves)
                leaves, loss = recording.step(leaves, (*batch, *moving[1]), begun)
            losses.append(loss)
        return tree_unflatten(leaves, spec).params, losses

    def _recording(self, carry: Carry, moving: Any, fixed: Any, round: int) -> Recording | None:
        key = (moving[0].inputs.shape, fixed[1].data.labels.shape)
        found = self.recordings.get(key)
        if found is not None and found.serves(round):
            return found
        self.seen[key] = self.seen.get(key, 0) + 1
        if self.seen[key] < WORTH_RECORDING:
            return None
        watch = RoundWatch()

        def step(carry: Carry, moving: Any, fixed: Any) -> tuple[Carry, Tensor]:
            batch, now = moving
            received = WatchedReceived.of(fixed[0], round, watch)
            return local_step(self.world, self.model[0], carry, batch, now, received, fixed[1])

        recording = Recording(step, carry, moving, fixed, exact=self.exact)
        recording.only_round = round if watch.seen else None
        self.recordings[key] = recording
        return recording

    def _fixed(self, received: Received, own: Own) -> tuple[Any, Own]:
        """What every step reads; a client's data only where a hook may look at it."""
        hooks = any(self.world.method.uses(hook) for hook in ("penalty", "direction"))
        none = own.data.labels[:0]
        data = own.data if hooks else Batch(none, none)
        state = dict(sorted(own.state.items()))  # a recording knows its inputs by their order
        return (received.params, received.buffers, received.server), own._replace(data=data, state=state)


def recordable(world: World) -> bool:
    """Whether the recorded steps are the loop's to the bit."""
    return not world.method.uses("step") and next(world.model.buffers(), None) is None


def sharing_recordings(*, exact: bool) -> Callable[[World], RecordedEngine]:
    """Makes engines for worlds that differ in nothing that a step sees: what one records the others play."""
    first: list[RecordedEngine] = []

    def recorded(world: World) -> RecordedEngine:
        if not first:
            first.append(RecordedEngine(world, exact))
        return replace(first[0], world=world)

    return recorded


def engines_for_all(worlds: Sequence[World], *, exact: bool) -> list[RecordedEngine]:
    """An engine for each experiment; those whose steps differ in nothing but rate and data play the same recordings."""
    engines: list[RecordedEngine] = []
    found: dict[bytes, RecordedEngine] = {}
    for world in worlds:
        local = world.local.model_copy(update={"lr": 1.0})  # recorded steps are given the rate
        try:
            step = dump_names((world.model, world.loss, world.method, local, world.precision))
        except (pickle.PicklingError, AttributeError, TypeError):
            engines.append(RecordedEngine(world, exact))
            continue
        like = found.setdefault(step, RecordedEngine(world, exact))
        engines.append(replace(like, world=world))
    return engines
