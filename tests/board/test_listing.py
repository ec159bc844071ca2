"""The list: what each run is called, how it is doing, and what is wrong with it."""

from __future__ import annotations

import fcntl
import json
import os
import shlex
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

import fedretain
from fedretain.board import listing as listing_module
from fedretain.board.listing import Listing, RunEntry

Write = Callable[..., Path]


class Clock:
    """A clock that is moved by hand."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def look(folder: Path, place: str = "run") -> RunEntry:
    return Listing(folder).snapshot().entries[place]


@pytest.fixture
def watched(tmp_path: Path) -> tuple[Clock, Callable[[], RunEntry]]:
    """A clock, and the entry of ``run`` a second later each time."""
    clock = Clock()
    listing = Listing(tmp_path, clock)

    def later(seconds: float = 1.0) -> RunEntry:
        clock.now += seconds
        return listing.snapshot().entries["run"]

    return clock, later


def test_a_finished_run(tmp_path: Path, write_run: Write, config: dict[str, Any]) -> None:
    """Accuracy of the last round, forgetting of the last measured one, seconds of the summary."""
    chain = [{"name": "fedprox", "mu": 0.1}, {"name": "fedwavg"}]
    write_run(tmp_path / "run", {**config, "method": chain, "seed": 3})
    entry = look(tmp_path)
    assert (entry.status, entry.problems, entry.resume) == ("finished", (), None)
    assert (entry.name, entry.method, entry.loss, entry.data, entry.seed) == (
        *("digits", "fedprox(mu=0.1) + fedwavg", "ce", "digits", 3),
    )
    assert (entry.round, entry.rounds, entry.accuracy, entry.forgetting, entry.seconds) == (4, 4, 0.8, 0.1, 2.0)
    assert abs(entry.updated - time.time()) < 60


def test_an_interrupted_run_says_how_to_go_on(tmp_path: Path, small: dict[str, Any], monkeypatch: Any) -> None:
    """The command is tried: it must finish the run, in a folder whose name needs quoting."""

    def stop(experiment: Any, row: Any) -> None:
        if row["round"] == 2:
            raise KeyboardInterrupt

    run = tmp_path / "it's here" / "run"
    with pytest.raises(KeyboardInterrupt):
        fedretain.run(small, out=run, watch=stop)
    entry = look(tmp_path, "it's here/run")
    assert (entry.status, entry.round, entry.rounds) == ("interrupted", 2, 5)
    assert entry.resume is not None
    program, verb, experiment, out, folder, resume = shlex.split(entry.resume)
    assert (program, verb, out, resume) == ("fedretain", "run", "--out", "--resume")
    fedretain.run(experiment, out=folder, resume=True)
    entry = look(tmp_path, "it's here/run")
    assert (entry.status, entry.round) == ("finished", 5)


@pytest.mark.skipif(not Path("/proc/locks").exists(), reason="only Linux lists its locks")
def test_a_run_whose_lock_is_held_is_running(tmp_path: Path, write_run: Write, watched: Any) -> None:
    run = write_run(tmp_path / "run", finished=False)
    _, later = watched
    with (run / ".lock").open("wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        assert later().status == "running"
        (run / "metrics.jsonl").open("ab").write(b'{"round": 5, "sec')
        entry = later()
        assert (entry.status, entry.round, entry.problems) == ("running", 4, ())
    entry = later()
    assert entry.status == "interrupted"
    assert entry.problems == ("the last line of metrics.jsonl is cut off: resuming repeats that round",)


def test_a_log_that_grows_without_a_lock_is_running_for_a_minute(
    tmp_path: Path, write_run: Write, watched: Any
) -> None:
    """As on a shared disk, written by another machine: at first nothing tells it from a stopped run."""
    run = write_run(tmp_path / "run", finished=False)
    _, later = watched
    assert later().status == "interrupted"
    with (run / "metrics.jsonl").open("a") as log:
        log.write(json.dumps({"round": 5, "test_accuracy": 0.9, "seconds": 0.5}) + "\n")
    entry = later()
    assert (entry.status, entry.round, entry.accuracy, entry.seconds) == ("running", 5, 0.9, 2.5)
    assert later(59.0).status == "running"
    assert later(2.0).status == "interrupted"


def damage(run: Path, name: str, content: bytes | None) -> None:
    if content is None:
        (run / name).unlink()
    else:
        (run / name).write_bytes(content)


@pytest.mark.parametrize(
    ("name", "content", "status", "problem"),
    [
        ("config.yaml", None, "unreadable", "config.yaml is missing"),
        ("config.yaml", b"\x00\xff\xfe", "unreadable", "config.yaml is damaged"),
        ("config.yaml", b"- a list", "unreadable", "config.yaml is damaged"),
        ("config.yaml", b"{" * 5000, "unreadable", "config.yaml is damaged"),
        ("summary.json", b'{"status": "fini', "interrupted", "summary.json is damaged"),
        ("metrics.jsonl", b"\x00\xff\n" * 3, "finished", "metrics.jsonl: a line near the end is damaged"),
        ("metrics.jsonl", b"", "finished", "metrics.jsonl ends with round 0, the summary with 4"),
    ],
)
def test_what_is_wrong_is_said(
    tmp_path: Path, write_run: Write, name: str, content: bytes | None, status: str, problem: str
) -> None:
    damage(write_run(tmp_path / "run"), name, content)
    write_run(tmp_path / "sound")
    entries = Listing(tmp_path).snapshot().entries
    assert (entries["run"].status, entries["run"].problems) == (status, (problem,))
    assert entries["sound"].status == "finished"


def test_odd_values_do_no_harm(tmp_path: Path, write_run: Write, config: dict[str, Any]) -> None:
    odd = {**config, "rounds": "many", "seed": [1], "loss": None, "method": {"mu": float("nan")}, "data": 7}
    run = write_run(tmp_path / "run", odd)
    (run / "summary.json").write_text('{"seconds": "long", "rounds": NaN}')
    entry = look(tmp_path)
    assert (entry.rounds, entry.seed, entry.loss, entry.data, entry.seconds) == (None, None, "", "7", None)
    assert json.loads(Listing(tmp_path).snapshot().content, parse_constant=pytest.fail)


def test_links_out_of_the_folder_make_a_run_unreadable(tmp_path: Path, write_run: Write) -> None:
    run = write_run(tmp_path / "root" / "run")
    (run / "config.yaml").rename(tmp_path / "config.yaml")
    (run / "config.yaml").symlink_to(tmp_path / "config.yaml")
    entry = look(tmp_path / "root")
    assert entry.status == "unreadable"
    assert "config.yaml is a link out of the board's folder" in entry.problems
    assert entry.name == ""


def test_a_deleted_run_leaves_the_list(tmp_path: Path, write_run: Write) -> None:
    clock = Clock()
    listing = Listing(tmp_path, clock)
    run = write_run(tmp_path / "run")
    assert set(listing.snapshot().entries) == {"run"}
    shutil.rmtree(run)
    clock.now += 1
    assert listing.snapshot().entries == {}


def test_only_what_changed_is_read_again(tmp_path: Path, write_run: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three looks at three runs, of which one log grows once: three configs and four logs are read, no more."""
    read = {"config": 0, "log": 0}
    parse, read_on = listing_module._parse_yaml, listing_module.read_on

    def count_config(content: bytes) -> Any:
        read["config"] += 1
        return parse(content)

    def count_log(file: Any, known: Any) -> Any:
        read["log"] += 1
        return read_on(file, known)

    monkeypatch.setattr(listing_module, "_parse_yaml", count_config)
    monkeypatch.setattr(listing_module, "read_on", count_log)
    clock = Clock()
    listing = Listing(tmp_path, clock)
    runs = [write_run(tmp_path / name, finished=False) for name in "abc"]
    tags = []
    for _ in range(3):
        clock.now += 1
        tags.append(listing.snapshot().tag)
        if len(tags) == 2:
            with (runs[0] / "metrics.jsonl").open("a") as log:
                log.write('{"round": 5, "seconds": 0.5}\n')
    assert read == {"config": 3, "log": 4}
    assert tags[0] == tags[1] != tags[2]


