"""All runs below a folder and how each is doing, cheap enough to ask every second or two."""

from __future__ import annotations

import hashlib
import json
import shlex
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import yaml

from fedretain.board.folders import RunFolder, Version, find_runs
from fedretain.board.locks import locked_inodes
from fedretain.board.log import LogNumbers, read_end, read_on
from fedretain.report.comparison import setting_text
from fedretain.report.reading import finite

Status = Literal["running", "finished", "interrupted", "unreadable"]

LARGEST = 4 << 20
"""Bytes of a config.yaml or summary.json; larger ones are not a run's."""
FRESH_FOR = 0.5
"""Seconds for which a listing is not made anew, however many pages ask."""
STILL_GROWING = 60.0
"""Seconds without a new line after which a run that holds no lock is taken for stopped."""

_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # libyaml is ten times as fast


@dataclass(frozen=True)
class RunEntry:
    """One line of the list."""

    id: str
    status: Status
    name: str = ""
    method: str = ""
    loss: str = ""
    data: str = ""
    seed: int | None = None
    round: int = 0
    rounds: int | None = None
    accuracy: float | None = None
    forgetting: float | None = None
    seconds: float | None = None
    updated: float = 0.0
    problems: tuple[str, ...] = ()
    resume: str | None = None
    """The command that goes on with an interrupted run."""
    folder: Path = field(default=Path(), repr=False)
    version: str = field(default="", repr=False)
    """Changes when any file changes that a picture is drawn from."""

    def shown(self) -> dict[str, Any]:
        """What the page gets: everything but where the run lies on this machine."""
        return {field.name: getattr(self, field.name) for field in fields(self) if field.repr}


@dataclass(frozen=True)
class Snapshot:
    """The list at one moment."""

    folder: str
    entries: Mapping[str, RunEntry]
    complete: bool

    @cached_property
    def content(self) -> bytes:
        """As JSON for the page."""
        runs = [entry.shown() for entry in self.entries.values()]
        return json.dumps({"folder": self.folder, "complete": self.complete, "runs": runs}).encode()

    @cached_property
    def tag(self) -> str:
        """The same for the same content, and only then."""
        return hashlib.blake2b(self.content, digest_size=12).hexdigest()


@dataclass
class _Memory:
    """What is known of a run from the last time, and which versions of its files said it."""

    config: tuple[Version | None, Mapping[str, Any] | str] = (None, "")
    summary: tuple[Version | None, Mapping[str, Any] | str] = (None, "")
    log: tuple[Version | None, bool, LogNumbers] = (None, False, LogNumbers())
    settled: tuple[RunFolder, RunEntry] | None = None
    """The entry of a run that does not change unless its files do."""
    free_size: int | None = None
    grew_at: float = float("-inf")


