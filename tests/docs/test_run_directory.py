"""The page of the run directory against a real run: every file, key and array, and none that does not exist."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fedretain

PAGE = (Path(__file__).parents[2] / "docs" / "run-directory.md").read_text(encoding="utf-8")


def named_in(text: str) -> set[str]:
    """What stands in the first cells of the tables."""
    cells = re.findall(r"^\| (`.+?) \|", text, re.MULTILINE)
    return {name for cell in cells for name in re.findall(r"`([^`]+)`", cell)}


def section(title: str) -> str:
    return PAGE.split(f"\n## {title}\n")[1].split("\n## ")[0]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    experiment: dict[str, Any] = {
        "rounds": 10,
        "participation": 3,
        "method": "scaffold",
        "local": {"steps": 1},
        "evaluate": {"every": 10, "personalised": True},
    }
    return fedretain.run(experiment, out=tmp_path_factory.mktemp("runs") / "all").path


def test_files(path: Path) -> None:
    """Folders end in a slash on the page; round 10 is the only one measured, and the one named there."""
    files = {p.name + "/" * p.is_dir() for p in path.iterdir()} - {"forgetting/", "personalised/", "clients/"}
    files |= {f"{p.parent.name}/{p.name}" for kind in ("forgetting", "personalised") for p in (path / kind).iterdir()}
    states = {re.sub(r"\d", "0", f"clients/{p.name}") for p in (path / "clients").iterdir()}
    named = named_in(PAGE.split("\n## ")[0])
    assert {name for name in named if not name.startswith("clients/")} == files
    assert {re.sub(r"\d", "0", name) for name in named if name.startswith("clients/")} == states


def test_metrics(path: Path) -> None:
    rows = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    outer, inner = section("`metrics.jsonl`").split("Within `clients`:")
    assert named_in(outer) == {key for row in rows for key in row}
    assert named_in(inner) == {key for row in rows for key in row["clients"]}
    for text, row in ((outer, rows[0]), (inner, rows[0]["clients"])):
        assert set(re.findall(r"^\| `(\w+)` \| always \|", text, re.MULTILINE)) == row.keys()


def test_summary(path: Path) -> None:
    summary = json.loads((path / "summary.json").read_text())
    assert named_in(section("`summary.json`")) == summary.keys()
    for key in summary["final_accuracy"]:
        assert f"`{key}`" in section("`summary.json`")


def test_forgetting_arrays(path: Path) -> None:
    with np.load(path / "forgetting" / "round-000010.npz") as record:
        assert named_in(section("`forgetting/round-*.npz`")) == set(record.files)


def test_partition_arrays(path: Path) -> None:
    with np.load(path / "partition.npz") as partition:
        names = {re.sub(r"_\d+$", "_K", name) for name in partition.files}
    assert named_in(section("`partition.npz`")) == names


def test_checkpoint_sections(path: Path) -> None:
    """What a checkpoint's tensors are called; a stateless run has parameters alone."""
    from safetensors.torch import load_file

    heads = {name.partition("/")[0] for name in load_file(path / "checkpoint" / "round-000010.safetensors")}
    assert heads <= set(re.findall(r"`(\w+)/(?:K/)?…`", section("`checkpoint/`")))
