"""The page of the trackers against the code: parameters, facts and the length of the example."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from pathlib import Path

import yaml

from fedretain.components import parameters
from fedretain.runs.trackers import TRACKERS, RunFacts
from fedretain.runs.trackers.mlflow import ENVIRONMENT

PAGE = (Path(__file__).parents[2] / "docs" / "tracking.md").read_text(encoding="utf-8")


def test_every_tracker_stands_there_with_its_parameters() -> None:
    table = PAGE.split("| tracker | parameters (default) |")[1].split("\n\n")[0]
    rows = re.findall(r"^\| `(\w+)` \| (.+?) \|", table, re.MULTILINE)
    named = {name: dict(re.findall(r"`(\w+)` \(`([^`]*)`\)", cell)) for name, cell in rows}
    assert {name: {key: yaml.safe_load(text) for key, text in row.items()} for name, row in named.items()} == {
        name: {p.name: p.default for p in parameters(factory)} for name, factory in TRACKERS.items()
    }


def test_every_fact_stands_there() -> None:
    table = PAGE.split("| of `facts` | what |")[1].split("\n\n")[0]
    cells = re.findall(r"^\| (`.+?) \|", table, re.MULTILINE)
    named = {name for cell in cells for name in re.findall(r"`(\w+)", cell)}
    public = {name for name in vars(RunFacts) if not name.startswith("_")}
    assert named == public | {field.name for field in dataclasses.fields(RunFacts)}


def test_the_waiting_times_are_those_of_the_code() -> None:
    assert f"`MLFLOW_HTTP_REQUEST_MAX_RETRIES` ({ENVIRONMENT['MLFLOW_HTTP_REQUEST_MAX_RETRIES']} here)" in PAGE
    assert f"`MLFLOW_HTTP_REQUEST_TIMEOUT` ({ENVIRONMENT['MLFLOW_HTTP_REQUEST_TIMEOUT']})" in PAGE


def test_a_tracker_takes_twenty_lines(write_files: Callable[[str], dict[str, str]]) -> None:
    text = write_files("tracking.md")["csvtracker.py"]
    assert len([line for line in text.splitlines() if line.strip()]) <= 20
