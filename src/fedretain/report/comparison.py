"""Runs side by side: grouped over seeds, named by what differs between them, summarised as mean ± std."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from fedretain.errors import RunError
from fedretain.report.reading import RunData, read_run

# A seed repeats an experiment, a name only labels it: neither makes it another experiment.
_NOT_SETTINGS = frozenset({"seed", "name"})


class Spread(NamedTuple):
    """Mean and sample standard deviation (n − 1) over seeds; no deviation for a single run."""

    mean: float
    std: float | None
    runs: int


@dataclass(frozen=True)
class Column:
    """One number of the comparison table: where it stands, its unit, and which end is the good one."""

    key: str
    title: str
    higher_is_better: bool
    scale: float = 1.0
    digits: int = 1

    def text(self, spread: Spread | None) -> str:
        """``85.3 ± 3.7`` in the column's unit; ``–`` when nothing was measured."""
        if spread is None:
            return "–"
        mean = f"{spread.mean * self.scale:.{self.digits}f}"
        return mean if spread.std is None else f"{mean} ± {spread.std * self.scale:.{self.digits}f}"


COLUMNS = (
    Column("final_accuracy", "final accuracy (%)", True, scale=100),
    Column("mean_forgetting", "mean client forgetting (points)", False, scale=100),
    Column("forgettable_examples", "forgettable examples (a round)", False),
    Column("seconds", "seconds training", False),
    Column("upload_bytes", "sent up (MB)", False, scale=1e-6, digits=2),
    Column("download_bytes", "sent down (MB)", False, scale=1e-6, digits=2),
)


@dataclass(frozen=True)
class Group:
    """The runs of one setting, by seed, and the label that tells it from the other settings."""

    label: str
    runs: tuple[RunData, ...]
    settings: Mapping[str, str]

    @property
    def seeds(self) -> list[int]:
        """The seeds of the group's runs."""
        return [run.seed for run in self.runs]


def comparison_rows(runs: Sequence[str | Path | RunData]) -> list[dict[str, Any]]:
    """The comparison table: one row for each setting, over its seeds.

    Keys of a row: ``label``, ``seeds``, ``runs`` (paths), ``unfinished`` (how many have no summary
    yet), ``best`` (keys of the columns this row wins), and for each of :data:`COLUMNS` its :class:`Spread`,
    or None.
    """
    rows: list[dict[str, Any]] = []
    for group in group_runs(runs):
        headlines = [run.headline() for run in group.runs]
        rows.append(
            {
                "label": group.label,
                "seeds": group.seeds,
                "runs": [run.path for run in group.runs],
                "unfinished": sum(run.summary is None for run in group.runs),
                **{column.key: spread([line[column.key] for line in headlines]) for column in COLUMNS},
            }
        )
    winners = {column.key: _winning_mean(column, rows) for column in COLUMNS}
    for row in rows:
        row["best"] = frozenset(
            key
            for key, mean in winners.items()
            if row[key] is not None and not row["unfinished"] and row[key].mean == mean
        )
    return rows


def _winning_mean(column: Column, rows: Sequence[Mapping[str, Any]]) -> float | None:
    """The best mean of the finished settings, or None when there is no contest: one value, or all alike."""
    finished = [row[column.key] for row in rows if not row["unfinished"]]
    means: list[float] = [over_seeds.mean for over_seeds in finished if over_seeds is not None]
    if len(set(means)) < 2:
        return None
    return max(means) if column.higher_is_better else min(means)


def spread(values: Sequence[float | None]) -> Spread | None:
    """Mean and sample standard deviation of the values that were measured."""
    known = [value for value in values if value is not None and math.isfinite(value)]
    if not known:
        return None
    return Spread(statistics.fmean(known), statistics.stdev(known) if len(known) > 1 else None, len(known))


