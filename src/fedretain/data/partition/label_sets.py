"""Partitions in which a client sees only some of the classes: label clusters, k classes per client."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from pydantic import Field

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
from fedretain.data.partition.dealing import (
    collect,
    deal,
    places_per_class,
    round_to_total,
    shuffled_by_class,
)
from fedretain.errors import PartitionError
from fedretain.randomness import stream


def label_clusters(
    labels: ArrayLike,
    *,
    sizes: Annotated[Sequence[Count], Field(min_length=1)],
    classes_per_cluster: Annotated[Sequence[Count], Field(min_length=1)] | Count | None = None,
    examples_per_client: Count | None = None,
    seed: int,
) -> Parts:
    """Clusters of clients, each cluster with classes of its own, every client of the same size.

    Cluster g has ``sizes[g]`` clients and owns random classes that no other cluster has: a number for all
    clusters, one number per cluster, or (None) an even split of all classes. Its clients draw at random,
    without replacement, from the examples of those classes, ``examples_per_client`` each; None takes the
    largest number that every cluster can serve, min_g ⌊n_g / sizes[g]⌋. The clients are numbered cluster by
    cluster.
    FedWAvg §3.2 (2:8 and 4:6 clients, two classes per cluster, 1,200 examples).
    """
    labels = check_labels(labels)
    sizes = _check_counts("sizes", sizes)
    clients = check_clients(sum(sizes), len(labels))
    present = np.unique(labels)
    owned = _classes_of_clusters(classes_per_cluster, len(sizes), len(present))
    rng = stream(seed, "partition/label_clusters")
    groups = np.split(rng.permutation(present), np.cumsum(owned))[: len(sizes)]
    pools = [rng.permutation(np.flatnonzero(np.isin(labels, group))) for group in groups]
    limits = [len(pool) // size for pool, size in zip(pools, sizes, strict=True)]
    tightest = int(np.argmin(limits))
    limit = limits[tightest]
    where = (
        f"cluster {tightest} has {sizes[tightest]} clients for the {len(pools[tightest])} examples "
        f"of its classes {sorted(groups[tightest].tolist())}"
    )
    if limit == 0:
        raise PartitionError(f"a client would get no data: {where}; use smaller sizes or more classes per cluster")
    each = limit if examples_per_client is None else check_count("examples_per_client", examples_per_client)
    if each > limit:
        raise PartitionError(
            f"examples_per_client = {each}: {where}, so at most {limit}; lower it to {limit} or less, "
            "or leave it out for as many as possible"
        )
    taken = [pool[: size * each] for pool, size in zip(pools, sizes, strict=True)]
    return collect(np.repeat(np.arange(clients), each), np.concatenate(taken), clients)


def classes_per_client(
    labels: ArrayLike,
    *,
    clients: Count,
    classes: Count = 2,
    power: Positive | None = None,
    minimum: Count = 2,
    seed: int,
) -> Parts:
    """Clients with k random classes each, of equal or of heavy-tailed (log-normal) sizes.

    1. Places: of the K·k (client, class) places, class c gets m_c in proportion to its size (Jefferson's
    apportionment), at most K, and no more than leave ⌈minimum/k⌉ examples to every place.
    2. Holders: k different classes for every client, at random, with exactly m_c holders of class c.
    3. Sizes: with ``power`` None every place holds min_c ⌊n_c/m_c⌋ examples, so that every client has k times
    that, the most that equal sizes allow. Otherwise client i has a weight w_i, log w_i ~ N(0, power²), and
    its place in class c holds max(⌈minimum/k⌉, s_c·w_i) examples, with the s_c that uses up the class exactly
    (rounded by the largest remainders).

    Nothing is drawn and rejected, so it ends whatever the class sizes.
    FedReg (Xu et al. 2022) §4.1: MNIST, 5,000 clients, one or two classes, power 2, minimum 2.
    """
    labels = check_labels(labels)
    clients = check_clients(clients, len(labels))
    classes = check_count("classes", classes)
    least = -(-check_count("minimum", minimum) // classes)
    sigma = None if power is None else check_positive("power", power)
    rng = stream(seed, "partition/classes_per_client")
    pools, stock = shuffled_by_class(rng, labels)
    if classes > len(stock):
        raise PartitionError(
            f"classes = {classes}: the dataset has {len(stock)} classes, use at most {len(stock)} per client"
        )
    limits = np.minimum(stock // least, clients)
    if limits.sum() < clients * classes:
        most = _most_clients(stock // least, classes)
        raise PartitionError(
            f"clients = {clients} with classes = {classes} and at least {least} examples of each: the class "
            f"sizes allow at most {most} such clients; use at most {most}, fewer classes, or a lower minimum"
        )
    places = places_per_class(stock, limits, clients * classes)
    holds = _random_holders(rng, places, clients, classes)
    if sigma is None:
        each = int((stock[places > 0] // places[places > 0]).min())
        return deal(pools, holds.astype(np.int64) * each)
    log_weights = sigma * rng.standard_normal(clients)
    counts = np.zeros(holds.shape, dtype=np.int64)
    for c in np.flatnonzero(places):
        holders = np.flatnonzero(holds[:, c])
        counts[holders, c] = _clipped_shares(log_weights[holders], int(stock[c]), least)
    return deal(pools, counts)


def _check_counts(key: str, values: Any) -> list[int]:
    numbers = list(values) if np.iterable(values) else []
    if not numbers:
        raise PartitionError(f"{key} = {values!r}: must be a list of whole numbers, such as [2, 8]")
    return [check_count(f"{key}[{i}]", number) for i, number in enumerate(numbers)]


def _classes_of_clusters(given: Sequence[int] | int | None, clusters: int, present: int) -> list[int]:
    """How many classes each cluster owns."""
    if given is None:
        if clusters > present:
            raise PartitionError(
                f"sizes has {clusters} clusters but the dataset only {present} classes, and every cluster "
                f"needs one of its own: use at most {present} clusters"
            )
        return [present // clusters + (g < present % clusters) for g in range(clusters)]
    if np.iterable(given):
        owned = _check_counts("classes_per_cluster", given)
        if len(owned) != clusters:
            raise PartitionError(
                f"classes_per_cluster has {len(owned)} numbers for the {clusters} clusters in sizes: give "
                "one number per cluster, or a single number for all"
            )
    else:
        owned = [check_count("classes_per_cluster", given)] * clusters
    if sum(owned) > present:
        raise PartitionError(
            f"classes_per_cluster = {given!r} asks for {sum(owned)} classes in {clusters} clusters, the "
            f"dataset has {present}, and clusters share none: lower classes_per_cluster or use fewer clusters"
        )
    return owned


def _most_clients(holders: Indices, classes: int) -> int:
    """The largest K with Σ_c min(K, holders_c) − K·k ≥ 0, by bisection: the left side is concave in K."""
    low, high = 0, int(holders.sum()) // classes
    while low < high:
        middle = (low + high + 1) // 2
        if np.minimum(holders, middle).sum() >= middle * classes:
            low = middle
        else:
            high = middle - 1
    return low


def _random_holders(rng: np.random.Generator, places: Indices, clients: int, classes: int) -> NDArray[np.bool_]:
    """Who holds which class, (K, C): k per row, ``places[c]`` per column, at random.

    Dealing the places class by class around the table never gives a client the same class twice, since no
    class has more places than there are clients. Random trades then shuffle it: two clients pool the classes
    that only one of them has and split them anew, which keeps all row and column sums (the Curveball
    algorithm, Strona et al. 2014, whose limit is uniform: Carstens 2015).
    """
    order = rng.permutation(len(places))
    dealt = np.repeat(order, places[order])
    holds = np.zeros((clients, len(places)), dtype=np.bool_)
    holds[np.arange(len(dealt)) % clients, dealt] = True
    holds = holds[rng.permutation(clients)]
    if 1 < classes < len(places):
        for _ in range(8 + clients.bit_length()):
            _trade(rng, holds)
    return holds


def _trade(rng: np.random.Generator, holds: NDArray[np.bool_]) -> None:
    """Random pairs of clients split the classes that only one of the two holds anew; in place."""
    half = len(holds) // 2
    order = rng.permutation(len(holds))
    one, other = order[:half], order[half : 2 * half]
    differ = holds[one] ^ holds[other]
    # Both hold k classes, so each keeps half of those in which they differ: the half with the smallest keys.
    keys = np.where(differ, rng.random(differ.shape), 2.0)
    rank = np.argsort(np.argsort(keys, axis=1), axis=1)
    first = rank < differ.sum(axis=1, keepdims=True) // 2
    holds[one] = np.where(differ, first, holds[one])
    holds[other] = np.where(differ, ~first, holds[other])


def _clipped_shares(log_weights: NDArray[np.float64], total: int, least: int) -> Indices:
    """Whole numbers max(least, s·w_i) that sum to ``total``, for the one s that makes them do so.

    With the j smallest at ``least``, s_j = (total − j·least) / Σ of the other weights; the right j is the
    first for which the smallest of the others is not below ``least``; j = m − 1 is, as total ≥ m·least.
    """
    order = np.argsort(log_weights, kind="stable")
    weights = np.exp(log_weights[order] - log_weights[order[-1]])
    others = np.cumsum(weights[::-1])[::-1]
    scales = (total - least * np.arange(len(weights))) / others
    clipped = int(np.argmax(scales * weights >= least))
    shares = np.maximum(scales[clipped] * weights, least)
    sizes = np.empty(len(weights), dtype=np.int64)
    sizes[order] = round_to_total(shares, total)
    return sizes
