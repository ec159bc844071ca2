"""What a run left in its directory, read back for tables and pictures; nothing here knows of training."""

from __future__ import annotations

import json
import math
import re
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import yaml

from fedretain.errors import RunError

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]

MEASURES = ("classes", "drift", "loss_increase", "fisher")
"""The folders of ``forgetting.measures``."""

_FORGETTING_FILE = re.compile(r"round-(\d+)\.npz")


@dataclass(frozen=True)
class ForgettingRound:
    """Client forgetting of one round.

    F[k, i] = Acc_k(w_{t−1}) − Acc_k(w_t^i): what the local training of client i cost on the data of client k;
    positive means forgetting (Legate et al. 2023, Eq. 5).
    """

    round: int
    models: IntArray
    data: IntArray
    before: FloatArray
    after: FloatArray
    forgetting: FloatArray


@dataclass(frozen=True)
class RunData:
    """One run directory in memory. Forgetting matrices stay on disk until :func:`read_forgetting` asks."""

    path: Path
    config: Mapping[str, Any]
    environment: Mapping[str, Any]
    metrics: tuple[Mapping[str, Any], ...]
    forgetting_files: Mapping[int, Path]
    class_counts: IntArray | None
    class_names: tuple[str, ...]
    summary: Mapping[str, Any] | None
    measure_files: Mapping[str, Mapping[int, Path]] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The experiment's name, or the directory's where it has none."""
        return str(self.config.get("name") or self.path.resolve().name)

    @property
    def seed(self) -> int:
        """The experiment's seed, 0 where the config has none."""
        return int(finite(self.config.get("seed")) or 0)

    @property
    def status(self) -> str:
        """``finished`` (or what the summary says); ``unfinished`` while there is no summary."""
        return "unfinished" if self.summary is None else str(self.summary.get("status", "finished"))

    @property
    def last_round(self) -> int:
        """The last round in the log, 0 before the first."""
        return int(self.metrics[-1]["round"]) if self.metrics else 0

    def series(self, key: str) -> tuple[list[int], list[float]]:
        """The rounds in which a number was measured, and the number; NaN counts as not measured."""
        rounds, values = [], []
        for row in self.metrics:
            value = finite(row.get(key))
            if value is not None:
                rounds.append(int(row["round"]))
                values.append(value)
        return rounds, values

    def headline(self) -> dict[str, float | None]:
        """The numbers of the comparison table: from the summary, or from the log of an unfinished run."""
        summary = self.summary or {}
        final = summary.get("final_accuracy")
        last = finite(final.get("last")) if isinstance(final, Mapping) else None
        _, accuracies = self.series("test_accuracy")
        return {
            "final_accuracy": last if last is not None else (accuracies[-1] if accuracies else None),
            "mean_forgetting": self._total("mean_forgetting", "forgetting_by_model", mean=True),
            "forgettable_examples": self._total("forgettable_examples", "forgettable_examples", mean=True),
            "seconds": self._total("seconds", "seconds"),
            "upload_bytes": self._total("upload_bytes", "upload_bytes"),
            "download_bytes": self._total("download_bytes", "download_bytes"),
        }

    def _total(self, summary_key: str, metric: str, *, mean: bool = False) -> float | None:
        value = finite((self.summary or {}).get(summary_key))
        _, values = self.series(metric)
        if value is not None or not values:
            return value
        return math.fsum(values) / (len(values) if mean else 1)


