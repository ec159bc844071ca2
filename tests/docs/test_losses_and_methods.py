"""The page of losses and methods against the code and against real runs: names, parameters, bytes."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from safetensors.torch import load_file

import fedretain
from fedretain.components import parameters
from fedretain.composition import EXAMPLES
from fedretain.losses import LOSSES
from fedretain.methods import METHODS
from fedretain.optimizers import ServerRule
from fedretain.tensors import size_in_bytes

PAGE = (Path(__file__).parents[2] / "docs" / "losses-and-methods.md").read_text(encoding="utf-8")
MODEL = ((64 * 64 + 64) + (64 * 10 + 10)) * 4
"""Bytes of the default network on the digits, 64-64-10 in float32."""


def rows(head: str) -> list[list[str]]:
    table = PAGE.split(head)[1].split("\n\n")[0]
    return [[cell.strip() for cell in row.strip("|").split(" | ")] for row in table.splitlines()[2:]]


def costs() -> dict[str, list[str]]:
    return {row[0].strip("` "): row[1:] for row in rows("| `method` | parameters (default) ")}


def in_bytes(cell: str, examples: int = 0) -> int:
    """``2×``, ``1× + 4 B``, ``5 B + 1 B an example`` or ``–``."""
    units = {"×": MODEL, " B": 1, " B an example": examples}
    terms = [] if cell == "–" else [re.fullmatch(r"(\d+)(.+)", term) for term in cell.split(" + ")]
    return sum(int(term[1]) * units[term[2]] for term in terms if term)


def test_bytes_are_read_as_written() -> None:
    assert in_bytes("–") == 0
    assert in_bytes("3×") == 3 * MODEL
    assert in_bytes("1× + 4 B") == MODEL + 4
    assert in_bytes("5 B + 1 B an example", examples=7) == 12


def test_every_loss_and_every_method_has_its_row() -> None:
    assert [row[0].strip("` ") for row in rows("| `loss` | formula ")] == list(LOSSES)
    assert [row[0].strip("` ") for row in rows("| `method` | client ")] == list(METHODS)
    assert list(costs()) == list(METHODS)


def test_every_server_optimiser_has_its_row() -> None:
    assert [row[0].strip("` ") for row in rows("| `server.optimizer` | known as ")] == list(ServerRule.__args__)


@pytest.mark.parametrize("name", METHODS)
def test_parameters_and_defaults(name: str) -> None:
    found: dict[str, Any] = dict(re.findall(r"`(\w+)` \((required|`[^`]*`)\)", costs()[name][0]))
    found = {key: cell if cell == "required" else yaml.safe_load(cell.strip("`")) for key, cell in found.items()}
    assert found == {p.name: "required" if p.required else p.default for p in parameters(METHODS[name])}


@pytest.mark.parametrize("name", METHODS)
def test_what_is_sent_and_kept_is_what_the_table_says(name: str, tmp_path: Path) -> None:
    """One round of two clients, from metrics.jsonl and the files of the clients' states."""
    settings: Mapping[str, Any] = {
        "rounds": 1,
        "participation": 2,
        "method": EXAMPLES[name],
        "evaluate": {"every": 0},
        "forgetting": {"every": 0},
    }
    run = fedretain.run(settings, out=tmp_path / "run")
    _, keeps, up, down = costs()[name]
    assert run.metrics["upload_bytes"] == [2 * in_bytes(up)]
    assert run.metrics["download_bytes"] == [2 * in_bytes(down)]
    clients = run.metrics[0]["clients"]
    for client, examples in zip(clients["id"], clients["examples"], strict=True):
        path = run.path / "clients" / f"{client:07d}-000001.safetensors"
        assert (size_in_bytes(load_file(path)) if path.exists() else 0) == in_bytes(keeps, examples)


def test_running_statistics_are_sent_once(tmp_path: Path) -> None:
    """What the page says of batch norm: SCAFFOLD with a model that has buffers sends less than twice FedAvg's bytes."""
    settings: dict[str, Any] = {
        "rounds": 1,
        "participation": 1,
        "model": {"name": "resnet18", "width": 2},
        "local": {"steps": 1},
        "evaluate": {"every": 0},
        "forgetting": {"every": 0},
    }
    runs = [fedretain.run({**settings, "method": name}, out=tmp_path / name) for name in ("fedavg", "scaffold")]
    fedavg, scaffold = (run.summary["upload_bytes"] for run in runs)
    params = sum(4 * p.numel() for p in runs[0].model().parameters())
    assert scaffold == fedavg + params < 2 * fedavg
