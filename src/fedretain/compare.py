"""Comparisons: every variant of an experiment in a directory of its own; what is finished is not done again."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from fedretain.config import Experiment, Variant, expand_variants, read_experiment
from fedretain.data import Dataset
from fedretain.errors import FedretainError, RunError
from fedretain.experiment import Source, build_world, finished, load_data, plan_client_states, reported, run
from fedretain.files import write_atomically
from fedretain.keeping import Watcher
from fedretain.runs.run import Run
from fedretain.runs.trackers import Tracker
from fedretain.runs.trackers.tracking import build_trackers
from fedretain.together import Entry, groups, train_together

if TYPE_CHECKING:
    from fedretain.report import TrainingPair

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

    @property
    def summaries(self) -> list[dict[str, Any]]:
        """Every summary of accuracy and forgetting, and the rounds to each target; one row per setting."""
        from fedretain.report import summary_rows

        return summary_rows([run.path for run in self.runs.values()])

    @property
    def training_pairs(self) -> list[TrainingPair]:
        """Forgetting events of the settings that were trained both federated and centralised."""
        from fedretain.report import training_pairs

        return training_pairs([run.path for run in self.runs.values()])


def compare(
    source: Source,
    *,
    out: str | Path | None = None,
    overrides: Sequence[str] = (),
    data: Dataset | None = None,
    watch: Watcher | None = None,
    begin: Callable[[Variant, int, int], None] | None = None,
    end: Callable[[Variant, Run], None] | None = None,
    trackers: Sequence[Tracker] = (),
) -> Comparison:
    """Run every variant; a variant that fails is noted and the others go on.

    Without ``out`` the runs go to ``runs/NAME``. Calling it again goes on where it stopped. ``begin`` is called before
    a variant with its number and how many there are, ``end`` after one that finished, now or at an earlier call.
    ``trackers`` follow every variant, one after the other, besides those under ``track``.
    """
    given = read_experiment(source, overrides)
    variants = expand_variants(given)
    path = Path(out) if out is not None else Path("runs") / variants[0].experiment.name
    for variant in variants:
        build_trackers(variant.experiment, trackers)  # what is missing for them is missing before anything is trained
    folders = {variant.name: directory_name(variant.name) for variant in variants}
    runs: dict[str, Run] = {}
    failures: list[Failure] = []
    group = variants[0].experiment.name
    numbers = {variant.name: number for number, variant in enumerate(variants)}
    begun: set[str] = set()

    def announce(variant: Variant) -> None:
        if begin is not None and variant.name not in begun:
            begin(variant, numbers[variant.name], len(variants))
        begun.add(variant.name)

    def fail(variant: Variant, reason: str) -> None:
        failures.append(Failure(variant.name, reason))

    examples = _Examples(data)
    done: set[str] = set()
    for entries in _stacks(variants, path, folders, examples):
        for entry in entries:
            announce(entry.variant)
        if train_together(
            entries, watch=watch, trackers=trackers, group=group, failed=lambda entry, why: fail(entry.variant, why)
        ):
            done |= {entry.variant.name for entry in entries if finished(entry.path)}
    for variant in variants:
        if variant.name in [failure.variant for failure in failures]:
            continue
        announce(variant)
        try:
            runs[variant.name] = (
                reported(path / folders[variant.name])
                if variant.name in done
                else run(
                    variant.experiment,
                    out=path / folders[variant.name],
                    resume=True,
                    data=examples.of(variant.experiment),
                    watch=watch,
                    trackers=trackers,
                    group=group,
                )
            )
        except RunError:
            raise
        except FedretainError as error:
            fail(variant, str(error))
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


class _Examples:
    """The data of one variant after another; those of the last are kept, for most variants have the same."""

    def __init__(self, given: Dataset | None) -> None:
        self.given = given
        self.last: tuple[dict[str, Any], Dataset] | None = None

    def of(self, experiment: Experiment) -> Dataset:
        """What was given, or what the experiment names."""
        if self.given is not None:
            return self.given
        which = experiment.data.model_dump(exclude={"normalise", "mean", "std"})
        if self.last is None or self.last[0] != which:
            self.last = (which, load_data(experiment))
        return self.last[1]


def _stacks(
    variants: Sequence[Variant], path: Path, folders: Mapping[str, str], examples: _Examples
) -> Iterator[list[Entry]]:
    """Groups of variants that may train together; what is finished, or cannot be built, is left to ``run``."""
    entries: list[Entry] = []
    for variant in variants:
        folder = path / folders[variant.name]
        if finished(folder) or not variant.experiment.engine.stack:
            continue
        try:
            beside = entries[0].world if entries else None
            parts = next((entry.parts for entry in entries if _same_parts(entry.experiment, variant.experiment)), None)
            world = build_world(variant.experiment, examples.of(variant.experiment), beside, parts)
            needs = plan_client_states(variant.experiment, world, folder)
        except FedretainError:
            continue
        entries.append(Entry(variant, folder, world, needs))
    for group in groups(entries):
        if len(group) > 1:
            yield group


def _same_parts(one: Experiment, other: Experiment) -> bool:
    """Whether the same examples go to the same clients."""
    same_seed = one.partition.seed is not None or one.seed == other.seed
    return same_seed and one.partition == other.partition and one.data == other.data


def directory_name(variant: str) -> str:
    """A variant's name as a folder name; where that changes or cuts it, a hash keeps two variants apart."""
    name = re.sub(r"[^A-Za-z0-9._=,+()-]", "_", variant)[:LONGEST_NAME]
    return name if name == variant else f"{name}-{hashlib.sha256(variant.encode()).hexdigest()[:8]}"
