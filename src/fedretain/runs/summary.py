"""A run in a few numbers."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean
from typing import Any

from fedretain.forgetting import accuracy_summaries
from fedretain.runs.metrics import Row


def final_accuracy(rows: Sequence[Row]) -> dict[str, float] | None:
    """The summaries of a run's accuracy curve; rounds in which the test set was not used are left out."""
    curve = [(row["round"], row["test_accuracy"]) for row in rows if "test_accuracy" in row]
    return accuracy_summaries(curve, last_round=rows[-1]["round"]) if curve else None


def summarise(rows: Sequence[Row], initial_accuracy: float, population: int) -> dict[str, Any]:
    """What ``summary.json`` says of a finished run; a run of no rounds is its initial model."""
    start = dict.fromkeys(("last", "mean_last_100", "top", "average"), initial_accuracy)
    return {
        "status": "finished",
        "rounds": len(rows),
        "clients": population,
        "initial_accuracy": initial_accuracy,
        "final_accuracy": final_accuracy(rows) or start,
        "mean_forgetting": _mean(rows, "forgetting_by_model"),
        "forgettable_examples": _mean(rows, "forgettable_examples"),
        "seconds": sum(row["seconds"] for row in rows),
        "upload_bytes": sum(row["upload_bytes"] for row in rows),
        "download_bytes": sum(row["download_bytes"] for row in rows),
    }


def _mean(rows: Sequence[Row], key: str) -> float | None:
    values = [row[key] for row in rows if key in row]
    return fmean(values) if values else None
