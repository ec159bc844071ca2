"""Many clients at once: stacked parameters, one recorded step for all of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.func import vmap

from fedretain.engines.chunks import in_order, only, part_of, summed_up
from fedretain.engines.engine import Uploads, World, batch_norm_advice
from fedretain.engines.functional import Carry, FunctionalModel, FunctionalTask
from fedretain.engines.memory import clients_in_memory
from fedretain.engines.refusals import refuse_divergence, refuse_single_examples
from fedretain.engines.schedule import steps_of
from fedretain.engines.stack import (
    CLIENT_HOOKS,
    FETCHED,
    OVERHEAD,
    Member,
    Prepared,
    Stack,
    Work,
    in_buckets,
    kept_states,
    normalised,
    per_example_state,
    sizes_of,
    stack,
)
from fedretain.engines.steps import Each, LocalSteps, dims_of
from fedretain.engines.sums import Sums
from fedretain.engines.varied import Varied
from fedretain.errors import FedretainError, TrainingError
from fedretain.methods import Batch, Own, Received
from fedretain.tensors import Tensors, all_finite, size_in_bytes

MOSTLY_IDLE = 8
"""Clients' places in a stack for each that is used, from which on unlike clients are trained apart."""


class VectorisedEngine:
    """Trains all participants of a round together, those of several experiments too where their shapes are the same.

    With several ``worlds`` every client has its own experiment's received model, rate, loss and method's numbers.
    """

    gathers = True
    """Whether batches are cut from the clients' own data; if not, they are read from the dataset."""
    for_capture = False
    """Whether steps are captured for a GPU rather than played."""

    def __init__(self, *worlds: World, at_once: int | None = None) -> None:
        self.worlds = worlds
        self.world = world = worlds[0]
        self.many = len(worlds) > 1
        self.varied = Varied.of(worlds)
        self.at_once = at_once
        self.model = FunctionalModel(world)
        self.steps = LocalSteps(self.model, self.varied, many=self.many)
        self.prepared: Prepared | None = None
        self.batches: list[Batch] | None = None
        """The batches of the stack that trains next, where they were fetched ahead."""
        self.room: int | None = None
        self.data = normalised(world) if world.federation.device.type == "cpu" else None
        """All examples as the model sees them, where that is little."""
        params = {name: p.detach() for name, p in world.model.named_parameters()}
        self.uses_own = any(world.method.uses(hook) for hook in CLIENT_HOOKS)
        self.per_example = (
            per_example_state(world.method, params, world.federation)
            if world.method.uses("init_client")
            else frozenset()
        )

    def train(
        self,
        received: Received,
        cohort: np.ndarray,
        states: Callable[[int], Tensors | None],
        *,
        local_models: bool = True,
        weights: Tensor | None = None,
        upcoming: np.ndarray | None = None,
    ) -> Iterator[Uploads]:
        """Yield the uploads of the cohort in its order, as many clients at a time as memory holds."""
        for _, uploads in self.train_all([Work(received, cohort, states, local_models, weights, upcoming)]):
            yield uploads

    def train_all(self, works: Sequence[Work]) -> Iterator[tuple[int, Uploads]]:
        """The same for all experiments at once, one piece of work for each; yields which of them, and its uploads."""
        if not self.many:
            yield from ((0, uploads) for uploads in self._train_one(works[0]))
            return
        everyone = [(which, client) for which, work in enumerate(works) for client in work.cohort.tolist()]
        room = self.at_once or self._room(works[0].received)
        for start in range(0, len(everyone), room):
            part = everyone[start : start + room]
            members = [Member(self.worlds[which], client, works[which].states(client), which) for which, client in part]
            done = 0
            for uploads in self._train([work.received for work in works], members):
                owners = [member.which for member in members[done : done + len(uploads.clients)]]
                done += len(owners)
                for which in sorted(set(owners)):
                    first, count = owners.index(which), owners.count(which)
                    own = uploads if count == len(owners) else part_of(uploads, first, first + count)
                    yield which, own if works[which].local_models else own._replace(params={})

    def _room(self, received: Received) -> int:
        """How many clients fit into memory at once, by what is free when the first ones train."""
        if self.room is None:
            self.room = clients_in_memory(self.world, received)
        return self.room

    def _train_one(self, work: Work) -> Iterator[Uploads]:
        """A single experiment; its uploads are summed here where nobody looks at them."""
        room = self.at_once or self._room(work.received)
        stateful = self.world.method.uses("init_client")
        weights = None if self.per_example else work.weights
        for start in range(0, len(work.cohort), room):
            some = work.cohort[start : start + room].tolist()
            members = [Member(self.world, client, work.states(client) if stateful else None) for client in some]
            here = None if weights is None else weights[start : start + room]
            for uploads in self._train([work.received], members, here, keep_models=work.local_models):
                yield uploads if work.local_models else uploads._replace(params={})

    def close(self) -> None:
        """Nothing is held outside this process."""

    def _train(
        self,
        received: Sequence[Received],
        members: Sequence[Member],
        weights: Tensor | None = None,
        *,
        keep_models: bool = True,
    ) -> Iterator[Uploads]:
        try:
            with torch.no_grad():
                yield from self._in_order(received, members, weights, keep_models)
        except FedretainError:
            raise
        except (RuntimeError, ValueError, TypeError, KeyError) as error:
            raise TrainingError(
                f"local training failed: {error}{batch_norm_advice(error)}; engine: loop trains client by client and "
                "says which",
                round=received[0].round,
            ) from error

    def _in_order(
        self, received: Sequence[Received], members: Sequence[Member], weights: Tensor | None, keep_models: bool
    ) -> Iterator[Uploads]:
        """Train in buckets of like clients; give back in the order asked for."""
        buckets = self._buckets(members)
        chunks = []
        for bucket in buckets:
            clients = self._stacked([members[at] for at in bucket.tolist()], received[0].round)
            by = None if weights is None else weights[torch.from_numpy(bucket).to(weights.device)]
            uploads = self._train_stack(self._received(received, clients), clients, by, keep_models)
            chunks += self._apart(uploads, clients)
        yield from in_order(chunks, np.concatenate(buckets))

    def _buckets(self, members: Sequence[Member]) -> list[np.ndarray]:
        """Positions of members that train as one stack."""
        steps = steps_of(sizes_of(members), self.world.local)
        if (steps == steps[0]).all():
            return [np.arange(len(steps))]
        if not self.for_capture and int(steps.max()) * len(steps) <= MOSTLY_IDLE * int(steps.sum()):
            return [np.argsort(-steps, kind="stable")]  # who has done all steps stands behind and drops out
        return in_buckets(steps, lambda clients: OVERHEAD + clients)

    def _stacked(self, members: Sequence[Member], round: int) -> Stack:
        """Clients side by side, as they were prepared or made now."""
        prepared, self.prepared = self.prepared, None
        if prepared is not None and prepared.fits(members, round):
            self.batches = prepared.batches
            return prepared.stack._replace(members=members)
        self.batches = None
        return stack(members, round, gather=self.gathers and self.data is None)

    def look_ahead(self, clients: np.ndarray, round: int) -> None:
        """Make a round's stack and batches before it is asked for; whoever waits for others has the time.

        For one experiment whose clients train as one stack; where others are asked for, only this time is lost.
        """
        members = [Member(self.world, client, None) for client in clients.tolist()]
        if self.many or not members or len(members) > (self.room or 0):
            return
        bucket, *others = self._buckets(members)
        if others:
            return
        members = [members[at] for at in bucket.tolist()]
        made = stack(members, round, gather=self.gathers and self.data is None)
        batches = list(made.batches(self.data)) if made.draws is None and made.size <= FETCHED else None
        self.prepared = Prepared(round, [member.client for member in members], made, batches)

    def _received(self, received: Sequence[Received], clients: Stack) -> Received:
        """What the clients received: one copy for everybody, or each what its own experiment sent."""
        if not self.many:
            return received[0]
        which = torch.tensor([member.which for member in clients.members], device=self.world.federation.device)

        def each(kind: str) -> Tensors:
            parts = [getattr(sent, kind) for sent in received]
            return {name: torch.stack([part[name] for part in parts])[which] for name in parts[0]}

        return Received(each("params"), each("buffers"), each("server"), received[0].round)

    def _apart(self, uploads: Uploads, clients: Stack) -> list[Uploads]:
        """One by one where a state has an entry per example, without the padding of others; else all together."""
        if not self.per_example:
            return [uploads]
        return [only(uploads, index, self.per_example, member.examples) for index, member in enumerate(clients.members)]

    def _train_stack(self, received: Received, clients: Stack, weights: Tensor | None, keep_models: bool) -> Uploads:
        """Local training of a stack: what ``LoopEngine`` does for one client, with a leading axis.

        With ``weights`` only the weighted sums of the uploads are kept, and the local models if that is asked for: the
        sums are then to the same bits.
        """
        world, method = self.world, self.world.method
        count = len(clients.members)
        own = clients.own
        lr = self._rates(received.round, clients)
        each = Each(received, own, self.varied.numbers(clients), lr)
        if self.uses_own:
            own = own._replace(state=self._states(each, clients))
            each = each._replace(own=own)
            if method.uses("prepare"):
                own = own._replace(prepared=self._prepared(each))
                each = each._replace(own=own)

        def start() -> Carry:
            params = {name: self._start(name, value, count) for name, value in received.params.items()}
            buffers = {name: self._start(name, value, count) for name, value in received.buffers.items()}
            return Carry(params, buffers, world.local.build_optimizer().init(params))

        only_sums = weights is not None and not self.uses_own and not keep_models
        if weights is not None and only_sums:
            uploads = self._summed(each, clients, start, weights)
            if uploads is not None:
                return uploads
        carry, history = self._steps(each, clients, start())

        if self.model.padding.needs_two:
            refuse_single_examples(clients, received.round)
        state, extras, delta = own.state, {}, carry.params
        if only_sums:
            for name, value in delta.items():
                value.sub_(received.params[name])
        else:
            refuse_divergence(history, carry.params, clients, received.round)
            delta = {name: value - received.params[name] for name, value in carry.params.items()}
        if self.uses_own:
            delta = self._mapped(
                each, lambda m, received, own, task, delta: m.upload(delta, received, own, task), delta
            )
            state, extras = self._mapped(
                each,
                lambda m, received, own, task, carry: m.finish(carry.params, received, own, task),
                carry,
                buffers=carry.buffers,
            )
        steps = torch.from_numpy(clients.plan.steps).to(history.device, history.dtype)
        uploads = Uploads(
            clients=np.array([member.client for member in clients.members]),
            params=carry.params,
            delta=delta,
            buffers=carry.buffers,
            extras=extras,
            state=state,
            train_loss=history.sum(0) / steps,
            steps=clients.plan.steps,
        )
        if weights is None:
            return uploads
        summed = summed_up(uploads, weights, keep_models=keep_models)
        assert summed.sums is not None
        if only_sums and not (all_finite(summed.sums.delta) and bool(uploads.train_loss.isfinite().all())):
            refuse_divergence(history, delta, clients, received.round)
        return summed

    def _summed(self, each: Each, clients: Stack, start: Callable[[], Carry], weights: Tensor) -> Uploads | None:
        """Clients trained and summed up one after another, without a stack of their models.

        None where that cannot be done, or went wrong: the usual way says for whom.
        """
        if self.many or self.for_capture or clients.draws is not None or clients.size > FETCHED:
            return None

        def batches() -> list[Batch]:
            self.batches = self.batches or list(clients.batches(self.data))
            return self.batches

        made = self.steps.play_summed(each, clients, batches, start, weights)
        if made is None:
            return None
        delta, history = made
        loss = history.sum(0) / torch.from_numpy(clients.plan.steps).to(history.dtype)
        if not (all_finite(delta) and bool(loss.isfinite().all())):
            return None
        self.batches = None
        return Uploads(
            clients=np.array([member.client for member in clients.members]),
            params={},
            delta={},
            buffers={},
            extras={},
            state={},
            train_loss=loss,
            steps=clients.plan.steps,
            sums=Sums(delta, bytes_up=len(clients.members) * size_in_bytes(each.received.params)),
        )

    def _prepared(self, each: Each) -> Tensors:
        """What the method makes of the received model before local training."""
        prepared: Tensors = self._mapped(each, lambda m, received, own, task: m.prepare(received, own, task))
        return prepared

    def _rates(self, round: int, clients: Stack) -> float | Tensor:
        """η of the round, or of each client where the experiments differ."""
        if not self.many:
            return self.world.local.lr_of_round(round)
        rates = [member.world.local.lr_of_round(round) for member in clients.members]
        return torch.tensor(rates, dtype=self.world.federation.normalise.dtype, device=self.world.federation.device)

    def _start(self, name: str, value: Tensor, count: int) -> Tensor:
        """A received tensor once for every client, in memory of its own, lying as the recorded steps want it."""
        if name in self.steps.transposed:
            return value.mT.contiguous().mT if self.many else _repeat(value.mT, count).mT
        return value.clone() if self.many else _repeat(value, count)

    def _steps(self, each: Each, clients: Stack, carry: Carry) -> tuple[Carry, Tensor]:
        """All local steps; the losses [steps, clients], 0 where a client has done all its steps."""
        batches, self.batches = self.batches, None
        return self.steps.play(each, clients, carry, clients.batches(self.data) if batches is None else batches)

    def _states(self, each: Each, clients: Stack) -> Tensors:
        """What the clients kept."""
        if not self.world.method.uses("init_client"):
            return {}
        fresh = self._mapped(each, lambda m, received, own, task: m.init_client(received.params, own))
        return kept_states(clients.members, fresh, clients.own.data.labels.shape[1], self.per_example)

    def _mapped(self, each: Each, hook: Callable[..., Any], *more: Any, buffers: Tensors | None = None) -> Any:
        """A hook of every client."""
        received, round = each.received, each.received.round

        def one(own: Own, shared: Any, buffers: Tensors, numbers: Tensors, lr: float | Tensor, *more: Any) -> Any:
            params, sent_buffers, server = shared
            world = self.varied.world(numbers)
            task = FunctionalTask(world, self.model, own.class_counts, buffers, lr)
            return hook(world.method, Received(params, sent_buffers, server, round), own, task, *more)

        shared = (received.params, received.buffers, received.server)
        sent = dims_of(shared) if self.many else None
        own_buffers = received.buffers if buffers is None else buffers
        dims = (
            *(dims_of(each.own), sent),
            *(sent[1] if sent is not None and buffers is None else None if buffers is None else dims_of(buffers),),
            *(dims_of(each.numbers), 0 if self.many else None),
            *(dims_of(part) for part in more),
        )
        return vmap(one, in_dims=dims)(each.own, shared, own_buffers, each.numbers, each.lr, *more)


def _repeat(value: Tensor, count: int) -> Tensor:
    return value.expand(count, *value.shape).clone(memory_format=torch.contiguous_format)
