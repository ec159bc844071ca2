"""Fisher agreement: do pseudo data know which parameters matter to the other clients' data (fedreg-paper B.3)."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike


def fisher_agreement(a: ArrayLike, b: ArrayLike) -> float:
    """Pearson's correlation, over all parameters, of two empirical Fisher diagonals (fedreg-paper §4.3, B.3).

    r = Σ_p (a_p − ā)(b_p − b̄) / √(Σ_p (a_p − ā)² · Σ_p (b_p − b̄)²), p running over every entry of the two arrays.
    NaN when one of them is constant, as with a model whose gradient is zero.
    """
    a, b = np.asarray(a, dtype=np.float64).ravel(), np.asarray(b, dtype=np.float64).ravel()
    if a.shape != b.shape or not len(a):
        raise ValueError(f"not the same parameters: {len(a)} and {len(b)} entries")
    if np.ptp(a) == 0 or np.ptp(b) == 0:
        return float("nan")
    return float(np.clip(_centred(a) @ _centred(b), -1.0, 1.0))


def _centred(values: np.ndarray) -> np.ndarray:
    """Mean 0 and length 1. Fisher values may be so small that their squares vanish, so the range is divided out."""
    scaled = (values - values.min()) / np.ptp(values)
    scaled -= scaled.mean()
    return np.asarray(scaled / np.linalg.norm(scaled))
