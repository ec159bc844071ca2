"""Every summary of a run's curves side by side: accuracies, both averages of forgetting, rounds to an accuracy."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from fedretain.forgetting import accuracy_summaries, rounds_to_relative_accuracy
from fedretain.report.comparison import Column, Group, Spread, group_runs, spread
from fedretain.report.reading import RunData, finite

SUMMARIES = (
    Column("last", "accuracy after the last round (%)", True, scale=100),
    Column("mean_last_100", "mean accuracy of the last 100 rounds (%)", True, scale=100),
    Column("top", "top accuracy (%)", True, scale=100),
    Column("average", "average accuracy over all rounds (%)", True, scale=100),
    Column("by_model", "client forgetting by model (points)", False, scale=100),
    Column("by_data", "client forgetting by data (points)", False, scale=100),
    Column("measuring_share", "time spent measuring (%)", False, scale=100),
)
EVENTS = Column("forgetting_events", "forgetting events", False, digits=0)

# What the FedSGD run of "the same setting" may differ in: how it trains, and what is measured of it.
_SAME_SETTING = ("seed", "rounds", "participation", "data", "partition", "model")


class Reached(NamedTuple):
    """R_a over the seeds of a setting: the rounds it took those that arrived, and how many there are."""

    spread: Spread | None
    runs: int
    within: int

    @property
    def text(self) -> str:
        """``12.5 ± 3.5``; ``12.0 (1 of 2 seeds)`` where some arrived; ``not within 60`` where none did."""
        if self.spread is None:
            return f"not within {self.within}"
        shown = Column("", "", False).text(self.spread) if self.runs > 1 else f"{self.spread.mean:.0f}"
        return shown if self.spread.runs == self.runs else f"{shown} ({self.spread.runs} of {self.runs} seeds)"


def summary_rows(runs: Sequence[str | Path | RunData]) -> list[dict[str, Any]]:
    """One row a setting: ``label``, a :class:`Spread` (or None) for each of :data:`SUMMARIES` and for ``EVENTS``.

    ``reference`` is the accuracy that the targets are shares of, in words, and ``rounds_to`` maps each target a to its
    :class:`Reached`; empty where no accuracy was measured.
    """
    groups = group_runs(runs)
    members = [run for group in groups for run in group.runs]
    targets = sorted({share for run in members for share in _targets(run)})
    rows = []
    for group in groups:
        known = [run_summaries(run) for run in group.runs]
        over = {column.key: spread([one[column.key] for one in known]) for column in (*SUMMARIES, EVENTS)}
        references = [_reference(run, members) for run in group.runs]
        row: dict[str, Any] = {"label": group.label, **over, "reference": _reference_words(references), "rounds_to": {}}
        if over["last"] is not None:
            row["rounds_to"] = {share: _reached(group, share, [value for value, _ in references]) for share in targets}
        rows.append(row)
    return rows


def run_summaries(run: RunData) -> dict[str, float | None]:
    """The summaries of one run, from its log; None for what was not measured."""
    curve = list(zip(*run.series("test_accuracy"), strict=True))
    accuracies = accuracy_summaries(curve, last_round=curve[-1][0]) if curve else None
    means = {
        key: statistics.fmean(values) if (values := run.series(f"forgetting_{key}")[1]) else None
        for key in ("by_model", "by_data")
    }
    events = run.series("forgettable_examples")[1]
    spent = run_cost(run)
    found: dict[str, float | None] = dict.fromkeys(("last", "mean_last_100", "top", "average", "measuring_share"))
    if spent is not None and sum(spent.values()) > 0:
        found["measuring_share"] = spent["measuring"] / sum(spent.values())
    return {**found, **(accuracies or {}), **means, EVENTS.key: sum(events) if events else None}


def run_cost(run: RunData) -> dict[str, float] | None:
    """Seconds of all rounds spent on training, on testing the global model and on measuring; None before round 1."""
    keys = {"training": "seconds", "evaluating": "evaluate_seconds", "measuring": "measure_seconds"}
    series = {kind: run.series(key)[1] for kind, key in keys.items()}
    return {kind: sum(values) for kind, values in series.items()} if all(series.values()) else None


class TrainingPair(NamedTuple):
    """Forgetting events of one setting trained both ways (fedwavg-paper, Table 1)."""

    label: str
    centralised: Spread
    federated: Spread

    @property
    def increase(self) -> float | None:
        """How much more federated training forgets, in per cent of centralised training; None if that forgets none."""
        return 100 * (self.federated.mean / self.centralised.mean - 1) if self.centralised.mean else None

    @property
    def texts(self) -> tuple[str, str, str]:
        """Centralised, federated, increase, as a table shows them."""
        more = "–" if self.increase is None else f"{self.increase:+.0f} %"
        return EVENTS.text(self.centralised), EVENTS.text(self.federated), more


def training_pairs(runs: Sequence[str | Path | RunData]) -> list[TrainingPair]:
    """Settings that were trained federated and centralised, with the forgetting events of both summed over rounds."""
    sides: dict[str, dict[str, Group]] = {}
    for group in group_runs(runs):
        others = ", ".join(f"{key}={value}" for key, value in group.settings.items() if key != "training")
        sides.setdefault(others, {})[str(group.runs[0].config.get("training", "federated"))] = group
    pairs = []
    for label, side in sides.items():
        if side.keys() != {"centralised", "federated"}:
            continue
        events = {kind: spread([run_summaries(run)[EVENTS.key] for run in group.runs]) for kind, group in side.items()}
        centralised, federated = events["centralised"], events["federated"]
        if centralised is not None and federated is not None:
            pairs.append(TrainingPair(label or side["federated"].runs[0].name, centralised, federated))
    return pairs


def _targets(run: RunData) -> list[float]:
    evaluate = run.config.get("evaluate")
    given = evaluate.get("targets") if isinstance(evaluate, Mapping) else None
    return [value for share in given if (value := finite(share))] if isinstance(given, list) else []


def _reference(run: RunData, members: Sequence[RunData]) -> tuple[float, str]:
    """What the targets are shares of, and where it is from: the file, the FedSGD run of the setting, or nothing."""
    evaluate = run.config.get("evaluate")
    given = finite(evaluate.get("reference")) if isinstance(evaluate, Mapping) else None
    if given is not None:
        return given, "given"
    for other in members:
        if other.summary is not None and _is_fedsgd(other) and _setting(other) == _setting(run):
            final = run_summaries(other)["last"]
            if final:
                return final, "FedSGD"
    return 1.0, "none"


def _is_fedsgd(run: RunData) -> bool:
    method = run.config.get("method")
    return (method.get("name") if isinstance(method, Mapping) else method) == "fedsgd"


def _setting(run: RunData) -> str:
    kept = {key: run.config.get(key) for key in _SAME_SETTING}
    return json.dumps(kept, sort_keys=True, default=str)


def _reference_words(references: Sequence[tuple[float, str]]) -> str:
    values = sorted({round(100 * value, 1) for value, _ in references})
    sources = " or ".join(dict.fromkeys(source for _, source in references))
    told = f"{values[0]:.1f}" if len(values) == 1 else f"{values[0]:.1f} to {values[-1]:.1f}"
    return f"{told} % ({sources})"


def _reached(group: Group, share: float, references: Sequence[float]) -> Reached:
    rounds = []
    for run, reference in zip(group.runs, references, strict=True):
        curve = list(zip(*run.series("test_accuracy"), strict=True))
        rounds.append(rounds_to_relative_accuracy(curve, share, reference))
    return Reached(spread(rounds), len(group.runs), max(run.last_round for run in group.runs))
