"""Client drift: how far the local models move, and how much they disagree on the direction."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike


class ClientDrift(NamedTuple):
    """Lengths and directions of the updates Δ_i = w_t^i − w_{t−1} of a round."""

    norms: np.ndarray
    """‖Δ_i‖₂ over all parameters."""
    cosines: np.ndarray
    """cos(Δ_i, Δ_j) = ⟨Δ_i, Δ_j⟩ / (‖Δ_i‖ ‖Δ_j‖); NaN where one of them did not move."""

    @property
    def mean_cosine(self) -> float:
        """The mean over the pairs i < j of clients that moved; NaN without such a pair."""
        pairs = self.cosines[np.triu_indices(len(self.norms), k=1)]
        pairs = pairs[np.isfinite(pairs)]
        return float(pairs.mean()) if len(pairs) else float("nan")


def client_drift(updates: ArrayLike) -> ClientDrift:
    """Norms and pairwise cosines of updates [m, d], one row per client (the drift of Karimireddy et al. 2020, §3)."""
    updates = np.asarray(updates, dtype=np.float64)
    if updates.ndim != 2:
        raise ValueError(f"updates must be [clients, parameters], not of shape {updates.shape}")
    return drift_of_products(updates @ updates.T)


def drift_of_products(products: ArrayLike) -> ClientDrift:
    """The same from the inner products G[i, j] = ⟨Δ_i, Δ_j⟩, which need no copy of all updates: ‖Δ_i‖ = √G[i, i]."""
    products = np.asarray(products, dtype=np.float64)
    if products.ndim != 2 or products.shape[0] != products.shape[1]:
        raise ValueError(f"products must be [clients, clients], not of shape {products.shape}")
    norms = np.sqrt(np.diagonal(products))
    lengths = np.outer(norms, norms)
    moved = lengths > 0
    cosines = np.where(moved, products / np.where(moved, lengths, 1.0), np.nan)
    return ClientDrift(norms, np.clip(cosines, -1.0, 1.0))
