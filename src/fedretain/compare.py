"""Comparisons: every variant of an experiment in a directory of its own; what is finished is not done again."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from fedretain.config import Variant, expand_variants, read_experiment
from fedretain.data import Dataset
from fedretain.errors import FedretainError, RunError
from fedretain.experiment import Source, Watcher, run
from fedretain.files import write_atomically
from fedretain.runs.run import Run

LONGEST_NAME = 150
"""Characters of a folder name; file systems end at 255."""


class Failure(NamedTuple):
    """A variant that did not finish, and why."""

    variant: str
    reason: str


class Comparison(NamedTuple):
    """The runs of all variants, side by side."""

    path: Path
    runs: dict[str, Run]
    failures: list[Failure]

    @property
    def rows(self) -> list[dict[str, Any]]:
        """The table: one row per setting, mean and standard deviation over seeds."""
        from fedretain.report import comparison_rows

        return comparison_rows([run.path for run in self.runs.values()])


def compare(
    source: Source,
    *,
    out: str | Path | None = None,
    overrides: Sequence[str] = (),
    data: Dataset | None = None,
    watch: Watcher | None = None,
    begin: Callable[[Variant, int, int], None] | None = None,
    end: Callable[[Variant, Run], None] | None = None,
) -> Comparison:
    """Run every variant; a variant that fails is noted and the others go on.

    Without ``out`` the runs go to ``runs/NAME``. Calling it again goes on where it stopped. ``begin`` is called before
    a variant with its number and how many there are, ``end`` after one that finished, now or at an earlier call.
    """
    given = read_experiment(source, overrides)
    variants = expand_variants(given)
    path = Path(out) if out is not None else Path("runs") / variants[0].experiment.name
    folders = {variant.name: directory_name(variant.name) for variant in variants}
    runs: dict[str, Run] = {}
    failures: list[Failure] = []
    for number, variant in enumerate(variants):
        if begin is not None:
            begin(variant, number, len(variants))
        folder = path / folders[variant.name]
        try:
            runs[variant.name] = run(variant.experiment, out=folder, resume=True, data=data, watch=watch)
        except RunError:
            raise
        except FedretainError as error:
            failures.append(Failure(variant.name, str(error)))
            continue
        if end is not None:
            end(variant, runs[variant.name])
    listing = {
        "variants": folders,
        "failures": {f.variant: f.reason for f in failures},
    }
    try:
        write_atomically(path / "comparison.json", (json.dumps(listing, indent=2) + "\n").encode())
    except OSError as error:
        raise RunError(
            f"{path}/comparison.json: cannot be written ({error.strerror or error}); make room there, then compare "
            "again: finished runs are not done again"
        ) from error
    if runs and find_spec("plotly") is not None:
        from fedretain.report import write_report

        write_report([run.path for run in runs.values()], path / "report.html")
    return Comparison(path, runs, failures)


def directory_name(variant: str) -> str:
    """A variant's name as a folder name; where that changes or cuts it, a hash keeps two variants apart."""
    name = re.sub(r"[^A-Za-z0-9._=,+()-]", "_", variant)[:LONGEST_NAME]
    return name if name == variant else f"{name}-{hashlib.sha256(variant.encode()).hexdigest()[:8]}"
