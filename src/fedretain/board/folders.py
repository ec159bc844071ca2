"""Finding run directories below a folder: bounded, and no link leads out of it."""

from __future__ import annotations

import os
import stat
from collections import deque
from collections.abc import Iterator, Set
from pathlib import Path
from typing import NamedTuple

MOST_FOLDERS = 20_000
DEEPEST = 8

_NOT_SEARCHED = frozenset({"node_modules", "__pycache__", "site-packages"})
# A config.yaml alone may belong to anything; beside one of these it is a run's.
_BESIDE_CONFIG = frozenset({".lock", "environment.json", "summary.json", "checkpoint"})
# Written often and large, and no picture is drawn from them.
_NOT_DRAWN = frozenset({"checkpoint", "clients", "report.html"})

Version = tuple[int, int, int]
"""Modification time in nanoseconds, size and inode of a file: when none of them changed, its content did not."""


class RunFolder(NamedTuple):
    """A run directory and the versions of the files that the board reads; a folder's counts for the files in it."""

    path: Path
    files: dict[str, Version]
    stray: tuple[str, ...]
    """Names in it that are links out of the board's folder: they are not read."""


class Found(NamedTuple):
    """The run directories below a folder by their place there, and whether all of it was searched."""

    runs: dict[str, RunFolder]
    complete: bool


def find_runs(root: Path) -> Found:
    """Every run directory below a folder (or the folder itself), breadth first; directories of runs hold no runs."""
    runs: dict[str, RunFolder] = {}
    waiting = deque([(root, 0)])
    searched = 0
    complete = True
    while waiting:
        if searched == MOST_FOLDERS:
            return Found(runs, complete=False)
        folder, depth = waiting.popleft()
        searched += 1
        try:
            with os.scandir(folder) as listed:
                entries = {entry.name: entry for entry in listed}
        except OSError:
            continue  # deleted meanwhile, or not ours to read
        if _is_run(entries.keys()):
            runs[_place(folder, root)] = _run_folder(folder, entries, root)
            continue
        below = [entry for name, entry in entries.items() if _is_searched(name) and _is_folder(entry)]
        if depth < DEEPEST:
            waiting.extend((folder / entry.name, depth + 1) for entry in below)
        else:
            complete = complete and not below
    return Found(runs, complete)


def links_out(folder: Path, root: Path) -> Iterator[str]:
    """The files in the folders of a run directory that are links out of the board's folder."""
    with os.scandir(folder) as listed:
        parts = [entry for entry in listed if entry.name not in _NOT_DRAWN and _is_folder(entry)]
    for part in parts:
        with os.scandir(part) as listed:
            yield from (f"{part.name}/{entry.name}" for entry in listed if _leads_out(entry, root))


def _is_run(names: Set[str]) -> bool:
    return "metrics.jsonl" in names or ("config.yaml" in names and not _BESIDE_CONFIG.isdisjoint(names))


def _place(folder: Path, root: Path) -> str:
    """The folder as seen from the root; bytes that are no text are written out, so that it can stand in an address."""
    place = folder.relative_to(root).as_posix() if folder != root else root.name
    return os.fsencode(place).decode("utf-8", "backslashreplace")


def _is_searched(name: str) -> bool:
    return not name.startswith(".") and name not in _NOT_SEARCHED


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir(follow_symlinks=False)
    except OSError:
        return False


def _run_folder(folder: Path, entries: dict[str, os.DirEntry[str]], root: Path) -> RunFolder:
    files: dict[str, Version] = {}
    stray: list[str] = []
    for name, entry in entries.items():
        if name in _NOT_DRAWN or (name.startswith(".") and name != ".lock"):
            continue
        if _leads_out(entry, root):
            stray.append(name)
            continue
        try:
            facts = entry.stat()
        except OSError:
            continue
        if stat.S_ISREG(facts.st_mode) or stat.S_ISDIR(facts.st_mode):  # opening a pipe would wait for a writer
            files[name] = (facts.st_mtime_ns, facts.st_size, facts.st_ino)
    return RunFolder(folder, files, tuple(sorted(stray)))


def _leads_out(entry: os.DirEntry[str], root: Path) -> bool:
    return entry.is_symlink() and not Path(entry.path).resolve().is_relative_to(root)
