"""``python -m benchmarks [--json FILE]``: every runner on every work, taking turns, in one run.

Ratios are what counts: the runners of a work alternate, so that a busy machine slows them alike.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.runners import RUNNERS
from benchmarks.works import WORKS


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--json", type=Path, help="write the measurements here")
    parser.add_argument("--work", choices=sorted(WORKS), action="append", help="only this work (may be repeated)")
    parser.add_argument("--rounds", type=int, default=3, help="timed rounds per turn")
    parser.add_argument("--turns", type=int, default=2, help="how often the runners alternate")
    options = parser.parse_args()
    results = []
    for work in options.work or WORKS:
        taken: dict[str, list[dict[str, Any]]] = {runner: [] for runner in RUNNERS}
        for _ in range(options.turns):
            for runner in RUNNERS:
                command = [sys.executable, "-m", "benchmarks.runners", runner, work, str(options.rounds)]
                done = subprocess.run(command, check=True, capture_output=True, text=True)
                taken[runner].append(json.loads(done.stdout))
        results += [summary(work, runner, turns) for runner, turns in taken.items()]
    show(results)
    if options.json:
        options.json.write_text(json.dumps(results, indent=2) + "\n")


def summary(work: str, runner: str, turns: list[dict[str, Any]]) -> dict[str, Any]:
    """The median round; the spread is the range between the quartiles."""
    seconds = sorted(value for turn in turns for value in turn["seconds"])
    low, middle, high = statistics.quantiles(seconds, n=4) if len(seconds) > 1 else seconds * 3
    return {
        "work": work,
        "runner": runner,
        "seconds_per_round": middle,
        "spread": high - low,
        "startup_seconds": min(turn["startup_seconds"] for turn in turns),
        "peak_rss_mb": max(turn["peak_rss_mb"] for turn in turns),
    }


def show(results: list[dict[str, Any]]) -> None:
    """A ratio above 1 means faster than plain PyTorch."""
    plain = {r["work"]: r["seconds_per_round"] for r in results if r["runner"] == "plain-pytorch"}
    table = Table(
        "work", "runner", "seconds a round", "spread", "ratio to plain", "to first round (s)", "peak RSS (MB)"
    )
    for r in results:
        ratio = plain[r["work"]] / r["seconds_per_round"]
        numbers = (f"{r['seconds_per_round']:.3f}", f"{r['spread']:.3f}", f"{ratio:.2f}")
        table.add_row(r["work"], r["runner"], *numbers, f"{r['startup_seconds']:.1f}", f"{r['peak_rss_mb']:.0f}")
    Console(width=110).print(table)


if __name__ == "__main__":
    main()
