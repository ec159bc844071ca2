"""The metrics of a run: one JSON object a round, appended as it happens, read back as a table."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, overload

Row = Mapping[str, Any]


class Metrics(Sequence[Row]):
    """A table of rounds: ``metrics[-1]`` is a row, ``metrics["test_accuracy"]`` a column (None where not measured)."""

    def __init__(self, rows: Sequence[Row]) -> None:
        self._rows = list(rows)

    @overload
    def __getitem__(self, key: int) -> Row: ...
    @overload
    def __getitem__(self, key: slice) -> Metrics: ...
    @overload
    def __getitem__(self, key: str) -> list[Any]: ...
    def __getitem__(self, key: int | slice | str) -> Row | Metrics | list[Any]:
        if isinstance(key, str):
            if self._rows and key not in self.columns:
                raise KeyError(f"{key!r} was not measured; columns: {', '.join(self.columns)}")
            return [row.get(key) for row in self._rows]
        return Metrics(self._rows[key]) if isinstance(key, slice) else self._rows[key]

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[Row]:
        return iter(self._rows)

    def __repr__(self) -> str:
        return f"Metrics({len(self)} rounds: {', '.join(self.columns)})"

    @property
    def columns(self) -> list[str]:
        """Everything measured in any round, but for the per-client lists."""
        return list(dict.fromkeys(key for row in self._rows for key in row if key != "clients"))

    def to_pandas(self) -> Any:
        """A pandas DataFrame (needs pandas)."""
        import pandas

        return pandas.DataFrame([{k: row.get(k) for k in self.columns} for row in self._rows])


def read_rows(path: Path) -> list[Row]:
    """The whole rows of a metrics file: rounds 1, 2, 3 … up to the first line that is half-written or out of order."""
    rows: list[Row] = []
    for line in _lines(path):
        row = _parse(line)
        if row is None or row.get("round") != len(rows) + 1:
            break
        rows.append(row)
    return rows


def keep_rows(path: Path, count: int) -> None:
    """Cut a metrics file back to its first rows; they are kept byte for byte."""
    if not path.exists():
        path.touch()
    with path.open("r+b") as file:
        file.truncate(sum(len(line) for line in _lines(path)[:count]))
        os.fsync(file.fileno())


def _lines(path: Path) -> list[bytes]:
    return path.read_bytes().splitlines(keepends=True) if path.exists() else []


def _parse(line: bytes) -> dict[str, Any] | None:
    try:
        row = json.loads(line)
    except ValueError:
        return None
    return row if isinstance(row, dict) and line.endswith(b"\n") else None
