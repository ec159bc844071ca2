"""The local steps of a stack of clients, played from recordings of one step for all of them.

Clients stand in the order of their steps, those with most of them first. Who has done all of them leaves the stack as
soon as it can be made smaller; until then its place is computed on, and what the client had is put back at the end. So
a step need not know who is done: it is the same for even and uneven clients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.func import vmap
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from fedretain.engines.functional import Carry, FunctionalModel, Moving, local_step
from fedretain.engines.leaves import carry_of, laid, leaves_of
from fedretain.engines.native.program import Part, play_summed
from fedretain.engines.recording import Recording, RoundWatch, WatchedReceived
from fedretain.engines.stack import FETCHED, Stack
from fedretain.engines.varied import Varied
from fedretain.methods import Batch, Own, Received
from fedretain.tensors import Tensors

AT_ONCE = 32
"""Steps whose batches are collected at most, where one call plays several; together they hold FETCHED bytes."""


class Each(NamedTuple):
    """What the hooks of every client are given."""

    received: Received
    own: Own
    numbers: Tensors
    lr: float | Tensor


class LocalSteps:
    """Records the steps of an experiment, or of several alike (``many``), and plays them."""

    def __init__(self, model: FunctionalModel, varied: Varied, *, many: bool) -> None:
        self.model, self.varied, self.many = model, varied, many
        self.world = varied.template
        self.recordings: dict[Any, Recording] = {}
        self.not_summed: set[Any] = set()
        """Kinds of steps that are not played client after client, those of a stack together."""
        self.indices: Sequence[Tensor] = ()
        self.transposed: set[str] = set()
        """Parameters that the last steps wanted to lie transposed in memory, as the next ones most likely will."""

    def play(self, each: Each, clients: Stack, carry: Carry, batches: Iterable[Batch]) -> tuple[Carry, Tensor]:
        """All local steps; the losses [steps, clients], 0 where a client has done all its steps."""
        round, widths, fixed = each.received.round, clients.widths(), self.fixed(each)
        indices, rate, read = self._indices(len(widths)), self._rate(each), leaves_of(fixed)
        shared = 0 if self.many else len(leaves_of(fixed[0]))
        busy, stay = [*(clients.plan.lengths > 0).sum(1).tolist(), 0], [*widths[1:], 0]
        leaves = whole = [leaf for part in carry for leaf in part.values()]
        ended: list[tuple[slice, list[Tensor]]] = []
        history: list[Tensor] = []
        waiting: list[Any] = []
        current: Recording | None = None

        def catch_up() -> list[Tensor]:
            """Where the steps lead that have been collected."""
            if not waiting or current is None:
                return leaves
            new, losses = current.steps(leaves, waiting, begun)
            history.extend(losses)
            waiting.clear()
            return new

        for step, (batch, width) in enumerate(zip(batches, widths, strict=True)):
            if step == 0 or width < widths[step - 1]:
                leaves = catch_up()
                whole = _written(leaves, whole)
                leaves = [leaf[:width] for leaf in whole]
                shown = [*read[:shared], *(_first(leaf, width) for leaf in read[shared:])]
                found: dict[bool, Recording] = {}
                current, own_rate = None, rate[:width] if self.many else rate
            moving = Moving(indices[step], own_rate)
            recording = found.get(batch.weights is None)
            if recording is None:
                leaves = catch_up()
                recording = self._recording(carry_of(leaves, carry), batch, moving, fixed, round)
                found[batch.weights is None] = recording
            if recording is not current:
                leaves = catch_up()
                leaves = [laid(leaf, turned=at in recording.transposed) for at, leaf in enumerate(leaves)]
                current, begun = recording, recording.begin(leaves, shown)
                self.transposed = {name for at, name in enumerate(carry.params) if at in recording.transposed}
            waiting.append((*batch, *moving))
            places = slice(busy[step + 1], min(busy[step], stay[step]))
            at_once = min(AT_ONCE, FETCHED // batch.inputs.nbytes) if recording.several else 1
            if places.start < places.stop or len(waiting) >= at_once:
                leaves = catch_up()
            if places.start < places.stop:
                ended.append((places, [leaf[places].clone() for leaf in leaves]))
        leaves = catch_up()
        whole = _written(leaves, whole)
        for places, values in ended:
            for leaf, value in zip(whole, values, strict=True):
                if leaf.stride(0):  # else frozen: one copy for everybody
                    leaf[places] = value
        return carry_of(whole, carry), _losses(history, clients)

    def play_summed(
        self,
        each: Each,
        clients: Stack,
        batches: Callable[[], Sequence[Batch]],
        carry: Callable[[], Carry],
        shares: Tensor,
    ) -> tuple[Tensors, Tensor] | None:
        """The same for clients that all start from the received model: Σ p·(change of the model), and the losses.

        Only where kernels play all steps of a client at once, so that its model need not go back to memory; else None.
        Whether that is so depends on the shapes alone, never on what was played before.
        """
        fixed, round, start = self.fixed(each), each.received.round, list(each.received.params.values())
        shape = torch.Size((*clients.rows.shape[1:], *self.world.federation.shape))
        kinds = {full: _kind_of_step(shape, full, fixed[1]) for full in dict.fromkeys(clients.full)}
        if frozenset(kinds.values()) in self.not_summed:
            return None
        given, rate, indices = batches(), self._rate(each), self._indices(len(clients.rows))
        recordings = {}
        for full, kind in kinds.items():
            known = self.recordings.get(kind)
            if known is None or not known.serves(round):
                known = self._recording(carry(), _of_all(given, full, shape), Moving(indices[0], rate), fixed, round)
            recordings[full] = known
        first, parts = next(iter(recordings.values())), []
        if all(one.transposed == first.transposed and one.carried == len(start) for one in recordings.values()):
            start = [laid(leaf, turned=at in first.transposed) for at, leaf in enumerate(start)]
            place = [torch.empty_like(leaf).expand(len(shares), *leaf.shape) for leaf in start]
            for full, recording in recordings.items():
                if recording.program is None or not recording.one_place:
                    break
                begun = recording.begin(place, leaves_of(fixed))
                which = [step for step, one in enumerate(clients.full) if one == full]
                arguments = [[*place, *given[step], *Moving(indices[step], rate), *begun] for step in which]
                example = [*place, *_of_all(given, full, shape), *Moving(indices[0], rate), *begun]
                plan = recording.program.plan_for(example, arguments)
                parts += [Part(plan, arguments, which)] if plan is not None else []
        if len(parts) < len(recordings):
            self.not_summed.add(frozenset(kinds.values()))
            return None
        sums, losses = play_summed(parts, clients.plan.steps, place, start, shares)
        return dict(zip(each.received.params, sums, strict=True)), losses

    def _recording(self, carry: Carry, batch: Batch, moving: Moving, fixed: Any, round: int) -> Recording:
        """A step of these shapes, recorded before or now; ``fixed`` may be of more clients."""
        shared, own, numbers = fixed
        key = _kind_of_step(batch.inputs.shape, batch.weights is None, own)
        recording = self.recordings.get(key)
        if recording is None or not recording.serves(round):
            part = partial(tree_map, partial(_first, count=len(batch.labels)))
            shown = (part(shared) if self.many else shared, part(own), part(numbers))
            # How a product's gradient is made depends on how the weights lie; the recording says how they should.
            plain = tree_map(lambda leaf: laid(leaf, turned=False), carry)
            recording = self.record(plain, (batch, moving), shown, round, own_rates=self.many)
            self.recordings[key] = recording
        return recording

    def _indices(self, total: int) -> Sequence[Tensor]:
        """The numbers of the steps."""
        if len(self.indices) < total:
            self.indices = torch.arange(total, device=self.world.federation.device).unbind()
        return self.indices

    def _rate(self, each: Each) -> Tensor:
        """η of the round: a number, or one for each client where the experiments differ."""
        federation = self.world.federation
        return torch.as_tensor(each.lr, dtype=federation.normalise.dtype, device=federation.device)

    def fixed(self, each: Each) -> tuple[Any, ...]:
        """What a step reads and no step changes; a client's data only where a hook may look at it."""
        received, own = each.received, each.own
        hooks = any(self.world.method.uses(hook) for hook in ("penalty", "direction", "step"))
        frozen = any(self.world.method.freezes(name) for name in received.params)
        server = received.server if hooks else {}
        params = received.params if hooks or frozen else {}
        data = own.data if hooks else Batch(own.data.labels[:, :1], own.data.labels[:, :1])
        return (params, received.buffers if hooks else {}, server), own._replace(data=data), each.numbers

    def record(
        self,
        carry: Carry,
        moving: Any,
        fixed: Any,
        round: int,
        *,
        own_rates: bool,
        idle: bool = False,
        for_capture: bool = False,
    ) -> Recording:
        """Record a step of these shapes; with ``own_rates`` every client has one.

        ``idle``: a rate of 0 is for a client that has done all its steps, and keeps it as it is.
        """
        watch = RoundWatch()
        masked = idle and (self.world.method.uses("step") or bool(carry.buffers))

        def one(
            carry: Carry, batch: Batch, moving: Moving, shared: Any, own: Own, numbers: Tensors
        ) -> tuple[Carry, Tensor]:
            received = WatchedReceived.of(shared, round, watch)
            world = self.varied.world(numbers)
            new, loss = local_step(world, self.model, carry, batch, moving, received, own)
            if masked:
                busy = moving.lr > 0
                new = tree_unflatten(
                    [
                        torch.where(busy, after, before)
                        for after, before in zip(tree_flatten(new)[0], tree_flatten(carry)[0], strict=True)
                    ],
                    tree_flatten(new)[1],
                )
                loss = torch.where(busy, loss, torch.zeros_like(loss))
            return new, loss

        def every(carry: Carry, moving: tuple[Batch, Moving], fixed: tuple[Any, Own, Tensors]) -> tuple[Carry, Tensor]:
            batch, now = moving
            shared, own, numbers = fixed
            one_each = Moving(None, 0 if own_rates else None)  # type: ignore[arg-type]
            sent = dims_of(shared) if self.many else None
            dims = (dims_of(carry), dims_of(batch), one_each, sent, dims_of(own), dims_of(numbers))
            return vmap(one, in_dims=dims)(carry, batch, now, shared, own, numbers)

        recording = Recording(every, carry, moving, fixed, exact=False, stacked=True, for_capture=for_capture)
        recording.only_round = round if watch.seen else None
        return recording