class Listing:
    """The runs below a folder. What did not change since the last time is not read again."""

    def __init__(self, folder: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self.given = folder
        self.root = folder.resolve()
        self._clock = clock
        self._lock = threading.Lock()
        self._memory: dict[Path, _Memory] = {}
        self._made_at = float("-inf")
        self._snapshot = Snapshot(str(folder), {}, complete=True)

    def snapshot(self) -> Snapshot:
        """The list as of now, or of half a second ago."""
        with self._lock:
            if self._clock() - self._made_at >= FRESH_FOR:
                self._snapshot = self._look()
                self._made_at = self._clock()
            return self._snapshot

    def _look(self) -> Snapshot:
        found = find_runs(self.root)
        self._memory = {folder.path: self._memory.get(folder.path, _Memory()) for folder in found.runs.values()}
        locked = locked_inodes()
        entries = {place: self._known_entry(place, folder, locked) for place, folder in found.runs.items()}
        return Snapshot(str(self.given), entries, found.complete)

    def _known_entry(self, place: str, folder: RunFolder, locked: frozenset[int]) -> RunEntry:
        memory = self._memory[folder.path]
        if memory.settled is not None and memory.settled[0] == folder:
            return memory.settled[1]
        entry = self._entry(place, folder, locked)
        memory.settled = (folder, entry) if entry.status == "finished" and not entry.problems else None
        return entry

    def _entry(self, place: str, folder: RunFolder, locked: frozenset[int]) -> RunEntry:
        memory = self._memory[folder.path]
        files = folder.files
        memory.config = _read_again(folder, "config.yaml", memory.config, _parse_yaml)
        memory.summary = _read_again(folder, "summary.json", memory.summary, json.loads)
        config, summary = memory.config[1], memory.summary[1]
        problems = [f"{name} is a link out of the board's folder" for name in folder.stray]
        if isinstance(config, str):
            problems.append(f"config.yaml {config}")
        if isinstance(summary, str):
            if "summary.json" in files:
                problems.append(f"summary.json {summary}")
            summary = {}
        problems += self._read_log(folder, memory, summary)
        log = memory.log[2]
        facts = {name: version for name, version in files.items() if name != ".lock"}
        entry = RunEntry(
            place,
            "unreadable",
            round=log.round,
            accuracy=log.accuracy,
            forgetting=log.forgetting,
            seconds=finite(summary.get("seconds")) if summary else log.seconds,
            updated=max((version[0] / 1e9 for version in facts.values()), default=0.0),
            problems=tuple(problems),
            folder=folder.path,
            version=hashlib.blake2b(repr(sorted(facts.items())).encode(), digest_size=12).hexdigest(),
        )
        if isinstance(config, str) or folder.stray:
            return entry
        entry = _described(entry, config)
        if summary:
            return replace(entry, status="finished")
        if self._is_running(folder, memory, locked):
            return replace(entry, status="running")
        if log.cut_off:
            problems.append("the last line of metrics.jsonl is cut off: resuming repeats that round")
        resume = _resume_command(self.given / folder.path.relative_to(self.root))
        return replace(entry, status="interrupted", problems=tuple(problems), resume=resume)

    def _read_log(self, folder: RunFolder, memory: _Memory, summary: Mapping[str, Any]) -> list[str]:
        version = folder.files.get("metrics.jsonl")
        known_version, from_end, known = memory.log
        if version is None:
            memory.log = (None, False, LogNumbers())
            return []
        if version != known_version or from_end != bool(summary):
            try:
                with (folder.path / "metrics.jsonl").open("rb") as file:
                    if summary:
                        measured = finite(summary.get("mean_forgetting")) is not None
                        known = read_end(file, version[1], forgetting=measured)
                    else:
                        known = read_on(file, LogNumbers() if from_end else known)
            except OSError as error:
                memory.log = (None, False, LogNumbers())
                return [f"metrics.jsonl cannot be read ({error.strerror})"]
            memory.log = (version, bool(summary), known)
        problems = [f"metrics.jsonl: {known.problem}"] if known.problem else []
        if summary and not problems and known.round != summary.get("rounds"):
            problems.append(f"metrics.jsonl ends with round {known.round}, the summary with {summary.get('rounds')}")
        return problems

    def _is_running(self, folder: RunFolder, memory: _Memory, locked: frozenset[int]) -> bool:
        """Whether its lock is held here; or, where locks are not seen (another machine), whether its log grows."""
        size = folder.files.get("metrics.jsonl", (0, 0, 0))[1]
        lock = folder.files.get(".lock")
        if lock is not None and lock[2] in locked:
            memory.free_size = None
            return True
        if memory.free_size is not None and size > memory.free_size:
            memory.grew_at = self._clock()
        memory.free_size = size
        return self._clock() - memory.grew_at < STILL_GROWING


def _read_again(
    folder: RunFolder,
    name: str,
    known: tuple[Version | None, Mapping[str, Any] | str],
    parse: Callable[[bytes], Any],
) -> tuple[Version | None, Mapping[str, Any] | str]:
    """The mapping in a file, or in words why there is none; read only when the file changed."""
    version = folder.files.get(name)
    if version is None:
        return None, "is missing"
    if version == known[0]:
        return known
    if version[1] > LARGEST:
        return version, f"is larger than {LARGEST >> 20} MiB, which none of a run is"
    try:
        content = parse((folder.path / name).read_bytes())
    except OSError as error:
        return None, f"cannot be read ({error.strerror})"
    except (ValueError, RecursionError, yaml.YAMLError):
        return version, "is damaged"
    return version, content if isinstance(content, dict) else "is damaged"


def _parse_yaml(content: bytes) -> Any:
    return yaml.load(content.decode(), _LOADER)


def _described(entry: RunEntry, config: Mapping[str, Any]) -> RunEntry:
    seed, rounds = finite(config.get("seed")), finite(config.get("rounds"))
    return replace(
        entry,
        name=str(config.get("name") or ""),
        method=_part(config.get("method")),
        loss=_part(config.get("loss")),
        data=_name(config.get("data")),
        seed=None if seed is None else int(seed),
        rounds=None if rounds is None else int(rounds),
    )


def _part(value: Any) -> str:
    """``fedprox(mu=0.1)``; nothing where the config does not say it."""
    return "" if value is None else setting_text(value)


def _name(value: Any) -> str:
    return _part(value.get("name", value.get("kind")) if isinstance(value, Mapping) else value)


def _resume_command(folder: Path) -> str:
    return shlex.join(["fedretain", "run", str(folder / "config.yaml"), "--out", str(folder), "--resume"])
