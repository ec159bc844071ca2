"""The run directory: configuration, metrics, checkpoints, measurements. Append-only, atomic, resumable."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import io
import json
import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any

import numpy as np
import yaml

from fedretain.config import Experiment, deciding, flatten
from fedretain.data.federation import Parts
from fedretain.errors import RunError
from fedretain.files import write_atomically
from fedretain.runs.checkpoint import Checkpoint, load_checkpoints, save_checkpoint
from fedretain.runs.clients import ClientStore
from fedretain.runs.metrics import Row, keep_rows, read_rows

LINGER = 0.1
"""Seconds that a round of the metrics may wait for others, to be written with them."""
CHECKPOINT_SHARE = 0.01
"""The part of the time that saving may cost when ``checkpoint.every`` is not given."""

_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)

ONE_ARRAY_PER_CLIENT = 2_000
"""Above this population the partition file holds two long arrays instead of two short ones per client."""


class RunDirectory:
    """One experiment's files. Use ``opened`` to write; two processes cannot write to one directory."""

    def __init__(self, path: Path, experiment: Experiment) -> None:
        self.path = path
        self.experiment = experiment
        self.store = ClientStore(
            path / "clients",
            memory=experiment.engine.state_memory,
            half=experiment.engine.state_precision == "half",
        )
        self._kept: list[Checkpoint] = []
        self._log: IO[bytes] | None = None
        self._rows: list[Row] = []
        self._written_at = 0.0
        self._saved_round = -1
        self._saved_at = time.monotonic()
        self._save_cost = 0.0

    # ------------------------------------------------------------------ opening

    @classmethod
    @contextlib.contextmanager
    def opened(cls, path: Path, experiment: Experiment, *, resume: bool) -> Iterator[RunDirectory]:
        """Create the directory or, with ``resume``, go on with the same experiment; refuse anything else."""
        run = cls(path, experiment)
        with _explained(path):
            path.mkdir(parents=True, exist_ok=True)
        with locked(path):
            try:
                run._admit(resume)
                with _explained(path):
                    for leftover in path.rglob(".*.tmp"):
                        leftover.unlink()
                    write_atomically(path / "config.yaml", experiment.as_yaml().encode())
                yield run
            finally:
                with contextlib.suppress(OSError, RunError):
                    run.flush()
                if run._log is not None:
                    with contextlib.suppress(OSError):
                        run._log.close()

    def _admit(self, resume: bool) -> None:
        """Whether this directory may hold this experiment."""
        config = self.path / "config.yaml"
        if not config.exists():
            strangers = sorted(p.name for p in self.path.iterdir() if not p.name.startswith("."))
            if strangers:
                raise RunError(
                    f"{self.path}: not empty ({', '.join(strangers[:3])}) and no run of fedretain; choose another --out"
                )
            return
        held = _read_config(config)
        mine, theirs = deciding(self.experiment.as_dict()), deciding(held)
        changed = [key for key in sorted(mine.keys() | theirs.keys()) if mine.get(key) != theirs.get(key)]
        if changed:
            shown = ", ".join(f"{key} is {theirs.get(key)!r} there, {mine.get(key)!r} here" for key in changed[:3])
            raise RunError(f"{self.path}: holds another experiment ({shown}); choose another --out")
        done = len(read_rows(self.path / "metrics.jsonl"))
        if self.experiment.rounds < done and resume:
            raise RunError(
                f"{self.path}: has {done} rounds already, and rounds is {self.experiment.rounds}; "
                f"set rounds to {done} or more, or choose another --out"
            )
        if not resume:
            raise RunError(
                f"{self.path}: already holds this experiment ({done} of {flatten(held).get('rounds')} rounds); "
                "continue it with --resume, or choose another --out"
            )

    def last_good(self) -> tuple[Checkpoint | None, list[Row]]:
        """The newest state to go on from, and the rounds before it. Everything later is cut off and done again."""
        rows = read_rows(self.path / "metrics.jsonl")
        self._kept = load_checkpoints(self.path / "checkpoint", at_most=len(rows), store=self.store)[:2]
        checkpoint = self._kept[0] if self._kept else None
        rows = rows[: checkpoint.state.round if checkpoint else 0]
        self._saved_round = checkpoint.state.round if checkpoint else -1
        with _explained(self.path):
            keep_rows(self.path / "metrics.jsonl", len(rows))
            self._forget_clients()
            if len(rows) < self.experiment.rounds:
                (self.path / "summary.json").unlink(missing_ok=True)
        return checkpoint, rows

    def _forget_clients(self) -> None:
        """Client states that no kept checkpoint mentions."""
        self.store.forget_all_but({version for kept in self._kept for version in kept.clients.items()})

    # ------------------------------------------------------------------ writing

    def write_json(self, name: str, content: Mapping[str, Any]) -> None:
        """A small JSON file, whole or not at all."""
        with _explained(self.path):
            write_atomically(self.path / name, (json.dumps(content, indent=2) + "\n").encode())

    def write_arrays(self, name: str, **arrays: np.ndarray) -> None:
        """An ``.npz`` file, whole or not at all."""
        buffer = io.BytesIO()
        np.savez_compressed(buffer, **arrays)  # type: ignore[arg-type]
        with _explained(self.path):
            write_atomically(self.path / name, buffer.getvalue())

    def write_partition(
        self, train: Parts, validation: Parts, class_counts: np.ndarray, names: tuple[str, ...]
    ) -> None:
        """Who holds what: ``train_K`` and ``validation_K`` are the example numbers of client K."""
        arrays: dict[str, np.ndarray] = {
            "class_counts": class_counts,
            "class_names": np.array(names, dtype=np.str_),
        }
        for split, parts in (("train", train), ("validation", validation)):
            if len(parts) > ONE_ARRAY_PER_CLIENT:
                arrays |= {f"{split}_indices": parts.indices, f"{split}_offsets": parts.offsets}
            else:
                arrays |= {f"{split}_{client}": parts[client] for client in range(len(parts))}
        self.write_arrays("partition.npz", **arrays)

    def append(self, row: Row) -> None:
        """Add one round to the metrics; it is with the operating system a moment later, or when ``flush`` returns."""
        self._rows.append(row)
        if time.monotonic() - self._written_at >= LINGER:
            self.flush()

    def flush(self) -> None:
        """Hand the rounds that wait over to the operating system."""
        if self._rows:
            rows, self._rows = self._rows, []
            lines = b"".join(json.dumps(row).encode() + b"\n" for row in rows)
            with _explained(self.path):
                if self._log is None:
                    self._log = (self.path / "metrics.jsonl").open("ab")
                self._log.write(lines)
                self._log.flush()
        self._written_at = time.monotonic()

    def advance(self, before: Checkpoint, after: Checkpoint, participants: list[int]) -> None:
        """A round is done: its participants' older states go, but for those that a kept checkpoint still needs."""
        if after.clients is before.clients:
            return
        for client in participants:
            version = (client, before.clients.get(client, 0))
            needed = any(kept.clients.get(client) == version[1] for kept in self._kept)
            if client in before.clients and after.clients[client] != version[1] and not needed:
                with _explained(self.path):
                    self.store.drop(version)

    def checkpoint_is_due(self, round: int) -> bool:
        """By the number of rounds if that is given, else so that saving costs about 1 % of the time."""
        every = self.experiment.checkpoint.every
        if every is not None:
            return round % every == 0
        return time.monotonic() - self._saved_at >= self._save_cost / CHECKPOINT_SHARE

    def save(self, checkpoint: Checkpoint) -> None:
        """Save a state, after the metrics that lead to it are on the disk."""
        if checkpoint.state.round == self._saved_round:
            return
        started = time.monotonic()
        self.flush()
        with _explained(self.path):
            if self._log is not None:
                os.fsync(self._log.fileno())
            self.store.save(checkpoint.clients)
            save_checkpoint(self.path / "checkpoint", checkpoint)
            self._kept = [checkpoint, *self._kept[:1]]
            self._forget_clients()
        self._saved_round = checkpoint.state.round
        self._saved_at = time.monotonic()
        self._save_cost = self._saved_at - started


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Keep every other process from writing to this run directory."""
    with _explained(path):
        lock = (path / ".lock").open("wb")
    try:
        try:
            with _explained(path):
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RunError(
                f"{path}: another process is writing to this run; wait for it or use another --out"
            ) from None
        yield
    finally:
        lock.close()


@contextlib.contextmanager
def _explained(path: Path) -> Iterator[None]:
    """A full disk or a forbidden folder, in words."""
    try:
        yield
    except BlockingIOError:
        raise
    except OSError as error:
        advice = (
            "make room there, then go on with --resume: nothing up to the last checkpoint is lost"
            if error.errno in _NO_ROOM
            else "choose another --out, or make it a folder that you may write to"
        )
        raise RunError(f"{error.filename or path}: cannot be written ({error.strerror or error}); {advice}") from error


def _read_config(path: Path) -> dict[str, Any]:
    try:
        held = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise RunError(f"{path}: cannot be read ({error}); choose another --out") from None
    if not isinstance(held, dict):
        raise RunError(f"{path}: is no experiment; choose another --out")
    return held
