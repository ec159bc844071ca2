"""Many clients at once: stacked parameters, one recorded step for all of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.func import vmap
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from fedretain.engines.engine import Uploads, World, batch_norm_advice
from fedretain.engines.functional import Carry, FunctionalModel, FunctionalTask, Moving, local_step
from fedretain.engines.recording import Recording, RoundWatch, WatchedReceived
from fedretain.engines.schedule import local_steps
from fedretain.engines.stack import CLIENT_HOOKS, Member, Stack, in_buckets, kept_states, per_example_state, stack
from fedretain.errors import FedretainError, TrainingError
from fedretain.methods import Batch, Own, Received
from fedretain.tensors import Tensors, size_in_bytes

MEMORY = 2**30
"""Bytes that the clients trained at once may take on a CPU."""
OVERHEAD = 16.0
"""The time of a step's operations before any client's share, in clients; decides how uneven clients are bucketed."""


class VectorisedEngine:
    """Trains all participants of a round together."""

    def __init__(self, world: World, at_once: int | None = None) -> None:
        self.world = world
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
        room = self.at_once or clients_in_memory(self.world, received)
        for start in range(0, len(cohort), room):
            part = cohort[start : start + room]
            members = [Member(self.world, client, states(client)) for client in part.tolist()]
            for uploads in self._train(received, members):
                yield uploads if local_models else uploads._replace(params={})

    def close(self) -> None:
        """Nothing is held outside this process."""

    def _train(self, received: Received, members: Sequence[Member]) -> Iterator[Uploads]:
        try:
            with torch.no_grad():
                yield from self._in_order(received, members)
        except FedretainError:
            raise
        except (RuntimeError, ValueError, TypeError, KeyError) as error:
            raise TrainingError(
                f"local training failed: {error}{batch_norm_advice(error)}; engine: loop trains client by client and "
                "says which",
                round=received.round,
            ) from error

    def _in_order(self, received: Received, members: Sequence[Member]) -> Iterator[Uploads]:
        """Train in buckets of like clients; give back in the order asked for."""
        steps = np.array([local_steps(member.examples, self.world.local) for member in members])
        buckets = in_buckets(steps, lambda clients: OVERHEAD + clients)
        parts = [
            self._train_stack(received, stack([members[at] for at in bucket], received.round)) for bucket in buckets
        ]
        chunks = [chunk for part in parts for chunk in self._apart(part, members)]
        yield from in_order(chunks, np.concatenate(buckets))

    def _apart(self, uploads: Uploads, members: Sequence[Member]) -> list[Uploads]:
        """One by one where a state has an entry per example, without the padding of others; else all together."""
        if not self.per_example:
            return [uploads]
        sizes = {member.client: member.examples for member in members}
        return [
            _only(uploads, index, self.per_example, sizes[client])
            for index, client in enumerate(uploads.clients.tolist())
        ]

    def _train_stack(self, received: Received, clients: Stack) -> Uploads:
        """Local training of a stack: what ``LoopEngine`` does for one client, with a leading axis."""
        world, method = self.world, self.world.method
        count = len(clients.members)
        own = clients.own
        lr = world.local.lr_of_round(received.round)
        if self.uses_own:
            own = own._replace(state=self._states(received, clients))
            if method.uses("prepare"):
                prepared = self._mapped(received, own, lr, lambda own, task: method.prepare(received, own, task))
                own = own._replace(prepared=prepared)

        params = {name: _repeat(value, count) for name, value in received.params.items()}
        buffers = {name: _repeat(value, count) for name, value in received.buffers.items()}
        optimizer = world.local.build_optimizer()
        carry = Carry(params, buffers, optimizer.init(params))
        carry, history = self._steps(received, clients, own, carry, lr)

        self._refuse_divergence(history, carry.params, clients, received.round, lr)
        delta = {name: value - received.params[name] for name, value in carry.params.items()}
        state, extras = own.state, {}
        if self.uses_own:
            delta = self._mapped(
                received, own, lr, lambda own, task, delta: method.upload(delta, received, own, task), delta
            )
            state, extras = self._mapped(
                received,
                own,
                lr,
                lambda own, task, carry: method.finish(carry.params, received, own, task),
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

    def _steps(self, received: Received, clients: Stack, own: Own, carry: Carry, lr: float) -> tuple[Carry, Tensor]:
        """All local steps; the losses [steps, clients], 0 where a client has done all its steps."""
        dtype, device = self.world.federation.normalise.dtype, self.world.federation.device
        total, count = clients.plan.lengths.shape
        indices = torch.arange(total, device=device)
        rates = torch.from_numpy((clients.plan.lengths > 0) * lr).to(device, dtype)
        idle = (clients.plan.lengths == 0).any(1).tolist()
        one_rate = rates.flatten()[:1].reshape(())
        leaves, spec = tree_flatten(carry)
        fixed = self._fixed(received, own)
        fixed_leaves = tree_flatten(fixed)[0]
        history = torch.zeros(total, count, dtype=dtype, device=device)
        for step in range(total):
            batch = clients.batch(step)
            moving = (batch, Moving(indices[step], rates[step] if idle[step] else one_rate))
            key = (count, batch.inputs.shape, batch.weights is None, idle[step], own.data.labels.shape)
            recording = self.recordings.get(key)
            if recording is None:
                recording = self._record(tree_unflatten(leaves, spec), moving, fixed, received.round, idle[step])
                if recording.reusable:
                    self.recordings[key] = recording
            leaves, history[step] = recording.play(leaves, tree_flatten(moving)[0], fixed_leaves)
        return tree_unflatten(leaves, spec), history

    def _fixed(self, received: Received, own: Own) -> tuple[Any, ...]:
        """What a step reads and no step changes; a client's data only where a hook may look at it."""
        hooks = any(self.world.method.uses(hook) for hook in ("penalty", "direction", "step"))
        frozen = any(self.world.method.freezes(name) for name in received.params)
        server = received.server if hooks else {}
        params = received.params if hooks or frozen else {}
        data = own.data if hooks else Batch(own.data.labels, own.data.labels)
        return (params, received.buffers if hooks else {}, server), own._replace(data=data)

    def _record(self, carry: Carry, moving: Any, fixed: Any, round: int, idle: bool) -> Recording:
        """Record a step of these shapes."""
        watch = RoundWatch()
        masked = idle and (self.world.method.uses("step") or bool(carry.buffers))

        def one(carry: Carry, batch: Batch, moving: Moving, shared: Any, own: Own) -> tuple[Carry, Tensor]:
            received = WatchedReceived.of(shared, round, watch)
            new, loss = local_step(self.world, self.model, carry, batch, moving, received, own)
            if masked:
                busy = moving.lr > 0
                new = tree_unflatten(
                    [
                        torch.where(busy, after, before)
                        for after, before in zip(tree_flatten(new)[0], tree_flatten(carry)[0], strict=True)
                    ],
                    tree_flatten(new)[1],
                )
            return new, loss

        def every(carry: Carry, moving: tuple[Batch, Moving], fixed: tuple[Any, Own]) -> tuple[Carry, Tensor]:
            batch, now = moving
            shared, own = fixed
            rates = 0 if idle else None
            dims = (_dims(carry), _dims(batch), Moving(None, rates), None, _dims(own))  # type: ignore[arg-type]
            return vmap(one, in_dims=dims)(carry, batch, now, shared, own)

        recording = Recording(every, carry, moving, fixed)
        recording.reusable = not watch.seen
        return recording

    def _states(self, received: Received, clients: Stack) -> Tensors:
        """What the clients kept."""
        method = self.world.method
        if not method.uses("init_client"):
            return {}
        own = clients.own
        fresh = vmap(lambda own: method.init_client(received.params, own), in_dims=(_dims(own),))(own)
        return kept_states(clients.members, fresh, clients.own.data.labels.shape[1], self.per_example)

    def _mapped(
        self,
        received: Received,
        own: Own,
        lr: float,
        hook: Callable[..., Any],
        *more: Any,
        buffers: Tensors | None = None,
    ) -> Any:
        """A hook of every client."""

        def one(own: Own, buffers: Tensors, *more: Any) -> Any:
            return hook(own, FunctionalTask(self.world, self.model, own.class_counts, buffers, lr), *more)

        dims = (_dims(own), None if buffers is None else _dims(buffers), *(_dims(part) for part in more))
        return vmap(one, in_dims=dims)(own, received.buffers if buffers is None else buffers, *more)

    def _refuse_divergence(self, history: Tensor, params: Tensors, clients: Stack, round: int, lr: float) -> None:
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
        raise TrainingError(
            f"training diverged: {what}; lower local.lr (it is {lr:g}) or look for broken inputs",
            round=round,
            client=clients.members[client].client,
        )


def _dims(tree: Any) -> Any:
    """The leading axis of every tensor; None stays None."""
    return tree_map(lambda leaf: 0 if isinstance(leaf, Tensor) else None, tree)


def _repeat(value: Tensor, count: int) -> Tensor:
    return value.expand(count, *value.shape).clone(memory_format=torch.contiguous_format)


def clients_in_memory(world: World, received: Received) -> int:
    """How many clients fit into memory at once: parameters, gradient, optimiser and uploads, and their data."""
    federation = world.federation
    largest = int(federation.train.sizes.max())
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


def _only(uploads: Uploads, index: int, per_example: frozenset[str], examples: int) -> Uploads:
    """One client's upload; its state without padding."""
    here = slice(index, index + 1)

    def cut(tensors: Tensors) -> Tensors:
        return {name: value[here] for name, value in tensors.items()}

    state = {
        name: value[here, :examples] if name in per_example else value[here] for name, value in uploads.state.items()
    }
    return Uploads(
        clients=uploads.clients[here],
        params=cut(uploads.params),
        delta=cut(uploads.delta),
        buffers=cut(uploads.buffers),
        extras=cut(uploads.extras),
        state=state,
        train_loss=uploads.train_loss[here],
        steps=uploads.steps[here],
    )
