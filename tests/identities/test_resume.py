"""Every method goes on exactly where it stopped, also where a sum over all parameters depends on their order."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import fedretain
from fedretain.tensors import Tensors

FEDCURV = {"name": "fedcurv", "lam": 0.2}
FEDWAVG = {"name": "fedwavg", "alpha": 0.5, "period": 2}
FEDREG = {"name": "fedreg", "gamma": 0.5, "eta_s": 0.05}


def rows(run: fedretain.Run) -> list[dict[str, Any]]:
    lines = (run.path / "metrics.jsonl").read_text().splitlines()
    kept = [{k: v for k, v in json.loads(line).items() if "seconds" not in k} for line in lines]
    # The first half's last round is evaluated because it is the last; that is not part of the training.
    return [{k: v for k, v in row.items() if not k.startswith("test_")} for row in kept]


def same_bits(ours: Tensors, theirs: Tensors) -> None:
    assert ours.keys() == theirs.keys()
    assert [name for name in ours if not torch.equal(ours[name], theirs[name])] == []


@pytest.mark.parametrize(
    "method",
    [
        "scaffold",
        {"name": "scaffold", "option": "I"},
        FEDCURV,
        FEDWAVG,
        ["scaffold", FEDWAVG],
        [FEDCURV, FEDWAVG],
        FEDREG,
        {"name": "fedprox", "mu": 0.3},
    ],
    ids=["scaffold-II", "scaffold-I", "fedcurv", "fedwavg", "scaffold+fedwavg", "fedcurv+fedwavg", "fedreg", "fedprox"],
)
def test_three_rounds_and_three_more_are_six(method: Any, settings: Any, five_clients: Any, tmp_path: Path) -> None:
    """Bit for bit: metrics, global model, server state, and the state of every client, whoever took part when."""
    given = settings(method=method, rounds=6, participation=2, loss="wsm", local={"epochs": 2})
    whole = fedretain.run(given, out=tmp_path / "whole", data=five_clients)
    fedretain.run({**given, "rounds": 3}, out=tmp_path / "halves", data=five_clients)
    halves = fedretain.run(given, out=tmp_path / "halves", data=five_clients, resume=True)
    assert rows(whole) == rows(halves)
    ours, theirs = halves.checkpoint(), whole.checkpoint()
    assert ours.clients == theirs.clients
    assert len(ours.clients) > 2 or method == FEDREG or "mu" in method
    assert list(ours.state.params) == [name for name, _ in halves.model().named_parameters()]
    for part in ("params", "buffers", "server", "optimizer"):
        same_bits(getattr(ours.state, part), getattr(theirs.state, part))
    for client, version in ours.clients.items():
        name = f"{client:07d}-{version:06d}.safetensors"
        same_bits(*(load_file(run.path / "clients" / name) for run in (halves, whole)))
