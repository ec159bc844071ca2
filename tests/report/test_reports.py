from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedretain.errors import RunError
from fedretain.report import write_partition_page, write_report

MakeRun = Callable[..., Path]
VOID = {"meta", "input", "br"}


class Page(HTMLParser):
    """The page as a browser would see it without running scripts: elements, visible text, scripts."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.scripts: list[str] = []
        self.feed(file.read_text(encoding="utf-8"))
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag == "script":
            self.scripts.append("")
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "script":
            self.scripts[-1] += data
        elif self.open and self.open[-1] != "style":
            self.words.append(data)

    @property
    def text(self) -> str:
        return re.sub(r"\s+", " ", " ".join(self.words))

    @property
    def figures(self) -> list[dict[str, Any]]:
        drawn: list[dict[str, Any]] = json.loads(self.scripts[0])
        return drawn

    def count(self, tag: str, **attributes: str) -> int:
        return sum(
            name == tag and all(found.get(key) == value for key, value in attributes.items())
            for name, found in self.elements
        )


def test_the_page_of_a_run_says_what_was_trained_and_what_came_out(make_run: MakeRun, tmp_path: Path) -> None:
    out = write_report([make_run()], tmp_path / "new" / "report.html")
    assert out == tmp_path / "new" / "report.html"
    page = Page(out)
    assert page.open == []
    assert "Method fedavg, loss ce, model mlp, data digits, split by dirichlet over 3 clients" in page.text
    assert "2 clients a round. Finished after 4 rounds." in page.text
    assert "80.0 % of the test examples" in page.text
    assert "costs 10.0 percentage points" in page.text
    assert "alpha: 0.1" in page.text
    assert '"kind": "cpu"' in page.text


def test_the_page_of_a_run_has_all_its_figures_and_one_slider(make_run: MakeRun, tmp_path: Path) -> None:
    """Accuracy, loss, client forgetting, forgettable examples, two heatmaps, partition, traffic, communication: nine.

    Each has a button for its data.
    """
    page = Page(write_report([make_run()], tmp_path / "report.html"))
    assert len(page.figures) == page.count("div", **{"class": "chart"}) == page.count("figcaption") == 9
    assert page.count("button", type="button") == 9
    assert page.count("input", type="range") == 1
    assert [frame["name"] for frame in page.figures[4]["frames"]] == ["2", "4"]


def test_the_page_carries_plotly_once_and_fetches_nothing(make_run: MakeRun, tmp_path: Path) -> None:
    page = Page(write_report([make_run()], tmp_path / "report.html"))
    assert len(page.scripts) == 3
    assert sum(len(script) > 1_000_000 for script in page.scripts) == 1
    assert not any("src" in attributes for _, attributes in page.elements)
    assert not any(tag in ("link", "img", "iframe") for tag, _ in page.elements)
    (policy,) = (found["content"] for _, found in page.elements if "http-equiv" in found)
    assert policy is not None
    assert "default-src 'none'" in policy


def test_text_from_a_run_never_becomes_markup(make_run: MakeRun, experiment: Any, tmp_path: Path) -> None:
    """Hostile names in every place a user's text can reach: the page has no element that they ask for."""
    hostile = '</script><img src=x onerror="alert(1)">'
    config = experiment(name=hostile, data={"name": hostile}, loss={"name": hostile})
    path = make_run("one", config)
    (path / "environment.json").write_text(json.dumps({"machine": hostile}))
    (path / "summary.json").write_text(json.dumps({"status": hostile}))
    np.savez(path / "partition.npz", class_counts=np.array([[1, 2]]), class_names=np.array([hostile, "b"]))
    runs = [path, make_run('two"><img>', experiment(name=hostile))]
    write_report(runs[1:], runs[1] / "report.html")
    for page in (
        Page(write_report(runs[:1], tmp_path / "one.html")),
        Page(write_report(runs, tmp_path / "both.html")),
        Page(write_partition_page([[1, 2]], [hostile, "b"], tmp_path / "partition.html", hostile)),
    ):
        assert page.open == []
        assert page.count("img") == 0
        assert len(page.scripts) == 3
        assert hostile in page.text


