"""The split of every client's examples into training and validation."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike

from fedretain.data.partition.checks import Fraction, Indices, Parts, check_fraction, check_labels
from fedretain.data.partition.dealing import collect
from fedretain.errors import PartitionError
from fedretain.randomness import stream


def split_validation(
    parts: Sequence[Indices], *, fraction: Fraction, labels: ArrayLike | None = None, seed: int
) -> tuple[Parts, Parts]:
    """Random split of every client's examples into (training, validation).

    v_k = min(⌊fraction·n_k⌋, n_k − 1) examples of client k go to validation, so that none is left without
    training data. The client's examples are put in random order, class by class where ``labels`` are given,
    and the one at rank r is taken when ⌊((r+1)·v_k + u_k)/n_k⌋ > ⌊(r·v_k + u_k)/n_k⌋, with u_k random in
    0 … n_k − 1: every example is as likely as any other, and each class keeps its share up to one example
    (systematic sampling, Cochran 1977, ch. 8).

    All random numbers come from one stream, in the order of the example numbers: example i orders itself by
    number 2i, and number 2i + 1 of a client's first example gives u_k. So a client's split depends on the
    seed and its own examples alone, and a million clients need no million streams.
    wsm-paper §4: 500 examples per client, 450 for training, 50 for validation.
    """
    fraction = check_fraction("fraction", fraction)
    sizes = np.array([len(part) for part in parts], dtype=np.int64)
    if len(sizes) == 0 or sizes.min() == 0:
        which = "there are no clients" if len(sizes) == 0 else f"client {np.argmin(sizes)} has no examples"
        raise PartitionError(f"{which}, so there is nothing to split: use fewer clients or more data")
    clients = len(sizes)
    examples = np.concatenate(parts)
    owners = np.repeat(np.arange(clients), sizes)
    classes = np.zeros(len(examples), dtype=np.int64) if labels is None else _labels_of(examples, labels)
    numbers = stream(seed, "validation").random((int(examples.max()) + 1, 2))
    starts = np.cumsum(sizes) - sizes
    first = np.minimum.reduceat(examples, starts)
    held_out = np.minimum(_floor_of(fraction, sizes), sizes - 1)[owners]
    size = sizes[owners]
    start = np.minimum((numbers[first, 1] * sizes).astype(np.int64), sizes - 1)[owners]
    examples = examples[np.lexsort((numbers[examples, 0], classes, owners))]
    rank = np.arange(len(examples)) - starts[owners]
    chosen = ((rank + 1) * held_out + start) // size > (rank * held_out + start) // size
    return (
        collect(owners[~chosen], examples[~chosen], clients),
        collect(owners[chosen], examples[chosen], clients),
    )


def _labels_of(examples: Indices, labels: ArrayLike) -> Indices:
    array = check_labels(labels)
    if int(examples.max()) >= len(array):
        raise PartitionError(
            f"a client holds example {examples.max()}, but there are only {len(array)} labels: "
            "give the labels of the dataset that was split"
        )
    classes: Indices = array[examples]
    return classes


def _floor_of(fraction: float, sizes: Indices) -> Indices:
    """⌊fraction·n⌋ as meant in decimals: 0.29 × 100 is 29, although the product of the floats is below it."""
    whole: Indices = np.floor(fraction * sizes + 1e-9).astype(np.int64)
    return whole
