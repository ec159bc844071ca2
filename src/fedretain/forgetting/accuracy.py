"""Summaries of one accuracy curve: how good a run became, and how fast."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

Curve = Sequence[tuple[int, float]]
"""(round, test accuracy) of the rounds in which it was measured, in ascending order."""


def accuracy_summaries(curve: Curve, *, last_round: int | None = None) -> dict[str, float] | None:
    """Four summaries of an accuracy curve A(t); None for a curve without a value.

    last = A(T) (wsm-thesis §3.5). mean_last_100 = mean of A(t) over T − 100 < t ≤ T (wsm-paper §4): the last 100
    rounds, not the last 100 measurements. top = max_t A(t) and average = mean_t A(t) (fedwavg-paper). T is
    ``last_round``, by default the last round of the curve.
    """
    if not curve:
        return None
    last_round = curve[-1][0] if last_round is None else last_round
    values = [accuracy for _, accuracy in curve]
    recent = [accuracy for round, accuracy in curve if round > last_round - 100]
    if not recent:
        raise ValueError(f"no accuracy in the last 100 rounds up to {last_round}: the curve ends at {curve[-1][0]}")
    return {"last": values[-1], "mean_last_100": fmean(recent), "top": max(values), "average": fmean(values)}


def rounds_to_accuracy(curve: Curve, target: float) -> int | None:
    """The first round of a curve with A(t) ≥ target; None when it is never reached."""
    return next((round for round, accuracy in curve if accuracy >= target), None)


def rounds_to_relative_accuracy(curve: Curve, share: float, reference: float) -> int | None:
    """R_a = min {t : A(t) ≥ a · reference}, the reference being the final accuracy of the FedSGD run (fedreg-paper §4).

    ``share`` is a, for example 0.5, 0.9 or 1.0; None when it is never reached ("–" in the paper's tables).
    """
    return rounds_to_accuracy(curve, share * reference)
