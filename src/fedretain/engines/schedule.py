"""What is random in a round, drawn before any engine starts: participants, batches, augmentation."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from fedretain.errors import ConfigError
from fedretain.randomness import stream

if TYPE_CHECKING:
    from fedretain.config import LocalSettings


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
