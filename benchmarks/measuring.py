"""The same measurement for every runner: a process of its own, watched from outside."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import statistics
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks.runners import ROOT

SAMPLE_SECONDS = 0.2
"""How often memory is looked at. The kernel keeps each process's own peak, so that none between two looks is lost."""

Weights = list[dict[str, np.ndarray]]


class RunnerFailed(Exception):
    """A runner could not be installed, crashed, or did other work; the message is the reason."""


class Turn(NamedTuple):
    """One process of a runner: its timed rounds, and what it took to get there."""

    seconds: list[float]
    startup_seconds: float
    peak_rss_mb: float
    weights: Weights


@dataclass(frozen=True)
class Measurement:
    """A runner on a work over all its turns. The fields are the keys of the JSON file."""

    work: str
    runner: str
    seconds_per_round: float
    spread: float
    startup_seconds: float
    peak_rss_mb: float


def measure(command: Sequence[str], out: Path, *, limit: float = 3600) -> Turn:
    """Run a runner's process to its end; ``out`` is the folder that it leaves its final parameters in."""
    with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryFile("w+") as errors:
        started = time.perf_counter()
        process = subprocess.Popen(command, cwd=ROOT, stdout=output, stderr=errors, start_new_session=True)
        samples: list[tuple[float, float]] = []
        try:
            while True:
                samples.append((time.perf_counter(), tree_peak_mb(process.pid)))
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(SAMPLE_SECONDS)
                    break
                if time.perf_counter() - started > limit:
                    raise RunnerFailed(f"not finished after {limit:.0f} s")
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        said = [_text(stream) for stream in (output, errors)]
    line = last_report(said[0])
    if process.returncode or line is None:
        raise RunnerFailed(reason(process.returncode, *said))
    within = [megabytes for at, megabytes in samples if at <= line["last_round_at"]]
    weights = [_load(path) for path in sorted(out.glob("weights-*.npz"), key=lambda p: int(p.stem.split("-")[1]))]
    return Turn(line["seconds"], line["first_round_at"] - started, max(within), weights)


def summarise(work: str, runner: str, turns: Sequence[Turn]) -> Measurement:
    """The median round; the spread is the range between the quartiles.

    Start-up is the best of the turns (the first one also warms the disk's cache), memory the worst.
    """
    seconds = [value for turn in turns for value in turn.seconds]
    low, middle, high = statistics.quantiles(seconds, n=4, method="inclusive") if len(seconds) > 1 else seconds * 3
    startup, peak = min(turn.startup_seconds for turn in turns), max(turn.peak_rss_mb for turn in turns)
    return Measurement(work, runner, middle, high - low, startup, peak)


def difference(one: Weights, other: Weights) -> float:
    """The largest difference of any parameter, over all trainings; infinite when they are not of the same models."""
    if [sorted(model) for model in one] != [sorted(model) for model in other]:
        return float("inf")
    return max(
        float(np.abs(a[name] - b[name]).max()) if a[name].shape == b[name].shape else float("inf")
        for a, b in zip(one, other, strict=True)
        for name in a
    )


def last_report(text: str) -> dict[str, Any] | None:
    """The line that ``Watch.report`` printed, whatever a framework printed around it."""
    for line in reversed(text.splitlines()):
        with contextlib.suppress(ValueError):
            found = json.loads(line)
            if isinstance(found, dict) and "last_round_at" in found:
                return found
    return None


def reason(status: int, output: str, errors: str) -> str:
    """Why a process failed: the last thing that it said."""
    lines = [line.strip() for line in (errors + "\n" + output).splitlines() if line.strip()]
    said = [line.strip() for line in errors.splitlines() if line.strip()] or lines or ["it said nothing"]
    return f"status {status}: {said[-1][:300]}"


def tree_peak_mb(root: int) -> float:
    """The peak resident memory of a process and its living descendants, added up; shared pages count in each.

    From /proc: VmHWM of every process whose chain of parents leads to ``root``.
    """
    return sum(_peak_kb(pid) for pid in _tree(root)) / 1024


def _tree(root: int) -> Iterator[int]:
    children: dict[int, list[int]] = {}
    for entry in os.scandir("/proc"):
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                fields = Path(entry.path, "stat").read_text().rpartition(")")[2].split()
                children.setdefault(int(fields[1]), []).append(int(entry.name))
    waiting = [root]
    while waiting:
        pid = waiting.pop()
        yield pid
        waiting += children.get(pid, [])


def _peak_kb(pid: int) -> int:
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1])
    return 0


def _text(stream: Any) -> str:
    stream.seek(0)
    return str(stream.read())


def _load(path: Path) -> dict[str, np.ndarray]:
    with np.load(path) as arrays:
        return {name: arrays[name] for name in arrays.files}