def group_runs(runs: Sequence[str | Path | RunData]) -> list[Group]:
    """Runs whose configs are equal except for seed and name belong together; order of first appearance."""
    loaded: dict[Path, RunData] = {}
    for run in runs:
        data = run if isinstance(run, RunData) else read_run(run)
        loaded.setdefault(data.path.resolve(), data)
    if not loaded:
        raise RunError("no run to report: give at least one run directory")
    gathered: dict[str, list[RunData]] = {}
    for data in loaded.values():
        settings = {key: value for key, value in data.config.items() if key not in _NOT_SETTINGS}
        gathered.setdefault(json.dumps(settings, sort_keys=True, default=str), []).append(data)
    groups = [sorted(members, key=lambda run: run.seed) for members in gathered.values()]
    differences = _differences([members[0].config for members in groups])
    return [
        Group(_label(settings, members[0]), tuple(members), settings)
        for members, settings in zip(groups, differences, strict=True)
    ]


def plain_loss_first(groups: Sequence[Group]) -> list[Group]:
    """Settings that differ in nothing but the loss beside each other, plain cross-entropy first; else as listed.

    So the heatmaps show FedAvg above FedAvg+WSM (Legate et al. 2023, Fig. 3), however the runs were listed.
    """
    elsewhere = [
        tuple((key, value) for key, value in group.settings.items() if key.split(".")[0] != "loss") for group in groups
    ]
    places = {settings: place for place, settings in reversed(list(enumerate(elsewhere)))}

    def changes_loss(group: Group) -> bool:
        loss = group.runs[0].config.get("loss")
        return (loss.get("name") if isinstance(loss, Mapping) else loss) not in ("ce", None)

    order = sorted(zip(groups, elsewhere, strict=True), key=lambda pair: (places[pair[1]], changes_loss(pair[0])))
    return [group for group, _ in order]


def _label(settings: Mapping[str, str], run: RunData) -> str:
    given = [f"{key}={value}" for key, value in settings.items() if value != "unset"]
    unset = [f"{key} unset" for key in settings]
    return ", ".join(given or unset) or run.name


def _differences(configs: Sequence[Mapping[str, Any]]) -> list[dict[str, str]]:
    """For each config its values of the keys in which the configs differ, ``unset`` where it lacks one."""
    # A chain of methods is one value: positions in a list mean nothing when another run has no list.
    whole = {key for config in configs for key, value in config.items() if isinstance(value, list)}
    flat = [_flatten(config, whole) for config in configs]
    keys = list(dict.fromkeys(key for config in flat for key in config))
    differing = [key for key in keys if len({config.get(key, "unset") for config in flat}) > 1]
    return [{key: config.get(key, "unset") for key in differing} for config in flat]


def _flatten(config: Mapping[str, Any], whole: set[str], prefix: str = "") -> dict[str, str]:
    """Dotted keys and their values as text; the name (or kind) of a part stands under the part's own key."""
    flat: dict[str, str] = {}
    for key, value in config.items():
        path = f"{prefix}{key}"
        if not prefix and key in _NOT_SETTINGS:
            continue
        if isinstance(value, Mapping) and path not in whole:
            flat |= _flatten(value, whole, f"{path}.")
        elif prefix and key in ("name", "kind") and prefix[:-1] not in flat:
            flat[prefix[:-1]] = setting_text(value)
        else:
            flat[path] = setting_text(value)
    return flat


def setting_text(value: Any) -> str:
    """A config value as a reader would write it: ``fedprox(mu=0.1) + fedwavg``, ``0.1``, ``none``."""
    if isinstance(value, list):
        parts_are_named = value and all(isinstance(part, Mapping) and "name" in part for part in value)
        return " + ".join(map(setting_text, value)) if parts_are_named else f"[{', '.join(map(setting_text, value))}]"
    if isinstance(value, Mapping):
        parameters = ", ".join(f"{key}={setting_text(part)}" for key, part in value.items() if key != "name")
        name = str(value.get("name", ""))
        return f"{name}({parameters})" if parameters else name
    if value is None:
        return "none"
    return str(value).lower() if isinstance(value, bool) else str(value)
