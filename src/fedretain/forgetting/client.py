"""Local client forgetting: what a client's local training costs the other clients (wsm-paper Eq. 5 and 6)."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike


class ClientForgetting(NamedTuple):
    """Positive means forgetting."""

    matrix: np.ndarray
    """F[k, i] = Acc_k(w_{t−1}) − Acc_k(w_t^i): data of client k, model of client i after local training."""
    by_model: np.ndarray
    """For each model i, the mean of F[k, i] over the data of the *other* clients k (the heatmap's last column)."""
    by_data: np.ndarray
    """For the data of each client k, the mean of F[k, i] over the *other* clients' models i (Eq. 6 as printed)."""


def client_forgetting(
    before: ArrayLike, after: ArrayLike, *, data: ArrayLike | None = None, models: ArrayLike | None = None
) -> ClientForgetting:
    """Forgetting from plain accuracies: ``before[k]`` of the received model, ``after[k, i]`` of client i's model.

    ``data`` and ``models`` are the client numbers of the rows and columns, needed when the two are not the same
    clients in the same order; a client's own data is left out of the averages. Entries without a value (NaN, a client
    without validation data) are left out too; a mean over nothing is NaN.
    """
    before, after = np.asarray(before, dtype=np.float64), np.asarray(after, dtype=np.float64)
    if after.ndim != 2 or before.shape != after.shape[:1]:
        raise ValueError(f"before[k] and after[k, i] do not fit: shapes {before.shape} and {after.shape}")
    if data is None and models is None and after.shape[0] != after.shape[1]:
        raise ValueError(f"after is {after.shape[0]} × {after.shape[1]}: say which clients by data= and models=")
    rows = np.arange(after.shape[0]) if data is None else np.asarray(data)
    columns = np.arange(after.shape[1]) if models is None else np.asarray(models)
    if rows.shape != after.shape[:1] or columns.shape != after.shape[1:]:
        raise ValueError(f"data and models must name {after.shape[0]} and {after.shape[1]} clients")
    matrix = before[:, None] - after
    others = np.where(rows[:, None] != columns[None, :], matrix, np.nan)
    return ClientForgetting(matrix, _mean_of_known(others, axis=0), _mean_of_known(others, axis=1))


def _mean_of_known(values: np.ndarray, axis: int) -> np.ndarray:
    """Mean over the entries that are numbers, NaN where there are none (and no warning)."""
    known = np.isfinite(values)
    counts = known.sum(axis)
    sums = np.where(known, values, 0.0).sum(axis)
    return np.where(counts > 0, sums / np.maximum(counts, 1), np.nan)
