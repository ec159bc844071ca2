"""Dirichlet partitions: every client its own mix of all classes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fedretain.data.partition.checks import (
    Count,
    Indices,
    Parts,
    Positive,
    check_clients,
    check_count,
    check_labels,
    check_positive,
)
from fedretain.data.partition.dealing import deal, shuffled_by_class
from fedretain.errors import PartitionError
from fedretain.randomness import stream

Reals = NDArray[np.float64]

TRIES = 100
"""How often ``dirichlet_by_class`` draws anew before it gives up on the minimum size."""

_BLOCK = 1024
_SMALLEST_SHAPE = 1e-290
"""Keeps E/a finite in ``_log_gamma``; at such shapes a Dirichlet draw is one-hot anyway."""


def dirichlet(
    labels: ArrayLike,
    *,
    clients: Count,
    alpha: Positive,
    prior: Sequence[float] | float | None = None,
    seed: int,
) -> Parts:
    """Clients of equal size, each with its own Dirichlet mix of the classes.

    Client after client: q_k ~ Dir(α·prior), then ⌊n/K⌋ examples, each of a class drawn from q_k, without
    replacement; once a class is used up, the rest of q_k is renormalised. A client whose q_k has no mass on
    any class left (possible only where the prior is 0) draws from those left by their numbers of examples.
    ``prior`` holds one weight per class 0, 1, …, taken as they are; a single number stands for every class. By
    default it is the class frequencies times the number of classes, so that balanced classes give Dir(α, …, α),
    which is what α = 0.1 means in the papers' tables.
    Hsu, Qi, Brown 2019, Measuring the Effects of Non-Identical Data Distribution, §2.
    """
    labels = check_labels(labels)
    clients = check_clients(clients, len(labels))
    shapes = _shapes(labels, check_positive("alpha", alpha), prior)
    rng = stream(seed, "partition/dirichlet")
    pools, stock = shuffled_by_class(rng, labels)
    return deal(pools, _equal_counts(rng, stock, shapes, clients, len(labels) // clients))


def dirichlet_by_class(labels: ArrayLike, *, clients: Count, alpha: Positive, minimum: Count = 1, seed: int) -> Parts:
    """Clients of unequal size: each class is split over all clients in Dirichlet proportions.

    For every class c: p_c ~ Dir(α, …, α) over the K clients, and client k gets the shuffled examples from
    ⌊n_c·Σ_{j<k} p_cj⌋ to ⌊n_c·Σ_{j≤k} p_cj⌋. Every example is used. A draw that leaves a client with fewer
    than ``minimum`` examples is drawn anew, a bounded number of times.
    Yurochkin et al. 2019, Bayesian Nonparametric Federated Learning of Neural Networks, §4.
    """
    labels = check_labels(labels)
    clients = check_clients(clients, len(labels))
    alpha = check_positive("alpha", alpha)
    minimum = check_count("minimum", minimum)
    if clients * minimum > len(labels):
        raise PartitionError(
            f"minimum = {minimum} for {clients} clients needs {clients * minimum} examples, the dataset "
            f"has {len(labels)}: use minimum = {len(labels) // clients} or less, or at most "
            f"{len(labels) // minimum} clients"
        )
    rng = stream(seed, "partition/dirichlet_by_class")
    pools, stock = shuffled_by_class(rng, labels)
    best = 0
    for _ in range(TRIES):
        counts = _cut_classes(rng, stock, alpha, clients)
        smallest = int(counts.sum(axis=1).min())
        if smallest >= minimum:
            return deal(pools, counts)
        best = max(best, smallest)
    raise PartitionError(
        f"alpha = {alpha:g}, clients = {clients}: none of {TRIES} draws gave every client at least "
        f"minimum = {minimum} examples (the best left a client with {best}): raise alpha, lower minimum or "
        "clients, or use the partition 'dirichlet', whose clients all have the same size"
    )


def _shapes(labels: Indices, alpha: float, prior: Sequence[float] | float | None) -> Reals:
    """α·prior for the classes that occur; exactly 0 where the prior is 0."""
    classes, stock = np.unique(labels, return_counts=True)
    if prior is None:
        weights: Reals = stock * len(classes) / len(labels)
    else:
        try:
            given = np.asarray(prior, dtype=np.float64)
        except (TypeError, ValueError):
            raise PartitionError(f"prior = {prior!r}: must be a number or a list of numbers") from None
        needed = int(classes[-1]) + 1
        if given.ndim > 1 or (given.ndim == 1 and len(given) < needed):
            raise PartitionError(
                f"prior has shape {given.shape}: give one weight for each of the classes 0 to {needed - 1}, "
                "or a single number for all of them"
            )
        weights = np.broadcast_to(given, needed)[classes] if given.ndim == 0 else given[classes]
        if not np.isfinite(weights).all() or (weights < 0).any() or not (weights > 0).any():
            raise PartitionError(
                f"prior = {prior!r}: the weights must be finite and not negative, and some class of the "
                "dataset must have a weight above 0"
            )
    with np.errstate(over="ignore"):
        shapes = alpha * weights
    if not np.isfinite(shapes).all():
        raise PartitionError(f"alpha = {alpha:g} times the prior is too large for a float: lower one of them")
    return np.where(weights > 0, np.maximum(shapes, _SMALLEST_SHAPE), 0.0)


def _log_gamma(rng: np.random.Generator, shapes: Reals) -> Reals:
    """Logarithms of Gamma(a) draws, exact where the draws themselves underflow; −∞ for a = 0.

    G_a has the law of G_{a+1}·U^{1/a} (Devroye 1986, IV.6.4), so log G_a = log G_{a+1} − E/a with E ~ Exp(1).
    """
    boosted = np.log(rng.standard_gamma(shapes + 1))
    with np.errstate(divide="ignore"):
        draws: Reals = boosted - rng.standard_exponential(shapes.shape) / shapes
    return draws


def _equal_counts(rng: np.random.Generator, stock: Indices, shapes: Reals, clients: int, size: int) -> Indices:
    """Examples per client and class, (K, C): each client in turn draws ``size`` times from its mix.

    A draw from a used-up class is repeated from the rest of the mix, which is what renormalising means. So a
    block of clients can draw at once: the clients before the first that overdraws stand, that one repeats its
    excess draws, and those after it repeat only their draws from classes that are now used up.
    """
    left = stock.copy()
    counts = np.zeros((clients, len(stock)), dtype=np.int64)
    for first in range(0, clients, _BLOCK):
        block = counts[first : first + _BLOCK]
        mixes = _log_gamma(rng, np.broadcast_to(shapes, block.shape))
        block[:] = rng.multinomial(size, _open_mix(mixes, left))
        start = 0
        while start < len(block):
            over = np.any(np.cumsum(block[start:], axis=0) > left, axis=1)
            fits = int(np.argmax(over)) if over.any() else len(block) - start
            left -= block[start : start + fits].sum(axis=0)
            start += fits
            if start == len(block):
                break
            _repeat_excess(rng, block[start], left, mixes[start])
            start += 1
            _repeat_used_up(rng, block[start:], left, mixes[start:])
    return counts


def _open_mix(mixes: Reals, left: Indices) -> Reals:
    """The mixes (log weights, one row per client) renormalised over the classes that have examples left."""
    weights = np.where(left > 0, mixes, -np.inf)
    with np.errstate(divide="ignore"):
        remaining = np.log(left)
    weights = np.where(np.isneginf(weights).all(axis=-1, keepdims=True), remaining, weights)
    mix = np.exp(weights - weights.max(axis=-1, keepdims=True))
    normalised: Reals = mix / mix.sum(axis=-1, keepdims=True)
    return normalised


def _repeat_excess(rng: np.random.Generator, drawn: Indices, left: Indices, mix: Reals) -> None:
    """One client takes what is there and repeats the draws that found their class used up; in place.

    Each turn uses up a class or ends, so there are at most as many turns as classes.
    """
    wanted = drawn.copy()
    drawn[:] = 0
    while wanted.any():
        granted = np.minimum(wanted, left)
        drawn += granted
        left -= granted
        excess = int((wanted - granted).sum())
        if excess == 0:
            return
        wanted = rng.multinomial(excess, _open_mix(mix, left))


def _repeat_used_up(rng: np.random.Generator, drawn: Indices, left: Indices, mixes: Reals) -> None:
    """The clients still to come repeat their draws from classes that are used up; in place."""
    used_up = left == 0
    repeats = drawn[:, used_up].sum(axis=1)
    again = np.flatnonzero(repeats)
    drawn[:, used_up] = 0
    drawn[again] += rng.multinomial(repeats[again], _open_mix(mixes[again], left))


def _cut_classes(rng: np.random.Generator, stock: Indices, alpha: float, clients: int) -> Indices:
    """Examples per client and class, (K, C), each class cut at the running sums of a Dirichlet draw."""
    logs = _log_gamma(rng, np.full((len(stock), clients), max(alpha, _SMALLEST_SHAPE)))
    running = np.cumsum(np.exp(logs - logs.max(axis=1, keepdims=True)), axis=1)
    # Divided by its own last entry, the running sum is exactly 1 from the last client with a share on:
    # rounding cannot hand a stray example to a later client, which has none.
    cuts = np.floor(running / running[:, -1:] * stock[:, None]).astype(np.int64)
    counts: Indices = np.diff(cuts, axis=1, prepend=0).T
    return counts
