"""A run in a few numbers."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean
from typing import Any

from fedretain.config import EvaluateSettings
from fedretain.forgetting import accuracy_summaries, rounds_to_relative_accuracy
from fedretain.runs.metrics import Row


def final_accuracy(rows: Sequence[Row]) -> dict[str, float] | None:
    """The summaries of a run's accuracy curve; rounds in which the test set was not used are left out."""
    curve = accuracy_curve(rows)
    return accuracy_summaries(curve, last_round=rows[-1]["round"]) if curve else None


def accuracy_curve(rows: Sequence[Row]) -> list[tuple[int, float]]:
    """(round, test accuracy) of the rounds in which the test set was used."""
    return [(row["round"], row["test_accuracy"]) for row in rows if "test_accuracy" in row]


def rounds_to_targets(rows: Sequence[Row], evaluate: EvaluateSettings) -> dict[str, int | None]:
    """R_a of each target a: the first round whose test accuracy reaches a × the reference; None where none does.

    The reference is ``evaluate.reference``, for example the final accuracy of a FedSGD run (fedreg-paper §4); without
    one it is 1, and the targets are accuracies themselves.
    """
    reference = 1.0 if evaluate.reference is None else evaluate.reference
    curve = accuracy_curve(rows)
    return {f"{share:g}": rounds_to_relative_accuracy(curve, share, reference) for share in evaluate.targets}


def cost(rows: Sequence[Row]) -> dict[str, float]:
    """Where the time went: training (with aggregation), testing the global model, measuring forgetting.

    ``measuring_share`` is the part of all three that measuring took; 0 when nothing has been done.
    """
    training, evaluating, measuring = (
        sum(row[key] for row in rows) for key in ("seconds", "evaluate_seconds", "measure_seconds")
    )
    whole = training + evaluating + measuring
    return {
        "training_seconds": training,
        "evaluating_seconds": evaluating,
        "measuring_seconds": measuring,
        "measuring_share": measuring / whole if whole else 0.0,
    }


def summarise(
    rows: Sequence[Row], initial_accuracy: float, population: int, evaluate: EvaluateSettings
) -> dict[str, Any]:
    """What ``summary.json`` says of a finished run; a run of no rounds is its initial model."""
    start = dict.fromkeys(("last", "mean_last_100", "top", "average"), initial_accuracy)
    return {
        "status": "finished",
        "rounds": len(rows),
        "clients": population,
        "initial_accuracy": initial_accuracy,
        "final_accuracy": final_accuracy(rows) or start,
        "rounds_to_accuracy": rounds_to_targets(rows, evaluate),
        "mean_forgetting": _mean(rows, "forgetting_by_model"),
        "client_forgetting": {
            "by_model": _mean(rows, "forgetting_by_model"),
            "by_data": _mean(rows, "forgetting_by_data"),
        },
        "forgettable_examples": _mean(rows, "forgettable_examples"),
        "forgetting_events": _sum(rows, "forgettable_examples"),
        "seconds": sum(row["seconds"] for row in rows),
        "upload_bytes": sum(row["upload_bytes"] for row in rows),
        "download_bytes": sum(row["download_bytes"] for row in rows),
        "cost": cost(rows),
    }


def _mean(rows: Sequence[Row], key: str) -> float | None:
    values = [row[key] for row in rows if key in row]
    return fmean(values) if values else None


def _sum(rows: Sequence[Row], key: str) -> int | None:
    values = [row[key] for row in rows if key in row]
    return sum(values) if values else None
