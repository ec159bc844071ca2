"""Example forgetting: what was learned and is lost, in federated and in ordinary training (fedwavg-paper §3)."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike


def forgettable_examples(local_correct: ArrayLike, global_correct: ArrayLike) -> int:
    """How many training examples the client's local model had right and the aggregated global model has wrong."""
    local_correct, global_correct = np.asarray(local_correct, bool), np.asarray(global_correct, bool)
    if local_correct.shape != global_correct.shape:
        raise ValueError(f"not the same examples: shapes {local_correct.shape} and {global_correct.shape}")
    return int(np.count_nonzero(local_correct & ~global_correct))


def margin_error(logits: ArrayLike, labels: ArrayLike) -> np.ndarray:
    """max_{c≠y} f_c − f_y of each example: negative when it is classified correctly, the larger the worse."""
    logits, labels = np.asarray(logits, dtype=np.float64), np.asarray(labels)
    if logits.ndim != 2 or labels.shape != logits.shape[:1] or logits.shape[1] < 2:
        raise ValueError(f"logits [n, classes ≥ 2] and labels [n] do not fit: {logits.shape} and {labels.shape}")
    rows = np.arange(len(labels))
    others = logits.copy()
    others[rows, labels] = -np.inf
    margins: np.ndarray = others.max(axis=1) - logits[rows, labels]
    return margins


class ForgettingEvents:
    """Follows the examples of a training set through ordinary, centralised training (fedwavg-paper §3.1).

    A forgetting event: the error of an example is larger now than when it was last seen, error_now > error_last. With
    error 0 for a right and 1 for a wrong answer this is "was right, is wrong" (Toneva et al. 2019, Def. 1); with
    ``margin_error`` it is "has a larger margin error". The first sight of an example is never an event.
    """

    def __init__(self, examples: int) -> None:
        self.last_error = np.full(examples, np.nan)
        self.counts = np.zeros(examples, dtype=np.int64)

    def see(self, numbers: ArrayLike, errors: ArrayLike) -> int:
        """Note the errors of the given examples, each at most once, and return how many were forgotten."""
        numbers, errors = np.asarray(numbers), np.asarray(errors, dtype=np.float64)
        if numbers.shape != errors.shape or len(np.unique(numbers)) != numbers.size:
            raise ValueError(
                f"one error for each example, and no example twice: {numbers.size} numbers, {errors.size} errors"
            )
        forgotten = errors > self.last_error[numbers]
        self.counts[numbers] += forgotten
        self.last_error[numbers] = errors
        return int(forgotten.sum())

    @property
    def total(self) -> int:
        """Forgetting events of all examples together."""
        return int(self.counts.sum())
