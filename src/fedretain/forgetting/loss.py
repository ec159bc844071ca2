"""Loss increase: what local training costs the clients of the round before (fedreg-paper B.1 and B.3)."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike


def loss_increase(before: ArrayLike, after: ArrayLike) -> np.ndarray:
    """For each client i of round t−1: (1/|S_t|)·Σ_{j∈S_t} L_{w_t^j}(D_i) − L_{w_{t−1}}(D_i).

    ``before[i]`` is the mean loss of the global model that round t starts from on the training data D_i,
    ``after[i, j]`` that of the local model of participant j of round t. Positive means forgetting (fedreg-paper B.3).
    """
    before, after = np.asarray(before, dtype=np.float64), np.asarray(after, dtype=np.float64)
    if after.ndim != 2 or before.shape != after.shape[:1] or after.shape[1] == 0:
        raise ValueError(f"before[i] and after[i, j] do not fit: shapes {before.shape} and {after.shape}")
    increase: np.ndarray = after.mean(axis=1) - before
    return increase
