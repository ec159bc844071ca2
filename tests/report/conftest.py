"""Run directories written by hand, as a run leaves them, for the tests of the report."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

CONFIG: dict[str, Any] = {
    "name": "digits",
    "seed": 0,
    "rounds": 4,
    "participation": 2,
    "data": {"name": "digits", "normalise": "unit"},
    "partition": {"kind": "dirichlet", "clients": 3, "alpha": 0.1},
    "model": {"name": "mlp", "hidden": [64]},
    "loss": {"name": "ce"},
    "method": {"name": "fedavg"},
    "local": {"optimizer": "sgd", "lr": 0.1, "epochs": 20},
    "server": {"lr": 1.0},
    "evaluate": {"every": 1, "targets": [0.5, 0.9], "reference": None},
    "forgetting": {"every": 2, "clients": "cohort"},
}
CLASS_COUNTS = np.array([[9, 1, 0], [0, 5, 5], [2, 2, 6]])
CLASS_NAMES = np.array(["zero", "one", "two"])


def metrics(accuracies: list[float], forgetting: float = 0.1) -> list[dict[str, Any]]:
    """One row a round; client forgetting in every second round, with 0.05 between the two participants.

    Of the 3 · round forgettable examples client 0 has two thirds, client 2 the rest.
    """
    rows: list[dict[str, Any]] = []
    for round, accuracy in enumerate(accuracies, start=1):
        row: dict[str, Any] = {
            "round": round,
            "train_loss": 1.0 / round,
            "test_accuracy": accuracy,
            "test_loss": 2.0 / round,
            "upload_bytes": 2_000_000,
            "download_bytes": 1_000_000,
            "seconds": 0.5,
            "evaluate_seconds": 0.25,
            "measure_seconds": 0.0 if round % 2 else 0.5,
            "clients": {"id": [0, 2], "train_loss": [0.5, 0.7], "weight": [0.5, 0.5], "examples": [10, 10]},
        }
        if round % 2 == 0:
            row |= {"forgetting_by_model": forgetting, "forgetting_by_data": forgetting}
            row["forgettable_examples"] = 3 * round
            row["clients"]["forgettable_examples"] = [2 * round, round]
            row["clients"]["forgetting_by_model"] = [forgetting - 0.025, forgetting + 0.025]
        rows.append(row)
    return rows


def summary(rows: list[dict[str, Any]], forgetting: float = 0.1) -> dict[str, Any]:
    """The summary of a finished run with those rows."""
    accuracies = [row["test_accuracy"] for row in rows]
    return {
        "status": "finished",
        "rounds": len(rows),
        "final_accuracy": {
            "last": accuracies[-1],
            "mean_last_100": sum(accuracies) / len(accuracies),
            "top": max(accuracies),
            "average": sum(accuracies) / len(accuracies),
        },
        "initial_accuracy": 0.1,
        "mean_forgetting": forgetting,
        "forgettable_examples": 9.0,
        "seconds": 2.0,
        "upload_bytes": 8_000_000,
        "download_bytes": 4_000_000,
    }


def write_forgetting(path: Path, round: int, models: list[int], data: list[int], forgetting: Any) -> None:
    """One matrix of client forgetting [data, models], from a received model that has 0.9 right everywhere."""
    forgetting = np.asarray(forgetting, dtype=np.float64)
    before = np.where(np.isnan(forgetting).all(axis=1), np.nan, 0.9)
    (path / "forgetting").mkdir(exist_ok=True)
    np.savez(
        path / "forgetting" / f"round-{round:06d}.npz",
        models=np.array(models),
        data=np.array(data),
        before=before,
        after=before[:, None] - forgetting,
        forgetting=forgetting,
    )


def write_measures(path: Path) -> None:
    """What ``forgetting.measures`` leaves of rounds 2 and 4, between clients 0 and 2: arrays, and numbers in the log.

    Class "two" vanishes in round 2 while nobody holds it (0.5 → 0), "one" in round 4 with one holder (0.4 → 0).
    """
    arrays: dict[int, dict[str, dict[str, Any]]] = {
        2: {
            "classes": {
                "before": [0.8, 0.4, 0.5],
                "after": [[0.9, 0.7], [0.3, 0.6], [0.0, 0.1]],
                "aggregated": [0.9, 0.5, 0.0],
                "held": [[True, True], [False, True], [False, False]],
            },
            "drift": {"norms": [1.0, 3.0], "cosines": [[1.0, -0.25], [-0.25, 1.0]]},
            "loss_increase": {"data": [1], "loss_increase": [0.5]},
            "fisher": {"data": [1], "agreement": [0.2, 0.6]},
        },
        4: {
            "classes": {
                "before": [0.9, 0.4, np.nan],
                "after": [[0.9, 0.9], [0.0, 0.2], [np.nan, np.nan]],
                "aggregated": [1.0, 0.0, np.nan],
                "held": [[True, True], [False, True], [True, True]],
            },
            "drift": {"norms": [2.0, 2.0], "cosines": [[1.0, 0.75], [0.75, 1.0]]},
            "loss_increase": {"data": [0, 2], "loss_increase": [-0.1, 0.3]},
            "fisher": {"data": [0, 2], "agreement": [np.nan, 0.5]},
        },
    }
    numbers = {
        2: {"class_forgetting_held": 0.05, "class_forgetting_absent": 0.3, "drift_norm": 2.0, "drift_cosine": -0.25},
        4: {"class_forgetting_held": 0.0, "class_forgetting_absent": 0.4, "drift_norm": 2.0, "drift_cosine": 0.75},
    }
    numbers[2] |= {"vanished_classes": 1, "loss_increase": 0.5, "fisher_agreement": 0.4}
    numbers[4] |= {"vanished_classes": 1, "loss_increase": 0.1, "fisher_agreement": 0.5}
    rows = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    rows = [{**row, **numbers.get(row["round"], {})} for row in rows]
    (path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for round, measures in arrays.items():
        for measure, found in measures.items():
            (path / measure).mkdir(exist_ok=True)
            named = {"models": np.array([0, 2]), **{name: np.array(value) for name, value in found.items()}}
            np.savez(path / measure / f"round-{round:06d}.npz", **named)


def write_run(
    path: Path,
    config: dict[str, Any] | None = None,
    accuracies: tuple[float, ...] = (0.2, 0.4, 0.6, 0.8),
    forgetting: float = 0.1,
    finished: bool = True,
) -> Path:
    """A whole run directory: four rounds, forgetting measured in rounds 2 and 4 between clients 0 and 2."""
    path.mkdir(parents=True)
    rows = metrics(list(accuracies), forgetting)
    (path / "config.yaml").write_text(yaml.safe_dump(config or CONFIG, sort_keys=False))
    (path / "environment.json").write_text(json.dumps({"python": "3.11", "device": {"kind": "cpu"}}))
    (path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    np.savez(
        path / "partition.npz",
        train_0=np.arange(10),
        validation_0=np.arange(1),
        class_counts=CLASS_COUNTS,
        class_names=CLASS_NAMES,
    )
    write_forgetting(path, 2, [0, 2], [0, 2], [[-0.05, forgetting], [2 * forgetting, 0.0]])
    write_forgetting(path, 4, [2, 1], [2, 1], [[0.0, forgetting / 2], [np.nan, np.nan]])
    if finished:
        (path / "summary.json").write_text(json.dumps(summary(rows, forgetting)))
    return path


@pytest.fixture
def make_run(tmp_path: Path) -> Callable[..., Path]:
    """``make_run("name", config, …)`` writes a run directory below the test's own folder."""

    def make(name: str = "run", *args: Any, **kwargs: Any) -> Path:
        return write_run(tmp_path / name, *args, **kwargs)

    return make


@pytest.fixture
def experiment() -> Callable[..., dict[str, Any]]:
    """``experiment(seed=1, …)``: the config above with some of its top-level keys replaced."""
    return lambda **changes: {**CONFIG, **changes}
