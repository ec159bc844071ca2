"""The report of chosen runs: the same sections as report.html; a damaged run is named, the others are drawn."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedretain.board import reporting
from fedretain.board.listing import Listing
from fedretain.board.reporting import Reporter
from fedretain.report import write_report

Write = Callable[..., Path]


def drawn(folder: Path, *places: str) -> Any:
    entries = Listing(folder).snapshot().entries
    return json.loads(Reporter(folder).draw([entries[place] for place in places]).content)


def captions(html: str) -> list[str]:
    return re.findall(r"<h2>(.*?)</h2>|<figcaption[^>]*>(.*?)</figcaption>", html)


@pytest.mark.parametrize("places", [("ce",), ("ce", "wsm")], ids=["one run", "two runs"])
def test_sections_and_figures_are_those_of_the_report(
    tmp_path: Path, write_run: Write, config: dict[str, Any], places: tuple[str, ...]
) -> None:
    write_run(tmp_path / "ce")
    write_run(tmp_path / "wsm", {**config, "loss": {"name": "wsm"}}, forgetting=0.02)
    page = write_report([tmp_path / place for place in places], tmp_path / "page.html").read_text()
    answer = drawn(tmp_path, *places)
    assert captions(answer["html"]) == captions(page.split("<script")[0])
    embedded = re.search(r'id="figures">(.*?)</script>', page)
    assert embedded
    assert answer["figures"] == json.loads(embedded[1])
    assert answer["problems"] == []
    assert f"<h1>{answer['title']}</h1>" in page


def test_runs_of_a_comparison_link_to_their_page_on_the_board(tmp_path: Path, write_run: Write, config: Any) -> None:
    write_run(tmp_path / "a" / "it's <b>")
    write_run(tmp_path / "c", {**config, "loss": {"name": "wsm"}})
    html = drawn(tmp_path, "a/it's <b>", "c")["html"]
    assert '<a href="/run/a/it%27s%20%3Cb%3E">a/it\'s &lt;b&gt;</a>' in html


def test_a_young_run_says_so(tmp_path: Path, write_run: Write) -> None:
    run = write_run(tmp_path / "run", finished=False)
    for file in ("metrics.jsonl", "partition.npz"):
        (run / file).unlink()
    (run / "metrics.jsonl").touch()
    for file in (run / "forgetting").iterdir():
        file.unlink()
    answer = drawn(tmp_path, "run")
    assert answer["figures"] == []
    assert "No round has been measured." in answer["html"]
    assert "Forgetting was not measured so far" in answer["html"]


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("partition.npz", "bad: partition.npz cannot be read"),
        ("environment.json", "bad: environment.json is not JSON"),
        ("forgetting/round-000002.npz", "bad: forgetting/round-000002.npz is damaged"),
    ],
)
def test_half_a_file_is_named_and_the_rest_is_drawn(tmp_path: Path, write_run: Write, name: str, problem: str) -> None:
    write_run(tmp_path / "good")
    bad = write_run(tmp_path / "bad")
    content = (bad / name).read_bytes()
    (bad / name).write_bytes(content[: len(content) // 2])
    answer = drawn(tmp_path, "bad")
    assert [found.startswith(problem) for found in answer["problems"]] == [True]
    assert str(tmp_path) not in answer["problems"][0]
    assert "Accuracy of the global model on the test data" in answer["html"]


def test_a_damaged_line_ends_the_curve(tmp_path: Path, write_run: Write) -> None:
    run = write_run(tmp_path / "run", finished=False)
    lines = (run / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    (run / "metrics.jsonl").write_bytes(lines[0] + lines[1] + b"\x00garbage\n" + lines[3])
    answer = drawn(tmp_path, "run")
    assert answer["figures"][0]["data"][0]["y"] == [20, 40]
    assert "metrics.jsonl, line 3" in answer["problems"][0]


def test_an_archive_of_the_wrong_shape_leaves_its_run_out_and_keeps_the_others(
    tmp_path: Path, write_run: Write, config: dict[str, Any]
) -> None:
    """It is whole as a file and only fails while it is drawn; the other two runs are compared."""
    for name, loss in (("a", "ce"), ("b", "wsm"), ("bad", "tce")):
        write_run(tmp_path / name, {**config, "loss": {"name": loss}})
    np.savez(
        tmp_path / "bad" / "forgetting" / "round-000004.npz",
        **{key: np.zeros(3) for key in ("models", "data", "before", "after", "forgetting")},
    )
    answer = drawn(tmp_path, "a", "bad", "b")
    assert [problem.split(":")[0] for problem in answer["problems"]] == ["bad"]
    assert "2 runs of 2 settings" in answer["html"]


def test_an_unreadable_run_alone_is_a_page_with_the_reason(tmp_path: Path, write_run: Write) -> None:
    (write_run(tmp_path / "bad") / "config.yaml").unlink()
    answer = drawn(tmp_path, "bad")
    assert (answer["title"], answer["html"], answer["problems"]) == ("bad", "", ["bad: config.yaml is missing"])


def test_files_that_are_links_out_are_not_read(tmp_path: Path, write_run: Write) -> None:
    run = write_run(tmp_path / "root" / "run")
    matrix = run / "forgetting" / "round-000002.npz"
    matrix.rename(tmp_path / "matrix.npz")
    matrix.symlink_to(tmp_path / "matrix.npz")
    answer = drawn(tmp_path / "root", "run")
    assert answer["figures"] == []
    assert answer["problems"] == ["run: forgetting/round-000002.npz is a link out of the board's folder"]


def test_a_run_deleted_on_the_way_is_named(tmp_path: Path, write_run: Write) -> None:
    (write_run(tmp_path / "gone")).rename(tmp_path / "kept")
    entry = Listing(tmp_path).snapshot().entries["kept"]
    (tmp_path / "kept").rename(tmp_path / "moved")
    answer = json.loads(Reporter(tmp_path).draw([entry], missing=["gone"]).content)
    assert answer["problems"][0] == "gone: no longer there"
    assert answer["problems"][1].startswith("kept: ")


def test_nothing_is_drawn_twice_from_the_same_files(
    tmp_path: Path, write_run: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = write_run(tmp_path / "run", finished=False)
    reporter = Reporter(tmp_path)
    made: list[int] = []
    make = reporting.make_report
    monkeypatch.setattr(reporting, "make_report", lambda *arguments: made.append(1) or make(*arguments))
    first = reporter.draw(list(Listing(tmp_path).snapshot().entries.values()))
    again = reporter.draw(list(Listing(tmp_path).snapshot().entries.values()))
    assert again is first
    with (run / "metrics.jsonl").open("a") as log:
        log.write('{"round": 5, "test_accuracy": 0.9, "seconds": 0.5}\n')
    later = reporter.draw(list(Listing(tmp_path).snapshot().entries.values()))
    assert later.tag != first.tag
    assert len(made) == 2
