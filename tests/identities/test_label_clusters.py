"""FedWAvg where its paper shows it: two clients of one cluster against eight of another, CIFAR-10 (Tables 6 to 8)."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fedretain

SETTING: dict[str, Any] = {
    "rounds": 3,
    "data": {"name": "cifar10"},
    "partition": {
        "kind": "label_clusters",
        "sizes": [2, 8],
        "classes_per_cluster": 2,
        "examples_per_client": 200,
        "validation": 0.0,
    },
    "model": "lenet",
    "local": {"optimizer": "adam", "lr": 0.001, "epochs": 6, "batch_size": 32},
    "evaluate": {"every": 0},
    "forgetting": {"every": 1},
}


@pytest.mark.kit
def test_the_minority_is_forgotten_and_fedwavg_gives_it_weight(kit: Path, tmp_path: Path) -> None:
    """FedAvg forgets most of what the minority learned and little of the majority's.

    All clients take part in every round, so what was forgotten at the end of round t is what FedWAvg counts at the
    start of round t + 1: its weights must be those of Alg. 1, computed here from the metrics of the round before.
    """
    setting = {**SETTING, "data": {"name": "cifar10", "root": str(kit)}}
    fedavg = fedretain.run({**setting, "method": "fedavg"}, out=tmp_path / "fedavg")
    lost = np.array([row["clients"]["forgettable_examples"] for row in fedavg.metrics])[-1]
    assert lost[:2].mean() > 100
    assert lost[2:].mean() < 60

    method = {"name": "fedwavg", "alpha": 0.3}
    fedwavg = fedretain.run({**setting, "method": method}, out=tmp_path / "fedwavg")
    rows = list(fedwavg.metrics)
    assert rows[0]["clients"]["weight"] == pytest.approx([0.1] * 10)
    for before, after in pairwise(rows):
        forgotten = np.array(before["clients"]["forgettable_examples"])
        weights = 0.7 + 0.3 * 10 * forgotten / forgotten.sum()
        assert after["clients"]["weight"] == pytest.approx(weights / weights.sum(), rel=1e-5)
    assert sum(rows[1]["clients"]["weight"][:2]) > 0.25