def test_the_list_is_not_made_more_often_than_every_half_second(tmp_path: Path, write_run: Write) -> None:
    clock = Clock()
    listing = Listing(tmp_path, clock)
    first = listing.snapshot()
    write_run(tmp_path / "run")
    clock.now += 0.4
    assert listing.snapshot() is first
    clock.now += 0.2
    assert set(listing.snapshot().entries) == {"run"}


def test_a_thousand_runs_are_listed_quickly(tmp_path: Path, config: dict[str, Any]) -> None:
    """The bound is loose for a busy machine; docs/board.md has the measured times."""
    row = json.dumps({"round": 1, "test_accuracy": 0.5, "seconds": 0.1}) + "\n"
    text = yaml.safe_dump(config)
    for number in range(1000):
        run = tmp_path / f"group-{number // 100}" / f"run-{number}"
        run.mkdir(parents=True)
        (run / "config.yaml").write_text(text)
        (run / "metrics.jsonl").write_text(row)
    clock = Clock()
    listing = Listing(tmp_path, clock)
    assert len(listing.snapshot().entries) == 1000
    clock.now += 1
    started = time.process_time()
    assert len(listing.snapshot().entries) == 1000
    assert time.process_time() - started < 1.0


def test_a_file_that_may_not_be_read_is_named(tmp_path: Path, write_run: Write, monkeypatch: Any) -> None:
    """By a refusal of the file system; who runs the tests may be allowed everything."""
    run = write_run(tmp_path / "run")
    opened = Path.open

    def refuse(path: Path, *args: Any, **kwargs: Any) -> Any:
        if path == run / "metrics.jsonl":
            raise PermissionError(13, os.strerror(13))
        return opened(path, *args, **kwargs)

    monkeypatch.setattr(Path, "open", refuse)
    assert look(tmp_path).problems == ("metrics.jsonl cannot be read (Permission denied)",)
