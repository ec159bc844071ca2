"""The few numbers of a metrics log that a list of runs shows, read without going through the whole log each time."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, BinaryIO

from fedretain.report.reading import finite

CHUNK = 1 << 20
LONGEST_LINE = 64 << 20
END = 256 << 10
FURTHEST = 16 << 20
_REMEMBERED = 256


@dataclass(frozen=True)
class LogNumbers:
    """Up to where a log was read, and what it said until there."""

    round: int = 0
    accuracy: float | None = None
    forgetting: float | None = None
    seconds: float = 0.0
    problem: str | None = None
    """What stands after the last whole row: a damaged line."""
    cut_off: bool = False
    """Whether the log ends within a line: it is being written, or its writer was killed."""
    offset: int = 0
    before: bytes = field(default=b"", repr=False)
    """The last bytes before the offset: by them a log that was cut back and written anew is known."""


def read_on(file: BinaryIO, known: LogNumbers) -> LogNumbers:
    """Go on reading where an earlier reading ended; a log that was cut back since is read from its start."""
    file.seek(max(known.offset - len(known.before), 0))
    if file.read(len(known.before)) != known.before:
        known = LogNumbers()
        file.seek(0)
    known = replace(known, problem=None, cut_off=False)
    rest = b""
    while chunk := file.read(CHUNK):
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            row = _row(line)
            if row is None or row.get("round") != known.round + 1:
                return replace(known, problem=f"line {known.round + 1} is not the log of round {known.round + 1}")
            known = _with_row(known, row, line)
        if len(rest) > LONGEST_LINE:
            return replace(known, problem=f"line {known.round + 1} does not end within {LONGEST_LINE >> 20} MiB")
    return replace(known, cut_off=bool(rest))


def read_end(file: BinaryIO, size: int, *, forgetting: bool) -> LogNumbers:
    """The last round, accuracy and (if asked for) forgetting, from the end of a finished log. The seconds stay 0."""
    length = END
    while True:
        start = max(size - length, 0)
        file.seek(start)
        *lines, rest = file.read(size - start).split(b"\n")
        found = _last_numbers(lines if start == 0 else lines[1:])
        complete = found.accuracy is not None and (found.forgetting is not None or not forgetting)
        if start == 0 or complete or length >= FURTHEST or found.problem is not None:
            return replace(found, cut_off=bool(rest))
        length *= 4


def _last_numbers(lines: list[bytes]) -> LogNumbers:
    numbers = LogNumbers()
    for line in reversed(lines):
        row = _row(line)
        if row is None:
            return replace(numbers, problem="a line near the end is damaged")
        accuracy, forgetting = finite(row.get("test_accuracy")), finite(row.get("forgetting_by_model"))
        numbers = replace(
            numbers,
            round=max(numbers.round, int(finite(row.get("round")) or 0)),
            accuracy=accuracy if numbers.accuracy is None else numbers.accuracy,
            forgetting=forgetting if numbers.forgetting is None else numbers.forgetting,
        )
        if numbers.accuracy is not None and numbers.forgetting is not None:
            break
    return numbers


def _with_row(known: LogNumbers, row: Mapping[str, Any], line: bytes) -> LogNumbers:
    accuracy, forgetting = finite(row.get("test_accuracy")), finite(row.get("forgetting_by_model"))
    return LogNumbers(
        round=known.round + 1,
        accuracy=known.accuracy if accuracy is None else accuracy,
        forgetting=known.forgetting if forgetting is None else forgetting,
        seconds=known.seconds + (finite(row.get("seconds")) or 0.0),
        offset=known.offset + len(line) + 1,
        before=(line + b"\n")[-_REMEMBERED:],
    )


def _row(line: bytes) -> dict[str, Any] | None:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) else None
