"""Many clients at once: stacked parameters, one recorded step for all of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.func import vmap
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from fedretain.engines.engine import Uploads, World, batch_norm_advice
from fedretain.engines.functional import Carry, FunctionalModel, FunctionalTask, Moving, local_step
from fedretain.engines.recording import Recording, RoundWatch, WatchedReceived
from fedretain.engines.schedule import local_steps
from fedretain.engines.stack import CLIENT_HOOKS, Member, Stack, Work, in_buckets, kept_states, per_example_state, stack
from fedretain.engines.varied import Varied
from fedretain.errors import FedretainError, TrainingError
from fedretain.methods import Batch, Own, Received
from fedretain.tensors import Tensors, size_in_bytes

MEMORY = 2**30
"""Bytes that the clients trained at once may take on a CPU."""
OVERHEAD = 16.0
"""The time of a step's operations before any client's share, in clients; decides how uneven clients are bucketed."""


class VectorisedEngine:
    """Trains all participants of a round together, those of several experiments too where their shapes are the same.

    With several ``worlds`` every client has its own experiment's received model, rate, loss and method's numbers.
    """

    gathers = True
    """Whether batches are cut from the clients' own data; if not, they are read from the dataset."""
    for_capture = False
    """Whether recorded steps are captured for a GPU rather than played."""

    def __init__(self, *worlds: World, at_once: int | None = None) -> None:
        self.worlds = worlds
        self.world = world = worlds[0]
        self.many = len(worlds) > 1
        self.varied = Varied.of(worlds)
        self.at_once = at_once
        self.model = FunctionalModel(world)
        self.recordings: dict[Any, Recording] = {}
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
    ) -> Iterator[Uploads]:
        """Yield the uploads of the cohort in its order, as many clients at a time as memory holds."""
        for _, uploads in self.train_all([Work(received, cohort, states, local_models)]):
            yield uploads

    def train_all(self, works: Sequence[Work]) -> Iterator[tuple[int, Uploads]]:
        """The same for all experiments at once, one piece of work for each; yields which of them, and its uploads."""
        everyone = [(which, client) for which, work in enumerate(works) for client in work.cohort.tolist()]
        room = self.at_once or clients_in_memory(self.world, works[0].received)
        for start in range(0, len(everyone), room):
            part = everyone[start : start + room]
            members = [Member(self.worlds[which], client, works[which].states(client), which) for which, client in part]
            done = 0
            for uploads in self._train([work.received for work in works], members):
                owners = [member.which for member in members[done : done + len(uploads.clients)]]
                done += len(owners)
                for which in sorted(set(owners)):
                    first, count = owners.index(which), owners.count(which)
                    own = uploads if count == len(owners) else _part(uploads, first, first + count)
                    yield which, own if works[which].local_models else own._replace(params={})

    def close(self) -> None:
        """Nothing is held outside this process."""

    def _train(self, received: Sequence[Received], members: Sequence[Member]) -> Iterator[Uploads]:
        try:
            with torch.no_grad():
                yield from self._in_order(received, members)
        except FedretainError:
            raise
        except (RuntimeError, ValueError, TypeError, KeyError) as error:
            raise TrainingError(
                f"local training failed: {error}{batch_norm_advice(error)}; engine: loop trains client by client and "
                "says which",
                round=received[0].round,
            ) from error

    def _in_order(self, received: Sequence[Received], members: Sequence[Member]) -> Iterator[Uploads]:
        """Train in buckets of like clients; give back in the order asked for."""
        steps = np.array([local_steps(member.examples, self.world.local) for member in members])
        buckets = in_buckets(steps, lambda clients: OVERHEAD + clients)
        round = received[0].round
        chunks = []
        for bucket in buckets:
            clients = stack([members[at] for at in bucket], round, gather=self.gathers)
            chunks += self._apart(self._train_stack(self._received(received, clients), clients), clients)
        yield from in_order(chunks, np.concatenate(buckets))

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
        return [
            _only(uploads, index, self.per_example, member.examples) for index, member in enumerate(clients.members)
        ]

    def _train_stack(self, received: Received, clients: Stack) -> Uploads:
        """Local training of a stack: what ``LoopEngine`` does for one client, with a leading axis."""
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

        params = {name: self._start(value, count) for name, value in received.params.items()}
        buffers = {name: self._start(value, count) for name, value in received.buffers.items()}
        optimizer = world.local.build_optimizer()
        carry = Carry(params, buffers, optimizer.init(params))
        carry, history = self._steps(each, clients, carry)

        self._refuse_single_examples(clients, received.round)
        if self.model.padding.needs_two and (clients.plan.lengths == 1).any():
            raise ValueError("Expected more than 1 value per channel when training, got a batch of one example")
        self._refuse_divergence(history, carry.params, clients, received.round)
        delta = {name: value - received.params[name] for name, value in carry.params.items()}
        state, extras = own.state, {}
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
        return Uploads(
            clients=np.array([member.client for member in clients.members]),
            params=carry.params,
            delta=delta,
            buffers=carry.buffers,
            extras=extras,
            state=state,
            train_loss=history.sum(0) / steps,
            steps=clients.plan.steps,
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

    def _start(self, value: Tensor, count: int) -> Tensor:
        """A received tensor once for every client, in memory of its own."""
        return value.clone() if self.many else _repeat(value, count)

    def _steps(self, each: Each, clients: Stack, carry: Carry) -> tuple[Carry, Tensor]:
        """All local steps; the losses [steps, clients], 0 where a client has done all its steps."""
        dtype, device = self.world.federation.normalise.dtype, self.world.federation.device
        total, count = clients.plan.lengths.shape
        indices = torch.arange(total, device=device).unbind()
        busy = torch.from_numpy(clients.plan.lengths > 0).to(device, dtype)
        rates = busy * each.lr
        idle = [self.many or some for some in (clients.plan.lengths == 0).any(1).tolist()]
        one_rate = rates.flatten()[:1].reshape(())
        leaves, spec = tree_flatten(carry)
        fixed = self._fixed(each)
        fixed_leaves = tree_flatten(fixed)[0]
        history = []
        for step, batch in enumerate(clients.batches()):
            moving = (batch, Moving(indices[step], rates[step] if idle[step] else one_rate))
            padding = (batch.weights is None, each.own.data.weights is None)
            key = (count, batch.inputs.shape, *padding, idle[step], each.own.data.labels.shape)
            recording = self.recordings.get(key)
            if recording is None or not recording.serves(each.received.round):
                recording = self._record(tree_unflatten(leaves, spec), moving, fixed, each.received.round, idle[step])
                self.recordings[key] = recording
            leaves, losses = recording.play(leaves, [*batch, *moving[1]], fixed_leaves)
            history.append(losses)
        return tree_unflatten(leaves, spec), torch.stack(history)

    def _fixed(self, each: Each) -> tuple[Any, ...]:
        """What a step reads and no step changes; a client's data only where a hook may look at it."""
        received, own = each.received, each.own
        hooks = any(self.world.method.uses(hook) for hook in ("penalty", "direction", "step"))
        frozen = any(self.world.method.freezes(name) for name in received.params)
        server = received.server if hooks else {}
        params = received.params if hooks or frozen else {}
        data = own.data if hooks else Batch(own.data.labels, own.data.labels)
        return (params, received.buffers if hooks else {}, server), own._replace(data=data), each.numbers

    def _record(self, carry: Carry, moving: Any, fixed: Any, round: int, idle: bool) -> Recording:
        """Record a step of these shapes."""
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
            one_each = Moving(None, 0 if idle else None)  # type: ignore[arg-type]
            sent = _dims(shared) if self.many else None
            dims = (_dims(carry), _dims(batch), one_each, sent, _dims(own), _dims(numbers))
            return vmap(one, in_dims=dims)(carry, batch, now, shared, own, numbers)

        recording = Recording(every, carry, moving, fixed, exact=False, for_capture=self.for_capture)
        recording.only_round = round if watch.seen else None
        return recording

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
        sent = _dims(shared) if self.many else None
        own_buffers = received.buffers if buffers is None else buffers
        dims = (
            *(_dims(each.own), sent),
            *(sent[1] if sent is not None and buffers is None else None if buffers is None else _dims(buffers),),
            *(_dims(each.numbers), 0 if self.many else None),
            *(_dims(part) for part in more),
        )
        return vmap(one, in_dims=dims)(each.own, shared, own_buffers, each.numbers, each.lr, *more)

    def _refuse_single_examples(self, clients: Stack, round: int) -> None:
        """Batch norm over maps of one pixel has no variance of one example; padding must not hide that."""
        alone = (clients.plan.lengths == 1).any(0)
        if not (self.model.padding.needs_two and alone.any()):
            return
        member = clients.members[int(np.argmax(alone))]
        error = ValueError("Expected more than 1 value per channel when training")
        raise TrainingError(
            f"local training failed: {error}{batch_norm_advice(error)}",
            round=round,
            client=member.client,
            which=member.which,
        )

    def _refuse_divergence(self, history: Tensor, params: Tensors, clients: Stack, round: int) -> None:
        """Stop at the first loss or parameter that is no number, before it reaches the server."""
        sums = torch.stack([history.sum(0), *(value.flatten(1).sum(1) for value in params.values())])
        if bool(sums.isfinite().all()):
            return
        finite = torch.stack(
            [history.isfinite().all(0), *(value.flatten(1).isfinite().all(1) for value in params.values())]
        ).all(0)
        if bool(finite.all()):
            return
        client = int(torch.nonzero(~finite)[0])
        bad = torch.nonzero(~history[:, client].isfinite()).flatten().tolist()
        what = (
            f"the training loss became {history[bad[0], client].item()} at local step {bad[0] + 1}"
            if bad
            else "the local parameters overflowed in the last step"
        )
        member = clients.members[client]
        lr = member.world.local.lr_of_round(round)
        raise TrainingError(
            f"training diverged: {what}; lower local.lr (it is {lr:g}) or look for broken inputs",
            round=round,
            client=member.client,
            which=member.which,
        )


class Each(NamedTuple):
    """What the hooks of every client are given."""

    received: Received
    own: Own
    numbers: Tensors
    lr: float | Tensor


def _dims(tree: Any) -> Any:
    """The leading axis of every tensor; None stays None."""
    return tree_map(lambda leaf: 0 if isinstance(leaf, Tensor) else None, tree)


def _repeat(value: Tensor, count: int) -> Tensor:
    return value.expand(count, *value.shape).clone(memory_format=torch.contiguous_format)


def clients_in_memory(world: World, received: Received) -> int:
    """How many clients fit into memory at once: parameters, gradient, optimiser and uploads, and their data."""
    federation = world.federation
    largest = federation.train.largest
    data = 0 if world.local.augment != "none" else largest * int(np.prod(federation.shape)) * 4
    memory = MEMORY
    if federation.device.type == "cuda":
        memory = torch.cuda.mem_get_info(federation.device)[0] // 2
    return max(1, memory // (8 * size_in_bytes(received.params) + data))


def in_order(chunks: list[Uploads], positions: np.ndarray) -> Iterator[Uploads]:
    """The chunks of a cohort in its order; ``positions`` says where in it their clients stand."""
    if bool((positions == np.arange(len(positions))).all()):
        yield from chunks
        return
    if all(len(chunk.clients) == 1 for chunk in chunks):
        yield from (chunks[at] for at in np.argsort(positions).tolist())
        return
    order = np.argsort(positions)
    at = torch.from_numpy(order).to(chunks[0].train_loss.device)

    def joined(kind: str) -> Tensors:
        parts = [getattr(chunk, kind) for chunk in chunks]
        return {name: torch.cat([part[name] for part in parts])[at] for name in parts[0]}

    yield Uploads(
        clients=np.concatenate([chunk.clients for chunk in chunks])[order],
        params=joined("params"),
        delta=joined("delta"),
        buffers=joined("buffers"),
        extras=joined("extras"),
        state=joined("state"),
        train_loss=torch.cat([chunk.train_loss for chunk in chunks])[at],
        steps=np.concatenate([chunk.steps for chunk in chunks])[order],
    )


def _part(uploads: Uploads, start: int, end: int) -> Uploads:
    """The uploads of the clients from ``start`` to ``end``."""
    here = slice(start, end)

    def cut(tensors: Tensors) -> Tensors:
        return {name: value[here] for name, value in tensors.items()}

    return Uploads(
        clients=uploads.clients[here],
        params=cut(uploads.params),
        delta=cut(uploads.delta),
        buffers=cut(uploads.buffers),
        extras=cut(uploads.extras),
        state=cut(uploads.state),
        train_loss=uploads.train_loss[here],
        steps=uploads.steps[here],
    )


def _only(uploads: Uploads, index: int, per_example: frozenset[str], examples: int) -> Uploads:
    """One client's upload; its state without padding."""
    alone = _part(uploads, index, index + 1)
    state = {name: value[:, :examples] if name in per_example else value for name, value in alone.state.items()}
    return alone._replace(state=state)