def finite(value: object) -> float | None:
    """The number as a float, or None for anything that is no finite number."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return float(value)


def client_values(row: Mapping[str, Any], key: str) -> list[Any]:
    """What a row of the log holds for its single participants under ``clients``; empty where that was not measured."""
    clients = row.get("clients")
    values = clients.get(key) if isinstance(clients, Mapping) else None
    return values if isinstance(values, list) else []


def read_run(path: str | Path, problems: list[str] | None = None) -> RunData:
    """Read a run directory; only ``config.yaml`` must be there, whatever else is missing was not measured.

    A damaged file is an error; with a list for ``problems`` it is named there, and the rest is read.
    """
    path = Path(path)
    if not path.is_dir():
        raise RunError(f"no run directory at {path}: give the directory that `fedretain run --out` wrote")
    if not (path / "config.yaml").is_file():
        raise RunError(
            f"{path} is no run directory, it holds no config.yaml: give the directory that `fedretain run --out` wrote"
        )
    try:
        class_counts, class_names = _read_partition(path / "partition.npz")
    except RunError as error:
        _note(error, problems)
        class_counts, class_names = None, ()
    return RunData(
        path=path,
        config=_read_config(path / "config.yaml"),
        environment=_read_json(path / "environment.json", problems) or {},
        metrics=_read_metrics(path / "metrics.jsonl", problems),
        forgetting_files=_find_forgetting(path / "forgetting", problems),
        class_counts=class_counts,
        class_names=class_names,
        summary=_read_json(path / "summary.json", problems),
        measure_files={name: _find_forgetting(path / name, problems) for name in MEASURES},
    )


def _note(error: RunError, problems: list[str] | None) -> None:
    if problems is None:
        raise error
    problems.append(str(error))


def read_forgetting(run: RunData, round: int) -> ForgettingRound:
    """The forgetting matrix of one round (see :class:`ForgettingRound`)."""
    if round not in run.forgetting_files:
        measured = ", ".join(map(str, run.forgetting_files)) or "none"
        raise RunError(f"{run.path}: forgetting was not measured in round {round} (measured: {measured})")
    file = run.forgetting_files[round]
    arrays = _read_arrays(file, ("models", "data", "before", "after", "forgetting"))
    missing = sorted({"models", "data", "after", "forgetting", "before"} - arrays.keys())
    if missing:
        raise RunError(f"{file}: no array {', '.join(missing)}; delete the file or repeat the run")
    models, data = arrays["models"].astype(np.int64), arrays["data"].astype(np.int64)
    shapes = (arrays["before"].shape, arrays["after"].shape, arrays["forgetting"].shape)
    if shapes != ((len(data),), (len(data), len(models)), (len(data), len(models))):
        raise RunError(
            f"{file}: before, after, forgetting have the shapes {shapes}, which do not fit "
            f"{len(data)} data clients and {len(models)} models; delete the file or repeat the run"
        )
    before, after, forgetting = (arrays[k].astype(np.float64) for k in ("before", "after", "forgetting"))
    return ForgettingRound(round, models, data, before, after, forgetting)


def read_measure(run: RunData, measure: str, names: tuple[str, ...]) -> dict[int, dict[str, npt.NDArray[Any]]]:
    """The named arrays of one of ``forgetting.measures``, by round; empty when it was not measured."""
    found = {}
    for round, file in run.measure_files.get(measure, {}).items():
        found[round] = _read_arrays(file, names)
        if missing := [name for name in names if name not in found[round]]:
            raise RunError(f"{file}: no array {', '.join(missing)}; delete the file or repeat the run")
    return found


def _read_text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise RunError(f"{file} cannot be read: {error}") from error


def _read_config(file: Path) -> Mapping[str, Any]:
    try:
        config = yaml.safe_load(_read_text(file))
    except yaml.YAMLError as error:
        raise RunError(f"{file} is not YAML: {error}; restore the file or repeat the run") from error
    if not isinstance(config, dict):
        raise RunError(f"{file} holds no mapping of keys to values; restore the file or repeat the run")
    return config


def _read_json(file: Path, problems: list[str] | None) -> Mapping[str, Any] | None:
    if not file.is_file():
        return None
    try:
        content = json.loads(_read_text(file))
    except ValueError as error:
        _note(RunError(f"{file} is not JSON: {error}; delete the file or repeat the run"), problems)
        return None
    if not isinstance(content, dict):
        _note(RunError(f"{file} holds no JSON object; delete the file or repeat the run"), problems)
        return None
    return content


def _read_metrics(file: Path, problems: list[str] | None) -> tuple[Mapping[str, Any], ...]:
    """One object a line, in the order of rounds; a last line cut off by a crash is left out."""
    if not file.is_file():
        return ()
    rows: dict[int, Mapping[str, Any]] = {}
    lines = _read_text(file).split("\n")
    last = max((n for n, line in enumerate(lines) if line.strip()), default=-1)
    for number, line in enumerate(lines):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            rows[int(row["round"])] = row
        except (ValueError, KeyError, TypeError) as error:
            if number == last:
                continue
            reason = f"{file}, line {number + 1}: not a JSON object with a round ({error})"
            _note(RunError(f"{reason}; remove the line or repeat the run"), problems)
            break
    return tuple(rows[round] for round in sorted(rows))


def _find_forgetting(folder: Path, problems: list[str] | None) -> Mapping[int, Path]:
    if not folder.is_dir():
        return {}
    matched = ((_FORGETTING_FILE.fullmatch(file.name), file) for file in folder.iterdir())
    found = dict(sorted((int(match[1]), file) for match, file in matched if match))
    if problems is None:
        return found  # a damaged one is an error when it is read
    halves = [round for round, file in found.items() if not zipfile.is_zipfile(file)]
    problems += [f"{found[round]} is damaged: delete the file or repeat the run" for round in halves]
    return {round: file for round, file in found.items() if round not in halves}


def _read_partition(file: Path) -> tuple[IntArray | None, tuple[str, ...]]:
    if not file.is_file():
        return None, ()
    arrays = _read_arrays(file, ("class_counts", "class_names"))
    if "class_counts" not in arrays:
        return None, ()
    counts = arrays["class_counts"].astype(np.int64)
    if counts.ndim != 2:
        raise RunError(f"{file}: class_counts must be [clients, classes], not of shape {counts.shape}")
    return counts, tuple(str(name) for name in arrays.get("class_names", ()))


def _read_arrays(file: Path, names: tuple[str, ...]) -> dict[str, npt.NDArray[Any]]:
    try:
        with np.load(file, allow_pickle=False) as archive:
            return {name: archive[name] for name in names if name in archive.files}
    except Exception as error:  # NumPy and zipfile raise half a dozen unrelated types for a damaged archive
        raise RunError(f"{file} cannot be read: {error}; delete the file or repeat the run") from error
