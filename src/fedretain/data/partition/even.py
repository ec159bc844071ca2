"""Partitions that look at the labels little or not at all: IID, shards, tiny clients."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from fedretain.data.partition.checks import Count, Parts, check_clients, check_count, check_labels
from fedretain.data.partition.dealing import collect, places_per_class, shuffled_by_class
from fedretain.errors import PartitionError
from fedretain.randomness import stream


def iid(labels: ArrayLike, *, clients: Count, seed: int) -> Parts:
    """Random split into equal parts, whatever the labels.

    Every example is used; the sizes ⌊n/K⌋ and ⌈n/K⌉ differ by at most one.
    McMahan et al. 2017, Communication-Efficient Learning of Deep Networks, §3.
    """
    examples = len(check_labels(labels))
    clients = check_clients(clients, examples)
    order = stream(seed, "partition/iid").permutation(examples)
    return collect(np.arange(examples) % clients, order, clients)


def shards(labels: ArrayLike, *, clients: Count, shards_per_client: Count = 2, seed: int) -> Parts:
    """Examples sorted by label, cut into shards, and a few shards dealt to every client.

    The sorted examples are cut at ⌊i·n/(K·s)⌋, i = 0 … K·s, so that shard sizes differ by at most one and
    every example is used; each client gets s random shards.
    McMahan et al. 2017, §3 (MNIST: K = 100, s = 2).
    """
    labels = check_labels(labels)
    clients = check_clients(clients, len(labels))
    shards_per_client = check_count("shards_per_client", shards_per_client)
    shards = clients * shards_per_client
    if shards > len(labels):
        raise PartitionError(
            f"{clients} clients × {shards_per_client} shards_per_client = {shards} shards, more than the "
            f"{len(labels)} examples: use at most {len(labels) // shards_per_client} clients, "
            f"or at most {len(labels) // clients} shards_per_client"
        )
    dealt = stream(seed, "partition/shards").permutation(np.arange(shards) % clients)
    sizes = np.diff(np.arange(shards + 1) * len(labels) // shards)
    return collect(np.repeat(dealt, sizes), np.argsort(labels, kind="stable"), clients)


def tiny(labels: ArrayLike, *, clients: Count, examples: Count = 5, one_class: bool = False, seed: int) -> Parts:
    """Very many clients with a handful of examples each, of random classes or of a single class.

    Every client gets exactly ``examples`` examples. With ``one_class``, class c can serve ⌊n_c/examples⌋
    clients, and the clients are spread over the classes in proportion to their sizes within that limit.
    FedReg (Xu et al. 2022) §4.1: CIFAR-10 10,000 × 5, EMNIST 10,000 × 24 (one class), CIFAR-100 50,000 × 1.
    """
    labels = check_labels(labels)
    clients = check_clients(clients, len(labels))
    examples = check_count("examples", examples)
    if clients * examples > len(labels):
        raise PartitionError(
            f"{clients} clients × {examples} examples need {clients * examples} examples, the dataset has "
            f"{len(labels)}: use at most {len(labels) // examples} clients, "
            f"or at most {len(labels) // clients} examples"
        )
    rng = stream(seed, "partition/tiny")
    if not one_class:
        rows = rng.permutation(len(labels))[: clients * examples].reshape(clients, examples)
        return list(np.sort(rows, axis=1))
    pools, stock = shuffled_by_class(rng, labels)
    limits = stock // examples
    if clients > limits.sum():
        raise PartitionError(
            f"clients = {clients} with {examples} examples of one class: the classes can hold at most "
            f"{limits.sum()} such clients: use at most {limits.sum()}, fewer examples, or one_class = false"
        )
    served = places_per_class(stock, limits, clients) * examples
    taken = np.concatenate([pool[:size] for pool, size in zip(pools, served, strict=True)])
    rows = np.sort(taken.reshape(clients, examples), axis=1)
    return list(rows[rng.permutation(clients)])
