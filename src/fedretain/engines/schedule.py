"""What is random in a round, drawn before any engine starts: participants, batches, augmentation."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from threading import get_ident
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from fedretain.engines.native.drawing import shuffled
from fedretain.errors import ConfigError
from fedretain.randomness import Streams, name_of, stream

if TYPE_CHECKING:
    from fedretain.config import LocalSettings

MANY = 16
"""Fewer clients at once are not worth a run of the C compiler."""


def sample_cohort(seed: int, round: int, clients: int, size: int) -> np.ndarray:
    """The participants of a round, drawn uniformly without replacement, in ascending order."""
    if size == clients:
        return np.arange(clients)
    return np.sort(stream(seed, "cohort", round).choice(clients, size, replace=False))


def steps_per_epoch(examples: int, local: LocalSettings) -> int:
    """Batches in one pass over a client's data. A batch at or above the client's size means one full batch."""
    if local.batch_size >= examples:
        if local.drop_last and local.batch_size > examples:
            raise ConfigError(
                f"local.batch_size: {local.batch_size} is larger than a client's {examples} training examples, and "
                "drop_last drops its only batch; lower batch_size or set drop_last: false"
            )
        return 1
    return examples // local.batch_size if local.drop_last else -(-examples // local.batch_size)


def local_steps(examples: int, local: LocalSettings) -> int:
    """How many steps a client takes in a round (epochs may be fractional; at least one step)."""
    per_epoch = steps_per_epoch(examples, local)
    if local.steps is not None:
        return local.steps
    assert local.epochs is not None
    return max(1, int(local.epochs * per_epoch + 0.5))


def steps_of(sizes: np.ndarray, local: LocalSettings) -> np.ndarray:
    """``local_steps`` of many clients."""
    if (sizes == sizes[0]).all():
        return np.full(len(sizes), local_steps(int(sizes[0]), local))
    kinds, kind_of = np.unique(sizes, return_inverse=True)
    return np.array([local_steps(size, local) for size in kinds.tolist()])[kind_of]


def local_batches(seed: int, round: int, client: int, examples: int, local: LocalSettings) -> list[np.ndarray]:
    """The positions, within the client's data, of every batch of a round; reshuffled every epoch."""
    per_epoch, total = steps_per_epoch(examples, local), local_steps(examples, local)
    rng = stream(seed, "batches", round, client)
    batches: list[np.ndarray] = []
    while len(batches) < total:
        order = rng.permutation(examples)
        starts = range(0, per_epoch * local.batch_size, local.batch_size)
        batches.extend(order[start : start + local.batch_size] for start in starts)
    return batches[:total]


class Schedule(NamedTuple):
    """The batches of several clients side by side, padded to one shape."""

    positions: np.ndarray
    """[steps, clients, batch]: which of the client's examples; 0 where there is none."""
    lengths: np.ndarray
    """[steps, clients]: how many of these are real; 0 once a client has done all its steps."""
    steps: np.ndarray
    """[clients]: how many steps each of them takes."""


@cache
def _streams(thread: int) -> Streams:
    """Each thread its own: they are wound to a client's beginning and then drawn from."""
    return Streams("batches")


def schedule(
    streams: Sequence[tuple[int, int]],
    round: int,
    sizes: Sequence[int] | np.ndarray,
    local: LocalSettings,
    room: int,
) -> Schedule:
    """The batches of ``local_batches`` for several clients, given as (seed, client); ``room`` is the batch's width."""
    kinds, kind_of = np.unique(np.asarray(sizes), return_inverse=True)
    totals = np.array([local_steps(size, local) for size in kinds.tolist()])
    positions = np.zeros((int(totals.max()), len(sizes), room), dtype=np.int64)
    lengths = np.zeros(positions.shape[:2], dtype=np.int64)
    shared = _streams(get_ident())
    named = {seed: name_of(seed, "batches", round) for seed in {seed for seed, _ in streams}}
    for kind, (size, total) in enumerate(zip(kinds.tolist(), totals.tolist(), strict=True)):
        (columns,) = np.nonzero(kind_of == kind)
        per_epoch, width = steps_per_epoch(size, local), min(local.batch_size, size)
        epochs, used = -(-total // per_epoch), min(size, per_epoch * width)
        orders = np.empty((len(columns), epochs, size), dtype=np.int64)
        of_kind = [streams[column] for column in columns.tolist()]
        names = [f"{named[seed]}/{client}" for seed, client in of_kind]
        if len(streams) < MANY or not shuffled(names, orders):
            orders[:] = np.arange(size)
            for order, (seed, client) in zip(orders, of_kind, strict=True):
                shared.at(seed, round, client).permuted(order, axis=1, out=order)
        batches = np.zeros((len(columns), epochs, per_epoch * width), dtype=np.int64)
        batches[..., :used] = orders[..., :used]
        batches = batches.reshape(len(columns), epochs * per_epoch, width)[:, :total]
        positions[:total, columns, :width] = batches.transpose(1, 0, 2)
        real = np.full(per_epoch, width)
        real[-1] = used - (per_epoch - 1) * width
        lengths[:total, columns] = np.tile(real, epochs)[:total, None]
    return Schedule(positions, lengths, totals[kind_of])
