"""The table of ratios: every runner against the plain PyTorch loop and the best peer of the same work and run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.table import Table

from benchmarks.measuring import Measurement
from benchmarks.runners import REFERENCE, RUNNERS


def ratios(measurements: Sequence[Measurement]) -> dict[tuple[str, str], tuple[float | None, float | None]]:
    """By work and runner: (plain ÷ this, best peer ÷ this), in seconds a round. Above 1 means faster than that one.

    The best peer is the fastest runner that is not fedretain. A ratio is None where there is nothing to compare with.
    """
    found = {}
    for m in measurements:
        peers = {p.runner: p.seconds_per_round for p in measurements if p.work == m.work and not RUNNERS[p.runner].ours}
        plain, best = peers.get(REFERENCE), min(peers.values(), default=None)
        to_plain, to_best = (None if other is None else other / m.seconds_per_round for other in (plain, best))
        found[m.work, m.runner] = (to_plain, to_best)
    return found


def table_of(
    measurements: Sequence[Measurement],
    failures: Mapping[tuple[str, str], str],
    notes: Mapping[str, str] | None = None,
) -> Table:
    """One row for every work and runner, the failed ones with their reason; ``notes`` stand beside a work's name."""
    table = Table(
        "work",
        "runner",
        "seconds a round",
        "spread",
        "plain ÷ this",
        "best peer ÷ this",
        "to first round (s)",
        "peak RSS (MB)",
    )
    compared, rows = ratios(measurements), {(m.work, m.runner): m for m in measurements}
    works = list(dict.fromkeys(work for work, _ in [*rows, *failures]))
    for work in works:
        told = f"{work} ({notes[work]})" if notes and work in notes else work
        for runner in RUNNERS:
            if m := rows.get((work, runner)):
                cells = ["–" if ratio is None else f"{ratio:.2f}" for ratio in compared[work, runner]]
                numbers = (f"{m.seconds_per_round:.3f}", f"{m.spread:.3f}", *cells)
                table.add_row(told, runner, *numbers, f"{m.startup_seconds:.1f}", f"{m.peak_rss_mb:.0f}")
            elif (work, runner) in failures:
                table.add_row(told, runner, "failed", *["–"] * 5)
        table.add_section()
    return table
