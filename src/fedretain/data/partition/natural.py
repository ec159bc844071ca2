"""The natural partition: one client per value of a column, such as the source, the writer or the user."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fedretain.data.partition.checks import Count, Indices, Parts, check_count, check_labels
from fedretain.data.partition.dealing import collect, round_to_total
from fedretain.errors import PartitionError, unknown
from fedretain.randomness import stream

_MISSING = ("spread", "own", "drop")


def by_column(
    values: Sequence[Any] | NDArray[Any],
    *,
    labels: ArrayLike | None = None,
    seed: int = 0,
    clients: Count | None = None,
    missing: Literal["spread", "own", "drop"] = "spread",
) -> Parts:
    """One client per distinct value of a column (source, writer, user), or groups of values merged.

    The clients stand in the order of their values. ``clients`` merges whole groups into that many clients:
    the largest group first, each to the client with the fewest examples so far (Graham 1969, LPT). Examples
    whose value is missing (None, "", NaN) are, by ``missing``: "spread" = dealt at random, to each client in
    proportion to what it holds (largest remainders), and evenly over the ``labels`` where these are given;
    "own" = one more client, the last, counted in ``clients``; "drop" = left out.
    FedReg (Xu et al. 2022) §4.1: CT images by source; those without one follow the proportions of the others.
    """
    if missing not in _MISSING:
        raise PartitionError(unknown("way to treat missing values", missing, _MISSING))
    groups, absent = _groups(values)
    classes = np.zeros(len(absent), dtype=np.int64) if labels is None else check_labels(labels)
    if len(classes) != len(absent):
        raise PartitionError(
            f"the column has {len(absent)} values but there are {len(classes)} labels: take both from the same examples"
        )
    without = np.flatnonzero(absent)
    own = missing == "own" and len(without) > 0
    if not groups and not own:
        raise PartitionError(
            f"every one of the {len(absent)} values of the column is missing, so there is no client: choose "
            "another column, or missing = 'own' for a single client"
        )
    if clients is not None:
        groups = _merge(groups, check_count("clients", clients), own=own)
    if own:
        return [*groups, without]
    if missing == "drop" or len(without) == 0:
        return groups
    held = np.array([len(group) for group in groups])
    rng = stream(seed, "partition/by_column")
    shuffled = rng.permutation(without)
    ordered = shuffled[np.argsort(classes[shuffled], kind="stable")]
    spread = _interleave(rng, round_to_total(len(without) * held / held.sum(), len(without)))
    owners = np.concatenate([np.repeat(np.arange(len(groups)), held), spread])
    return collect(owners, np.concatenate([*groups, ordered]), len(groups))


def _groups(values: Sequence[Any] | NDArray[Any]) -> tuple[Parts, NDArray[np.bool_]]:
    """The examples of each distinct value, in the order of the values, and which examples have none."""
    column = values.tolist() if isinstance(values, np.ndarray) else list(values)
    if not column:
        raise PartitionError("the column is empty: there is nothing to split, check the dataset and its split")
    absent = np.array([value is None or value == "" or value != value for value in column], dtype=np.bool_)
    known = np.flatnonzero(~absent)
    try:
        names = sorted({column[i] for i in known})
    except TypeError as error:
        raise PartitionError(
            f"the values of the column cannot be ordered ({error}): convert them to strings or to whole "
            "numbers, all of one kind"
        ) from None
    number = {name: i for i, name in enumerate(names)}
    owners = np.array([number[column[i]] for i in known], dtype=np.int64)
    return collect(owners, known, len(names)), absent


def _merge(groups: Parts, clients: int, *, own: bool) -> Parts:
    """Whole groups put together into clients of similar size; one client is kept free for ``own``."""
    free = clients - own
    if not min(1, len(groups)) <= free <= len(groups):
        kept = ", and the missing values keep a client to themselves" if own else ""
        raise PartitionError(
            f"clients = {clients}: the column has {len(groups)} distinct values{kept}; use "
            f"{min(1, len(groups)) + own} to {len(groups) + own}, or leave it out for one client per value"
        )
    merged: list[list[Indices]] = [[] for _ in range(free)]
    lightest = [(0, client) for client in range(free)]
    for group in sorted(groups, key=len, reverse=True):
        size, client = heapq.heappop(lightest)
        merged[client].append(group)
        heapq.heappush(lightest, (size + len(group), client))
    return [np.sort(np.concatenate(several)) for several in merged]


def _interleave(rng: np.random.Generator, quotas: Indices) -> Indices:
    """Client i named ``quotas[i]`` times, spaced evenly, so that any stretch holds all in proportion."""
    owners = np.repeat(np.arange(len(quotas)), quotas)
    nth = np.arange(len(owners)) - np.repeat(np.cumsum(quotas) - quotas, quotas)
    offset = rng.random(len(quotas))
    return owners[np.argsort((nth + offset[owners]) / quotas[owners], kind="stable")]
