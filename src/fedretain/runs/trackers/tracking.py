"""Follows a run with its trackers, and sends the metrics of a run afterwards. ``metrics.jsonl`` is the truth."""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedretain.components import find
from fedretain.config import Experiment, flatten, make_experiment
from fedretain.errors import ConfigError, RunError
from fedretain.runs.directory import locked
from fedretain.runs.metrics import Row
from fedretain.runs.run import Run
from fedretain.runs.trackers import TRACKERS, RunFacts, Tracker
from fedretain.runs.trackers.protocol import client_lists, read_memory, round_numbers, summary_numbers, without_password

LOG = logging.getLogger("fedretain")

Target = str | Mapping[str, Any] | Tracker
"""A tracker's name, its name with parameters, or a tracker."""


@dataclass(eq=False)
class Named:
    """A tracker, what to call it, how to send a run's metrics to it again, and the last round that it has."""

    name: str
    tracker: Tracker
    again: str = "fedretain track {path}"
    reached: int = 0

    def send(self, row: Row) -> None:
        """One round; one that was done twice, after a crash, is not sent twice."""
        if row["round"] > self.reached:
            self.tracker.log(row["round"], round_numbers(row), client_lists(row))


def build_trackers(experiment: Experiment, own: Sequence[Tracker] = ()) -> list[Named]:
    """The trackers that the experiment names, then the given ones. A missing library is an error here."""
    built = []
    for part in experiment.track:
        tracker = find("tracker", TRACKERS, part.name)(**part.parameters)
        if not isinstance(tracker, Tracker):
            raise ConfigError(f"track: {part.name!r} makes no tracker; it needs the methods open, log and close")
        built.append(Named(part.name, tracker))
    return built + [_own(tracker) for tracker in own]


class Tracking:
    """The trackers of one run. One that fails is left out from then on, with a warning; the run does not notice."""

    def __init__(self, trackers: Sequence[Named]) -> None:
        self._given = list(trackers)
        self._at_work: list[Named] = []
        self._path = Path()
        self._rounds = 0
        self.failed: list[str] = []

    def begin(self, path: Path, experiment: Experiment, rows: Sequence[Row], group: str | None = None) -> None:
        """Open all trackers, and send each the rounds that it does not have."""
        self._path, self._rounds = path, len(rows)
        for named in self._given:
            with self._surviving(named):
                facts = run_facts(path, experiment, group)
                if facts.group is not None and facts.recall("group") != facts.group:
                    facts.remember("group", facts.group)
                named.reached = named.tracker.open(facts)
                self._at_work.append(named)
                for row in rows:
                    named.send(row)

    def log(self, row: Row) -> None:
        """Send one round."""
        self._rounds = row["round"]
        for named in list(self._at_work):
            with self._surviving(named):
                named.send(row)

    def end(self, summary: Mapping[str, Any] | None) -> None:
        """Close all trackers; without a summary the run has stopped before its end."""
        numbers = None if summary is None else summary_numbers(summary)
        while self._at_work:
            named = self._at_work.pop()
            with self._surviving(named):
                named.tracker.close(self._rounds, numbers)

    @contextlib.contextmanager
    def _surviving(self, named: Named) -> Iterator[None]:
        """Whatever a tracker raises, it is the tracker that goes."""
        try:
            yield
        except Exception as error:
            self.failed.append(named.name)
            LOG.warning(
                "warning: %s failed in round %d (%s: %s); the run goes on without it, metrics.jsonl has everything. "
                "Send it again with: %s",
                named.name,
                self._rounds,
                type(error).__name__,
                " ".join(without_password(str(error)).split())[:200],
                named.again.format(path=str(self._path)),
            )
            if named in self._at_work:  # it was opened: what it holds (files, threads, a lock on its run) is let go
                self._at_work.remove(named)
                with contextlib.suppress(Exception):
                    named.tracker.close(self._rounds, None)


def track(run: str | Path | Run, to: Target | Sequence[Target] | None = None) -> None:
    """Send the metrics of a run to trackers, afterwards or once more; what they have already is not sent twice.

    ``to`` are names, mappings with name and parameters, or trackers; without it those of the run's own experiment.
    """
    run = run if isinstance(run, Run) else Run(run)
    given = [] if to is None else list(to) if isinstance(to, list | tuple) else [to]
    experiment = run.experiment
    own = [target for target in given if isinstance(target, Tracker)]
    if given:
        named = [target for target in given if not isinstance(target, Tracker)]
        experiment = make_experiment({**experiment.as_dict(), "track": named})
    trackers = build_trackers(experiment, own)
    if not trackers:
        raise ConfigError(f"{run.path}: its experiment names no tracker; say where to, for example --to tensorboard")
    tracking = Tracking(trackers)
    with locked(run.path):
        finished = (run.path / "summary.json").exists()
        try:
            tracking.begin(run.path, experiment, list(run.metrics))
        except BaseException:
            tracking.end(None)
            raise
        tracking.end(run.summary if finished else None)
    if tracking.failed:
        raise RunError(f"{run.path}: could not be sent to {', '.join(tracking.failed)}; the reason stands above")


def run_facts(path: Path, experiment: Experiment, group: str | None = None) -> RunFacts:
    """What trackers learn of a run. A run that was part of a comparison stays one, however it is gone on with."""
    group = group or read_memory(path).get("group") or (experiment.name if _in_a_comparison(path) else None)
    name = path.absolute().name if group is not None else experiment.name
    config = flatten({key: value for key, value in experiment.as_dict().items() if key != "track"})
    return RunFacts(name, group, path, config)


def _in_a_comparison(path: Path) -> bool:
    try:
        listing = json.loads((path.absolute().parent / "comparison.json").read_bytes())
        return path.absolute().name in listing["variants"].values()
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def _own(tracker: Any) -> Named:
    if not isinstance(tracker, Tracker) or isinstance(tracker, type):
        raise ConfigError(f"trackers: {tracker!r} is no tracker; it needs the methods open, log and close")
    return Named(type(tracker).__name__, tracker, "fedretain.track({path!r}, to=...)")
