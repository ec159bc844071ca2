"""What counts as a run directory, and what is not searched."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from fedretain.board import folders
from fedretain.board.folders import find_runs, links_out

Write = Callable[..., Path]


def test_runs_are_found_at_any_depth_and_by_their_place(tmp_path: Path, write_run: Write) -> None:
    for place in ("a", "group/loss=ce,seed=0", "x/y/z/w"):
        write_run(tmp_path / place)
    found = find_runs(tmp_path)
    assert set(found.runs) == {"a", "group/loss=ce,seed=0", "x/y/z/w"}
    assert found.complete
    assert found.runs["a"].path == tmp_path / "a"


def test_the_folder_may_be_a_run_itself(tmp_path: Path, write_run: Write) -> None:
    assert set(find_runs(write_run(tmp_path / "only")).runs) == {"only"}


def test_what_is_no_run_is_passed_over(tmp_path: Path, write_run: Write) -> None:
    """A lone config.yaml may be anybody's; hidden folders are not searched; below a run there is no run."""
    (tmp_path / "settings").mkdir()
    (tmp_path / "settings" / "config.yaml").write_text("a: 1")
    (tmp_path / "notes.txt").write_text("no run")
    write_run(tmp_path / ".hidden" / "run")
    write_run(write_run(tmp_path / "run") / "inner")
    assert set(find_runs(tmp_path).runs) == {"run"}


def test_a_young_run_and_one_without_config_are_runs(tmp_path: Path) -> None:
    for name, files in {"young": ("config.yaml", ".lock"), "beheaded": ("metrics.jsonl",)}.items():
        (tmp_path / name).mkdir()
        for file in files:
            (tmp_path / name / file).touch()
    assert set(find_runs(tmp_path).runs) == {"young", "beheaded"}


def test_links_to_folders_are_not_followed(tmp_path: Path, write_run: Write) -> None:
    write_run(tmp_path / "outside" / "run")
    root = tmp_path / "root"
    write_run(root / "run")
    (root / "out").symlink_to(tmp_path / "outside")
    (root / "loop").symlink_to(root)
    assert set(find_runs(root).runs) == {"run"}


def test_links_out_of_the_folder_are_noticed_and_links_within_are_not(tmp_path: Path, write_run: Write) -> None:
    (tmp_path / "secret").write_text("x")
    root = tmp_path / "root"
    run = write_run(root / "run")
    (run / "environment.json").unlink()
    (run / "environment.json").symlink_to(tmp_path / "secret")
    (run / "summary.json").rename(root / "elsewhere.json")
    (run / "summary.json").symlink_to(root / "elsewhere.json")
    (run / "forgetting" / "round-000009.npz").symlink_to(tmp_path / "secret")
    found = find_runs(root).runs["run"]
    assert found.stray == ("environment.json",)
    assert "environment.json" not in found.files
    assert "summary.json" in found.files
    assert list(links_out(run, root)) == ["forgetting/round-000009.npz"]


def test_a_pipe_is_no_file_to_read(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    os.mkfifo(tmp_path / "run" / "metrics.jsonl")
    assert find_runs(tmp_path).runs["run"].files == {}


def test_the_search_is_bounded_and_says_so(tmp_path: Path, write_run: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    """Depth: the root is 0, so a run in the 9th folder below it lies deeper than 8. Number: 4 folders and the root."""
    deep = tmp_path / "deep" / Path(*"123456789")
    deep.mkdir(parents=True)
    assert not find_runs(tmp_path / "deep").complete
    for name in "abcd":
        (tmp_path / "wide" / name).mkdir(parents=True)
    assert find_runs(tmp_path / "wide").complete
    monkeypatch.setattr(folders, "MOST_FOLDERS", 4)
    assert not find_runs(tmp_path / "wide").complete


def test_a_name_that_is_no_text_gets_an_address(tmp_path: Path) -> None:
    folder = tmp_path / os.fsdecode(b"bad\xff")
    folder.mkdir()
    (folder / "metrics.jsonl").touch()
    assert set(find_runs(tmp_path).runs) == {"bad\\xff"}
