"""Federated example forgetting: what a client had learned and the aggregation lost (fedwavg-paper §3)."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike


def forgettable_examples(local_correct: ArrayLike, global_correct: ArrayLike) -> int:
    """How many training examples the client's local model had right and the aggregated global model has wrong."""
    local_correct, global_correct = np.asarray(local_correct, bool), np.asarray(global_correct, bool)
    if local_correct.shape != global_correct.shape:
        raise ValueError(f"not the same examples: shapes {local_correct.shape} and {global_correct.shape}")
    return int(np.count_nonzero(local_correct & ~global_correct))