def test_a_run_without_rounds_gives_a_page(make_run: MakeRun, experiment: Any, tmp_path: Path) -> None:
    path = make_run("zero", experiment(rounds=0))
    (path / "metrics.jsonl").write_text("")
    shutil.rmtree(path / "forgetting")
    final = {"last": 0.1, "mean_last_100": None}
    summary = {"status": "finished", "rounds": 0, "initial_accuracy": 0.1, "final_accuracy": final}
    (path / "summary.json").write_text(json.dumps(summary))
    page = Page(write_report([path], tmp_path / "report.html"))
    assert "Finished after 0 rounds" in page.text
    assert "No round has been measured." in page.text
    assert "Forgetting was not measured" in page.text
    assert len(page.figures) == 1


def test_an_unfinished_run_gives_a_page_that_says_so(make_run: MakeRun, experiment: Any, tmp_path: Path) -> None:
    page = Page(write_report([make_run("x", experiment(rounds=9), finished=False)], tmp_path / "report.html"))
    assert "Unfinished: 4 of 9 rounds are in the log so far." in page.text
    assert "80.0 % of the test examples correctly so far" in page.text


def test_a_directory_with_nothing_but_a_config_gives_a_page(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("seed: 1\n")
    page = Page(write_report([tmp_path], tmp_path / "report.html"))
    assert "No accuracy has been measured yet." in page.text


@pytest.mark.parametrize(
    ("participation", "words"),
    [(0.1, "10 % of the clients a round"), (1, "1 client a round"), (1.0, "100 % of the clients a round")],
)
def test_participation_is_a_fraction_or_a_count(
    make_run: MakeRun, experiment: Any, tmp_path: Path, participation: float, words: str
) -> None:
    path = make_run("x", experiment(participation=participation))
    assert words in Page(write_report([path], tmp_path / "report.html")).text


def test_a_comparison_has_a_table_curves_heatmaps_and_links(make_run: MakeRun, experiment: Any, tmp_path: Path) -> None:
    """Two settings, two seeds: five curves (accuracy, forgetting, loss, examples, communication), two heatmaps each."""
    runs = [
        make_run(f"{loss} {seed}", experiment(seed=seed, loss={"name": loss}), accuracies=(0.3, accuracy))
        for loss, accuracy in (("ce", 0.7), ("wsm", 0.9))
        for seed in (0, 1)
    ]
    write_report(runs[:1], runs[0] / "report.html")
    page = Page(write_report(runs, tmp_path / "reports" / "comparison.html"))
    assert page.open == []
    assert "4 runs of 2 settings. Most accurate in the end: loss=wsm, 90.0 ± 0.0 %" in page.text
    assert "★ 90.0 ± 0.0" in page.text
    assert len(page.figures) == 9
    assert page.count("input", type="range") == 1
    links = [found["href"] for tag, found in page.elements if tag == "a"]
    assert links == ["./../ce%200/report.html"]
    assert "wsm 1" in page.text


def test_heatmaps_of_a_comparison_share_one_scale(make_run: MakeRun, experiment: Any, tmp_path: Path) -> None:
    """The largest cell is 2 × 0.3 = 60 points in the first setting and 2 points in the second."""
    runs = [
        make_run("a", experiment(), forgetting=0.3),
        make_run("b", experiment(loss={"name": "wsm"}), forgetting=0.01),
    ]
    page = Page(write_report(runs, tmp_path / "report.html"))
    scales = [
        figure["data"][0]["zmax"]
        for figure in page.figures
        if figure["data"][0].get("zmin") is not None and figure["data"][0]["zmin"] < 0
    ]
    assert scales == pytest.approx([60, 60])


def test_a_comparison_counts_forgettable_examples_for_each_setting(
    make_run: MakeRun, experiment: Any, tmp_path: Path
) -> None:
    """Of round 4's 12 examples client 0 has 8, client 2 has 4; the third setting did not look."""
    runs = [make_run(loss, experiment(loss={"name": loss})) for loss in ("ce", "wsm", "tce")]
    rows = [json.loads(line) for line in (runs[2] / "metrics.jsonl").read_text().splitlines()]
    for row in rows:
        row["clients"].pop("forgettable_examples", None)
    (runs[2] / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    page = Page(write_report(runs, tmp_path / "report.html"))
    assert page.count("h3") == 3
    assert page.count("table", **{"class": "counts"}) == 2
    assert page.text.count("client 0 10 4 8 client 2 10 2 4 all participants – 6 12") == 2
    assert "loss=tce Not measured." in page.text
    assert "Shown is the first seed of each setting." in page.text


MEASURES = [
    *("train_loss", "test_accuracy", "test_loss", "upload_bytes", "download_bytes", "seconds", "clients"),
    *("forgetting_by_model", "forgetting_by_data", "forgettable_examples"),
]


@pytest.mark.parametrize("absent", [*MEASURES, "every one"])
def test_a_measure_that_the_log_lacks_is_left_out_and_nothing_else(
    make_run: MakeRun, experiment: Any, tmp_path: Path, absent: str
) -> None:
    """The page of the run, and its comparison with a whole one, stand without the measure."""
    lacking, whole = make_run("lacking"), make_run("whole", experiment(loss={"name": "wsm"}))
    gone = MEASURES if absent == "every one" else [absent]
    rows = [json.loads(line) for line in (lacking / "metrics.jsonl").read_text().splitlines()]
    for row in rows:
        for key in gone:
            row.pop(key, None)
            (row.get("clients") or {}).pop(key, None)
    (lacking / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    page = Page(write_report([lacking], tmp_path / "one.html"))
    # Drawn alone: accuracy (also against traffic), the examples. Drawn together with another: the rest.
    fewer = {"test_accuracy": 2, "forgettable_examples": 1, "every one": 6}
    assert len(page.figures) == 9 - fewer.get(absent, 0)
    counts = absent not in ("clients", "forgettable_examples", "every one")
    assert page.count("table", **{"class": "counts"}) == counts
    both = Page(write_report([lacking, whole], tmp_path / "both.html"))
    assert len(both.figures) == 9
    assert both.count("table", **{"class": "counts"}) == 1 + counts


@pytest.mark.parametrize("clients", [None, [], "none", {"id": [0, 2]}, {"id": None, "forgettable_examples": 3}])
def test_odd_entries_of_single_clients_are_passed_over(make_run: MakeRun, tmp_path: Path, clients: Any) -> None:
    path = make_run()
    rows = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    (path / "metrics.jsonl").write_text("".join(json.dumps({**row, "clients": clients}) + "\n" for row in rows))
    page = Page(write_report([path], tmp_path / "one.html"))
    assert len(page.figures) == 9
    assert page.count("table", **{"class": "counts"}) == 0


def test_seeds_alone_differ(make_run: MakeRun, experiment: Any, tmp_path: Path) -> None:
    runs = [make_run("a", experiment()), make_run("b", experiment(seed=1))]
    page = Page(write_report(runs, tmp_path / "report.html"))
    assert "The runs differ in nothing but their seeds" in page.text


def test_an_old_page_is_replaced_whole_and_no_part_is_left(make_run: MakeRun, tmp_path: Path) -> None:
    out = tmp_path / "page" / "report.html"
    out.parent.mkdir()
    out.write_text("old")
    write_report([make_run()], out)
    assert out.read_text(encoding="utf-8").endswith("</html>\n")
    assert [file.name for file in out.parent.iterdir()] == ["report.html"]


def test_a_page_that_cannot_be_written_leaves_the_old_one(
    make_run: MakeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk turns out full: the error names the page, the old page stands, no part is left."""
    out = tmp_path / "page" / "report.html"
    out.parent.mkdir()
    out.write_text("old")

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    run = make_run()
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(RunError, match=r"report\.html cannot be written.*No space left"):
        write_report([run], out)
    assert out.read_text() == "old"
    assert [file.name for file in out.parent.iterdir()] == ["report.html"]


def test_the_partition_page_describes_the_split(tmp_path: Path) -> None:
    """Sizes 10 and 4 (median 7); classes held 2 and 1, on average 1.5 of 2."""
    page = Page(write_partition_page([[9, 1], [0, 4]], ["a", "b"], tmp_path / "p.html", "mine"))
    assert "2 clients with 4 to 10 training examples each (median 7)" in page.text
    assert "a client holds 1.5 of 2 classes on average" in page.text
    assert len(page.figures) == 1
