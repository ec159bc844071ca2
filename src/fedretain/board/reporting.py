"""The report of chosen runs as the board shows it: the same sections and figures as in report.html, as JSON."""

from __future__ import annotations

import hashlib
import json
import logging
import threading
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

from fedretain.board.folders import links_out
from fedretain.board.listing import RunEntry
from fedretain.report import Report, RunData, make_report, read_run
from fedretain.report.figures import escape
from fedretain.report.page import lay_out

LOG = logging.getLogger("fedretain")

KEPT = 8
"""How many finished reports stay in memory."""


class Drawn(NamedTuple):
    """A report as JSON, and the tag of what it was drawn from."""

    tag: str
    content: bytes


class Reporter:
    """Draws reports of runs; one at a time, and not twice from the same files."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._lock = threading.Lock()
        self._kept: OrderedDict[str, Drawn] = OrderedDict()

    @staticmethod
    def tag(entries: Sequence[RunEntry], missing: Sequence[str]) -> str:
        """Changes when the runs' files or states change."""
        facts = [list(missing), *([entry.version, entry.shown()] for entry in entries)]
        return hashlib.blake2b(json.dumps(facts).encode(), digest_size=12).hexdigest()

    def draw(self, entries: Sequence[RunEntry], missing: Sequence[str] = ()) -> Drawn:
        """The report of these runs; those that cannot be read are named with the reason and left out."""
        tag = self.tag(entries, missing)
        with self._lock:
            if tag not in self._kept:
                self._kept[tag] = Drawn(tag, self._content(entries, missing))
                while len(self._kept) > KEPT:
                    self._kept.popitem(last=False)
            return self._kept[tag]

    def _content(self, entries: Sequence[RunEntry], missing: Sequence[str]) -> bytes:
        problems = [f"{place}: no longer there" for place in missing]
        loaded: dict[str, RunData] = {}
        for entry in entries:
            run = self._load(entry, problems)
            if run is not None:
                loaded[entry.id] = run
        report = self._report(loaded, problems)
        if not loaded:
            report = report._replace(title=entries[0].id if len(entries) == 1 else f"{len(entries)} runs")
        html, figures = lay_out(report.sections)
        return json.dumps(
            {
                "title": report.title,
                "html": report.introduction + html,
                "figures": figures,
                "problems": problems,
                "runs": [entry.shown() for entry in entries],
            }
        ).encode()

    def _load(self, entry: RunEntry, problems: list[str]) -> RunData | None:
        if entry.status == "unreadable":
            problems += [f"{entry.id}: {problem}" for problem in entry.problems]
            return None
        found: list[str] = []
        try:
            found += [f"{name} is a link out of the board's folder" for name in links_out(entry.folder, self.root)]
            run = None if found else read_run(entry.folder, found)
        except Exception as error:  # whatever a damaged file makes a parser raise, the other runs are shown
            problems.append(_told(entry.id, entry.folder, error))
            return None
        problems += [_told(entry.id, entry.folder, problem) for problem in found]
        return run

    def _report(self, runs: dict[str, RunData], problems: list[str]) -> Report:
        """All runs that can be drawn; what only fails while drawing is found by drawing each run alone."""
        try:
            return self._made(runs)
        except Exception:
            sound = {}
            for place, run in runs.items():
                try:
                    self._made({place: run})
                except Exception as error:
                    LOG.warning("board: %s cannot be drawn (%s: %s)", place, type(error).__name__, error)
                    problems.append(_told(place, run.path, error))
                else:
                    sound[place] = run
            return self._made(sound)

    def _made(self, runs: dict[str, RunData]) -> Report:
        if not runs:
            return Report("", "", [])
        places = {run.path: place for place, run in runs.items()}

        def link(run: RunData) -> str:
            place = places[run.path]
            return f'<a href="/run/{quote(place)}">{escape(place)}</a>'

        return make_report(list(runs.values()), link)


def _told(place: str, folder: Path, problem: Any) -> str:
    """A problem with the run's place in the list instead of its path on this machine."""
    words = str(problem).replace(f"{folder}/", "").replace(str(folder), place) or type(problem).__name__
    return f"{place}: {words}"
