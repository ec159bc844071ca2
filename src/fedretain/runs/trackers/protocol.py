"""What a tracker is: three calls, and the facts of a run that it is opened with."""

from __future__ import annotations

import contextlib
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from fedretain.files import write_atomically

MEMORY = "tracking.json"
"""The file in a run directory that keeps what trackers must find again: the ids of their runs."""


@dataclass(frozen=True)
class RunFacts:
    """What a tracker learns of a run when it is opened."""

    name: str
    """The experiment's name; within a comparison the variant's directory, which tells the variants apart."""
    group: str | None
    """The name of the comparison that the run belongs to."""
    path: Path
    """The run directory."""
    config: Mapping[str, Any]
    """Every setting but ``track``, by dotted key."""

    @property
    def home(self) -> Path:
        """Where files go that the runs of a comparison share; a run by itself shares with nobody."""
        return self.path.parent if self.group is not None else self.path

    def recall(self, key: str) -> str | None:
        """What ``remember`` kept under this key, in this process or an earlier one."""
        return read_memory(self.path).get(key)

    def remember(self, key: str, value: str) -> None:
        """Keep a text in the run directory, for when the run is gone on with."""
        kept = {**read_memory(self.path), key: value}
        write_atomically(self.path / MEMORY, (json.dumps(kept, indent=2) + "\n").encode())


@runtime_checkable
class Tracker(Protocol):
    """Somewhere to send a run's metrics. One object follows one run after another, never two at a time.

    Whatever it raises ends the tracking of that run with a warning, never the run itself.
    """

    def open(self, facts: RunFacts) -> int:
        """Begin, or go on with, this run. Returns the last round that is there already; later ones are sent next."""
        ...

    def log(self, round: int, numbers: Mapping[str, float], clients: Mapping[str, list[float]]) -> None:
        """One round: its numbers, and lists with a value per participant, by the names of ``metrics.jsonl``."""
        ...

    def close(self, rounds: int, summary: Mapping[str, float] | None) -> None:
        """No more for now: after so many rounds the run is finished, or stopped and without a summary."""
        ...


def numbers_of(row: Mapping[str, Any], prefix: str = "") -> dict[str, float]:
    """The finite numbers of a round or summary, those of nested mappings by dotted key."""
    found: dict[str, float] = {}
    for key, value in row.items():
        if isinstance(value, Mapping):
            found |= numbers_of(value, f"{prefix}{key}.")
        elif isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
            found[prefix + key] = value
    return found


def round_numbers(row: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of one round; the round itself is the step that they are logged at."""
    return numbers_of({key: value for key, value in row.items() if key not in ("round", "clients")})


def client_lists(row: Mapping[str, Any]) -> dict[str, list[float]]:
    """``clients/KEY`` for every list with a value per participant; nobody wants a histogram of their numbers."""
    lists = {
        f"clients/{key}": [value for value in values if value is not None]
        for key, values in row.get("clients", {}).items()
        if key != "id"
    }
    return {key: values for key, values in lists.items() if values}


def summary_numbers(summary: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of ``summary.json`` as ``summary/KEY``, apart from the rounds' numbers of the same name."""
    return {f"summary/{key}": value for key, value in numbers_of(summary).items()}


def without_password(text: str) -> str:
    """A text with addresses, without the user and password that may stand in them."""
    return re.sub(r"//[^/@\s]+@", "//", text)


def read_memory(path: Path) -> dict[str, str]:
    """All that is remembered in a run directory; a damaged file is as good as none."""
    with contextlib.suppress(OSError, ValueError):
        kept = json.loads((path / MEMORY).read_bytes())
        if isinstance(kept, dict):
            return kept
    return {}
