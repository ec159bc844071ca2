"""Handing out examples once it is known how many of each class every client gets."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from fedretain.data.partition.checks import Indices, Parts


def shuffled_by_class(rng: np.random.Generator, labels: Indices) -> tuple[list[Indices], Indices]:
    """The examples of each class that occurs, in random order, and how many there are of each."""
    _, stock = np.unique(labels, return_counts=True)
    order = rng.permutation(len(labels))
    by_class = order[np.argsort(labels[order], kind="stable")]
    return np.split(by_class, np.cumsum(stock)[:-1]), stock.astype(np.int64)


def deal(pools: list[Indices], counts: Indices) -> Parts:
    """Client k takes the next ``counts[k, c]`` examples of pool c."""
    clients = np.arange(len(counts))
    owners = [np.repeat(clients, wanted) for wanted in counts.T]
    taken = [pool[: len(owner)] for pool, owner in zip(pools, owners, strict=True)]
    return collect(np.concatenate(owners), np.concatenate(taken), len(counts))


def collect(owners: Indices, examples: Indices, clients: int) -> Parts:
    """One ascending index array per client, from (owner, example) pairs."""
    order = np.lexsort((examples, owners))
    ends = np.cumsum(np.bincount(owners, minlength=clients)).tolist()
    return _cut(examples[order].astype(np.int64), ends)


def _cut(flat: Indices, ends: list[int]) -> Parts:
    """Consecutive pieces of ``flat``: plain slices, because ``np.split`` is slow for a million pieces."""
    return [flat[start:end] for start, end in zip([0, *ends][:-1], ends, strict=True)]


def round_to_total(shares: NDArray[np.float64], total: int) -> Indices:
    """Whole numbers with a given sum, each within one of its share: floors, then the largest remainders.

    ``shares`` sum to ``total`` up to rounding error. Hamilton's apportionment; ties go to the first.
    """
    whole = np.floor(shares)
    left = total - int(whole.sum())
    whole[np.argsort(whole - shares, kind="stable")[:left]] += 1
    return whole.astype(np.int64)


def places_per_class(stock: Indices, limits: Indices, total: int) -> Indices:
    """How many of ``total`` places each class fills, so that the smallest place is as large as possible.

    With m_c places, a place of class c holds ⌊stock_c / m_c⌋ examples. The largest common size comes from
    giving the places one by one to the class with the largest stock_c / (m_c + 1), never more than
    ``limits[c]`` to one class (Jefferson's apportionment). Needs ``total`` ≤ Σ limits.
    """
    classes = np.repeat(np.arange(len(stock)), limits)
    nth = np.arange(len(classes)) - np.repeat(np.cumsum(limits) - limits, limits) + 1
    best = np.argsort(-(stock[classes] / nth), kind="stable")[:total]
    return np.bincount(classes[best], minlength=len(stock)).astype(np.int64)
