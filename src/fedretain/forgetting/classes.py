"""Forgetting by class: which classes a model loses, when, and who held them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike


class ClassForgetting(NamedTuple):
    """Positive means forgetting; NaN where there is nothing to average, or a class without test examples."""

    matrix: np.ndarray
    """F[c, i] = Acc_c(w_{t−1}) − Acc_c(w_t^i): class c, model of client i after local training."""
    held: np.ndarray
    """For each model i, the mean of F[c, i] over the classes c that client i holds."""
    absent: np.ndarray
    """For each model i, the mean of F[c, i] over the classes c that client i does not hold."""


class Vanishing(NamedTuple):
    """A class that the global model lost in a round, and how many of the round's participants held it."""

    round: int
    label: int
    holders: int


def class_accuracy(labels: ArrayLike, predictions: ArrayLike, classes: int) -> np.ndarray:
    """Acc_c = |{x : y = c and ŷ = c}| / |{x : y = c}| for every class c; NaN for a class without examples."""
    labels, predictions = np.asarray(labels), np.asarray(predictions)
    if labels.shape != predictions.shape or labels.ndim != 1:
        raise ValueError(f"not the same examples: shapes {labels.shape} and {predictions.shape}")
    if len(labels) and not 0 <= labels.min() <= labels.max() < classes:
        raise ValueError(f"labels must lie in 0 … {classes - 1}: found {labels.min()} … {labels.max()}")
    totals = np.bincount(labels, minlength=classes)
    hits = np.bincount(labels[labels == predictions], minlength=classes)
    return np.where(totals > 0, hits / np.maximum(totals, 1), np.nan)


def class_forgetting(before: ArrayLike, after: ArrayLike, held: ArrayLike) -> ClassForgetting:
    """What each local model lost of each class: F[c, i] = before[c] − after[c, i].

    ``before[c]`` is the accuracy of the received model on class c, ``after[c, i]`` that of client i's model, and
    ``held[c, i]`` whether client i has training examples of class c. The measure of wsm-paper Eq. 5, taken by class
    instead of by client; its two means separate what local training reinforces from what it overwrites.
    """
    before, after = np.asarray(before, dtype=np.float64), np.asarray(after, dtype=np.float64)
    held = np.asarray(held, dtype=bool)
    if after.ndim != 2 or before.shape != after.shape[:1] or held.shape != after.shape:
        raise ValueError(
            f"before[c], after[c, i] and held[c, i] do not fit: shapes {before.shape}, {after.shape}, {held.shape}"
        )
    matrix = before[:, None] - after
    return ClassForgetting(matrix, _mean_where(matrix, held), _mean_where(matrix, ~held))


def vanished(before: ArrayLike, after: ArrayLike) -> np.ndarray:
    """Which classes vanished: some of their examples were recognised before (Acc_c > 0), none is after (Acc_c = 0)."""
    return np.asarray((np.asarray(before) > 0) & (np.asarray(after) == 0))


def vanishings(rounds: Sequence[int], before: ArrayLike, after: ArrayLike, held: ArrayLike) -> list[Vanishing]:
    """Which classes vanished from the global model, when, and how many participants held them.

    For measured round number t: ``before[t, c]`` and ``after[t, c]`` are the accuracies of the global model before and
    after the round, ``held[t, c, i]`` whether participant i holds class c. A class with no holder was absent.
    """
    before, after, held = np.asarray(before), np.asarray(after), np.asarray(held, dtype=bool)
    if held.ndim != 3 or not len(rounds) == len(held) or not before.shape == after.shape == held.shape[:2]:
        raise ValueError(
            f"{len(rounds)} rounds, before[t, c], after[t, c] and held[t, c, i] do not fit: "
            f"shapes {before.shape}, {after.shape}, {held.shape}"
        )
    holders = held.sum(axis=2)
    return [Vanishing(rounds[t], int(c), int(holders[t, c])) for t, c in np.argwhere(vanished(before, after)).tolist()]


def _mean_where(values: np.ndarray, chosen: np.ndarray) -> np.ndarray:
    """Mean over the first axis of the chosen entries that are numbers, NaN where there are none."""
    chosen = chosen & np.isfinite(values)
    counts = chosen.sum(axis=0)
    return np.where(counts > 0, np.where(chosen, values, 0.0).sum(axis=0) / np.maximum(counts, 1), np.nan)