def _of_all(batches: Sequence[Batch], full: bool, shape: torch.Size) -> Batch:
    """A batch of all clients with or without padding; where there is none, one that has nothing in it."""
    for batch in batches:
        if (batch.weights is None) == full and batch.inputs.shape == shape:
            return batch
    inputs, labels, _ = batches[0]
    weights = None if full else inputs.new_ones(shape[:2])
    return Batch(inputs.new_zeros(shape), labels.new_zeros(shape[:2]), weights)


def _kind_of_step(shape: torch.Size, full: bool, own: Own) -> Any:
    """Steps that one recording serves: by the shape of their inputs, and whether no batch has padding."""
    return shape, full, own.data.weights is None, own.data.labels.shape[1:]


def dims_of(tree: Any) -> Any:
    """The leading axis of every tensor; None stays None."""
    return tree_map(lambda leaf: 0 if isinstance(leaf, Tensor) else None, tree)


def _first(leaf: Any, count: int) -> Any:
    """The part of the first so many clients."""
    return leaf[:count] if isinstance(leaf, Tensor) else leaf


def _written(part: Sequence[Tensor], whole: Sequence[Tensor]) -> list[Tensor]:
    """The values of all clients, those of the first ones written over where they have other memory."""
    if part and len(part[0]) == len(whole[0]):
        return list(part)
    for new, old in zip(part, whole, strict=True):
        if new.data_ptr() != old.data_ptr():
            old[: len(new)] = new
    return list(whole)


def _losses(history: Sequence[Tensor], clients: Stack) -> Tensor:
    """The losses of all steps side by side, without those of clients that had done all theirs."""
    busy = clients.plan.lengths > 0
    if busy.all():
        return torch.stack(list(history))
    widths = np.array([len(losses) for losses in history])
    part_of_step = torch.from_numpy(np.arange(busy.shape[1]) < widths[:, None]).to(history[0].device)
    losses = history[0].new_zeros(busy.shape)
    losses[part_of_step] = torch.cat(list(history))
    return losses.masked_fill_(torch.from_numpy(~busy).to(losses.device), 0.0)
