"""The board as its reader uses it: a real browser, real runs, one of them training."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.report import conftest as report_runs

playwright = pytest.importorskip("playwright.sync_api", reason="the browser tests need playwright")
pytest.importorskip("uvicorn", reason="the board needs uvicorn: pip install 'fedretain[board]'")
pytestmark = pytest.mark.browser

HOSTILE = "<img src=x onerror='window.attacked = true'><script>window.attacked = true</script>"
Open = Callable[..., Any]


@pytest.fixture
def open_page(browser: Any) -> Iterator[Open]:
    """``open_page(folder, path)``: a page of a board on that folder; at the end nothing may have gone wrong in it.

    Wrong are console messages, exceptions, and requests to anywhere but the board.
    """
    from fedretain.board import open_board

    ended: list[Callable[[], None]] = []
    troubles: list[str] = []

    def start(folder: Path, path: str = "/", **options: Any) -> Any:
        board = open_board(folder, port=0)
        thread = threading.Thread(target=board.serve)
        thread.start()
        page = browser.new_page(**options)
        page.on("console", lambda m: troubles.append(m.text) if m.type in ("error", "warning") else None)
        page.on("pageerror", lambda error: troubles.append(str(error)))
        local = (board.address, "data:", "blob:")
        page.on("request", lambda r: None if r.url.startswith(local) else troubles.append(r.url))

        def end() -> None:
            page.close()
            board.stop()
            thread.join(timeout=10)

        ended.append(end)
        page.goto(board.address.rstrip("/") + path)
        return page

    yield start
    for end in ended:
        end()
    assert troubles == []


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two settings, one interrupted, one with a damaged config, one whose name is an attack."""
    folder = tmp_path_factory.mktemp("runs")
    config = report_runs.CONFIG
    report_runs.write_run(folder / "group" / "loss=ce,seed=0")
    report_runs.write_run(
        folder / "group" / "loss=wsm,seed=0", {**config, "loss": {"name": "wsm"}}, (0.3, 0.5, 0.7, 0.9), 0.02
    )
    report_runs.write_run(folder / "stopped", {**config, "rounds": 9}, finished=False)
    (report_runs.write_run(folder / "broken") / "config.yaml").write_bytes(b"\x00\xff")
    report_runs.write_run(folder / "hostile", {**config, "name": HOSTILE, "loss": {"name": HOSTILE}})
    return folder


def eventually(page: Any, expression: str, seconds: float = 20.0) -> bool:
    """Whether the expression comes true in time (the page's content policy forbids playwright's own wait)."""
    for _ in range(int(seconds * 20)):
        if page.evaluate(expression):
            return True
        page.wait_for_timeout(50)
    return False


def names(page: Any) -> list[str]:
    """The runs of the list from top to bottom."""
    page.wait_for_selector("table.runs tbody tr")
    found: list[str] = page.locator("table.runs tbody th a").all_text_contents()
    return found


def row(page: Any, name: str) -> Any:
    return page.locator("table.runs tbody tr", has=page.get_by_role("link", name=name, exact=True))


def heatmaps(page: Any) -> list[Any]:
    found: list[Any] = page.evaluate(
        "[...document.querySelectorAll('.chart')].filter(c => c.data?.[0].type === 'heatmap').map(c => c.data[0].y)"
    )
    return found


def fits(page: Any, width: int) -> bool:
    page.set_viewport_size({"width": width, "height": 900})
    return eventually(page, f"document.documentElement.scrollWidth <= {width}", 5)


def focused(page: Any) -> str:
    """What has the focus, in the words that a screen reader would find."""
    words: str = page.evaluate(
        "(({ ariaLabel, id, textContent }) => ariaLabel || id || textContent.trim())(document.activeElement)"
    )
    return words


def test_the_list_tells_how_every_run_is_doing(open_page: Open, folder: Path) -> None:
    """Of write_run's four rounds: accuracy 0.8 and 0.9 at last, forgetting 0.1 and 0.02, 0.5 s a round."""
    page = open_page(folder)
    assert len(names(page)) == 5
    cells = row(page, "group/loss=wsm,seed=0").locator("td").all_inner_texts()
    assert [cell.strip() for cell in cells[1:9]] == [
        *("fedavg", "wsm", "digits", "0", "finished", "4 / 4", "90.0", "2.0"),
    ]
    assert "config.yaml is damaged" in row(page, "broken").inner_text()
    stopped = row(page, "stopped")
    assert "interrupted" in stopped.inner_text()
    stopped.get_by_text("How to go on").click()
    assert re.search(r"fedretain run \S+/stopped/config.yaml --out \S+/stopped --resume", stopped.inner_text())
    assert page.locator("#statuses button").all_text_contents() == [
        *("all 5", "running 0", "finished 3", "interrupted 1", "unreadable 1"),
    ]
    assert page.evaluate("window.attacked") is None
    assert HOSTILE in row(page, "hostile").inner_text()


def test_filter_and_status_and_sorting_are_kept_in_the_address(open_page: Open, folder: Path) -> None:
    page = open_page(folder)
    assert len(names(page)) == 5
    page.fill("#filter", "seed=0 WSM")
    assert names(page) == ["group/loss=wsm,seed=0"]
    assert page.inner_text("#shown") == "1 of 5 runs shown"
    page.fill("#filter", "group")
    heading = page.locator("th.of-accuracy")
    for order, expected in (("descending", ["wsm", "ce"]), ("ascending", ["ce", "wsm"])):
        heading.get_by_role("button").click()
        assert heading.get_attribute("aria-sort") == order
        assert names(page) == [f"group/loss={loss},seed=0" for loss in expected]
    page.reload()
    assert names(page) == ["group/loss=ce,seed=0", "group/loss=wsm,seed=0"]
    page.fill("#filter", "")
    page.get_by_role("button", name="interrupted 1").click()
    assert names(page) == ["stopped"]
    page.fill("#filter", "no such run")
    assert page.locator("table.runs tbody tr").count() == 0


def test_two_runs_are_compared_in_the_reports_pictures(open_page: Open, folder: Path) -> None:
    """Four heatmaps, one slider for all: rounds 4 and 2 as in the report's own tests."""
    page = open_page(folder)
    for loss in ("ce", "wsm"):
        row(page, f"group/loss={loss},seed=0").get_by_role("checkbox").check()
    page.get_by_role("button", name="Compare chosen (2)").click()
    page.wait_for_selector("html[data-drawn=yes]")
    assert page.url.endswith("/compare?run=group%2Floss%3Dce%2Cseed%3D0&run=group%2Floss%3Dwsm%2Cseed%3D0")
    assert page.locator(".chart .main-svg").count() > 0
    assert "2 runs of 2 settings" in page.inner_text("#report")
    assert heatmaps(page) == [["2", "1"]] * 4
    page.locator(".slider input").press("Home")
    assert heatmaps(page) == [["0", "2"]] * 4
    with page.expect_download() as saved:
        page.get_by_role("button", name="Download data (CSV)").first.click()
    assert saved.value.path().read_text().startswith("curve,communication round,test accuracy (%)")
    page.locator("section", has_text="run directory and its report").get_by_role("link").first.click()
    page.wait_for_selector("html[data-drawn=yes]")
    assert page.url.endswith("/run/group/loss%3Dce%2Cseed%3D0")


def test_with_the_keyboard_alone(open_page: Open, folder: Path) -> None:
    """/ to the filter, words, Tab to the boxes, Space chooses, Enter compares, Escape leads back."""
    page = open_page(folder)
    names(page)
    page.keyboard.press("Tab")
    assert focused(page) == "Skip to the runs"
    page.keyboard.press("/")
    assert focused(page) == "filter"
    page.keyboard.type("group")
    page.keyboard.press("Escape")
    assert len(names(page)) == 5
    assert focused(page) != "filter"
    page.keyboard.press("/")
    page.keyboard.type("group")
    passed = []
    while not (passed and passed[-1].startswith("Choose group")):
        page.keyboard.press("Tab")
        passed.append(focused(page))
        assert len(passed) < 40
        outline = page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
        assert outline == "solid", passed[-1]
    assert passed[:2] == ["all 2", "running 0"]
    page.keyboard.press("Space")
    page.keyboard.press("Tab")
    while not focused(page).startswith("Choose group"):
        page.keyboard.press("Tab")
    page.keyboard.press("Space")
    assert page.inner_text("#compare-chosen") == "Compare chosen (2)"
    while focused(page) != "compare-chosen":
        page.keyboard.press("Shift+Tab")
    page.keyboard.press("Enter")
    page.wait_for_selector("html[data-drawn=yes]")
    assert "/compare?" in page.url
    page.keyboard.press("Escape")
    assert names(page)
    assert page.inner_text("#compare-chosen") == "Compare chosen (2)"


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_nothing_sticks_out_and_text_can_be_read(open_page: Open, folder: Path, scheme: str) -> None:
    """At both widths; the contrast of every text colour to the page is at least 4.5 to 1 (WCAG 2, AA)."""
    page = open_page(folder, color_scheme=scheme)
    names(page)
    contrast = """(() => {
      const parts = (text) => text.match(/[\\d.]+/g).slice(0, 3).map((part) => part / 255)
        .map((c) => (c <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4));
      const light = (text) => parts(text).reduce((sum, c, n) => sum + c * [0.2126, 0.7152, 0.0722][n], 0);
      const page = light(getComputedStyle(document.body).backgroundColor);
      const shown = [...document.querySelectorAll('.status, .problem, .note, td, th button, .live, summary')];
      const ratio = (one) => { const ink = light(getComputedStyle(one).color);
        return (Math.max(ink, page) + 0.05) / (Math.min(ink, page) + 0.05); };
      return Math.min(...shown.map(ratio)); })()"""
    assert page.evaluate(contrast) >= 4.5
    assert all(fits(page, width) for width in (1280, 900, 400))
    page.goto(page.url.split("?")[0] + "compare?run=group/loss%3Dce,seed%3D0&run=hostile&run=stopped&run=broken")
    page.wait_for_selector("html[data-drawn=yes]")
    assert page.evaluate("window.attacked") is None
    assert page.inner_text(".problems li") == "broken: config.yaml is damaged"
    assert all(fits(page, width) for width in (1280, 400))


def test_an_empty_folder_says_how_to_start(open_page: Open, tmp_path: Path) -> None:
    """And a run that then starts appears by itself."""
    page = open_page(tmp_path)
    page.wait_for_selector("#empty:not([hidden])")
    assert f"fedretain run experiment.yaml --out {tmp_path}/first" in page.inner_text("#empty")
    report_runs.write_run(tmp_path / "first")
    page.wait_for_selector("table.runs tbody tr")
    assert names(page) == ["first"]


def test_an_open_report_goes_on_where_its_reader_is(open_page: Open, tmp_path: Path) -> None:
    """A round more: the curve grows in the same chart, the slider stays at round 2, what is seen, zoom and focus stay.

    Then the slider is put on the newest round (4), and moves on with it to the one measured next.
    """
    run = report_runs.write_run(tmp_path / "run", {**report_runs.CONFIG, "rounds": 9}, finished=False)
    page = open_page(tmp_path, "/run/run")
    page.wait_for_selector("html[data-drawn=yes]")
    slider = page.locator(".slider input")
    slider.press("Home")
    page.evaluate("document.querySelector('.chart').mark = 'the same'; scrollTo(0, 700)")
    page.evaluate("Plotly.relayout(document.querySelector('.chart'), {'xaxis.range': [1, 3]})")
    page.get_by_text("Configuration (config.yaml)").evaluate("summary => summary.parentElement.open = true")
    place = page.evaluate("document.querySelector('.slider').getBoundingClientRect().top")

    def next_round(number: int) -> None:
        with (run / "metrics.jsonl").open("a") as log:
            log.write(json.dumps({"round": number, "test_accuracy": number / 10, "seconds": 0.5}) + "\n")
        report_runs.write_forgetting(run, number, [5, 6], [5, 6], [[0.0, 0.1], [0.1, 0.0]])

    next_round(5)
    assert eventually(page, "document.querySelector('.chart').data[0].x.at(-1) === 5")
    assert page.evaluate("document.querySelector('.chart').mark") == "the same"
    assert page.evaluate("document.querySelector('.chart').layout.xaxis.range") == [1, 3]
    assert page.inner_text(".slider output") == "2"
    assert heatmaps(page) == [["0", "2"]] * 2
    assert abs(page.evaluate("document.querySelector('.slider').getBoundingClientRect().top") - place) < 2
    assert page.evaluate("document.activeElement === document.querySelector('.slider input')")
    assert page.evaluate("document.querySelector('details').open")
    assert "5 / 9" in page.inner_text("#states")
    slider.press("End")
    next_round(6)
    assert eventually(page, "document.querySelector('.slider output').textContent === '6'")
    assert heatmaps(page) == [["5", "6"]] * 2


def test_a_run_deleted_while_it_is_shown_is_missed(open_page: Open, tmp_path: Path) -> None:
    """The picture of the other stays, with a word about the missing one."""
    run = report_runs.write_run(tmp_path / "run")
    report_runs.write_run(tmp_path / "other")
    page = open_page(tmp_path, "/compare?run=run&run=other")
    page.wait_for_selector("html[data-drawn=yes]")
    shutil.rmtree(run)
    assert eventually(page, "document.querySelector('.problems')?.textContent.includes('run: no longer there')")
    assert page.locator(".chart .main-svg").count() > 0


def test_a_board_that_ended_is_told(browser: Any, tmp_path: Path) -> None:
    from fedretain.board import open_board

    report_runs.write_run(tmp_path / "run")
    board = open_board(tmp_path, port=0)
    thread = threading.Thread(target=board.serve)
    thread.start()
    page = browser.new_page()
    page.goto(board.address)
    assert names(page) == ["run"]
    board.stop()
    thread.join(timeout=10)
    assert eventually(page, "document.getElementById('live').textContent.startsWith('The board does not answer')")
    assert names(page) == ["run"]
    page.close()


@pytest.fixture
def training(tmp_path: Path) -> Iterator[tuple[Path, Any]]:
    """``fedretain run`` on the embedded digits in a process of its own, for far longer than the test takes."""
    experiment = {
        "name": "live",
        "rounds": 100_000,
        "participation": 2,
        "data": {"name": "digits"},
        "partition": {"kind": "dirichlet", "clients": 10, "alpha": 0.3},
        "model": {"name": "mlp", "hidden": [16]},
        "local": {"lr": 0.1, "epochs": 20, "batch_size": 32},
        "forgetting": {"every": 2},
        "evaluate": {"every": 1},
    }
    file = tmp_path / "experiment.yaml"
    file.write_text(yaml.safe_dump(experiment))
    folder = tmp_path / "runs"
    folder.mkdir()
    command = [sys.executable, "-m", "fedretain", "run", str(file), "--out", str(folder / "live"), "--quiet"]
    with (tmp_path / "said").open("wb") as said:
        process = subprocess.Popen(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, stdout=said, stderr=said)
    yield folder, process
    process.kill()
    process.wait()


def test_a_run_is_followed_while_it_trains(open_page: Open, training: tuple[Path, Any]) -> None:
    """It appears, its round goes up and its curve grows without a reload; killed, it is interrupted."""
    folder, process = training
    page = open_page(folder)
    page.evaluate("window.mark = 'not reloaded'")
    began = eventually(page, "document.querySelector('table.runs tbody tr.running') !== null", 120)
    assert began, f"exit status {process.poll()}: {(folder.parent / 'said').read_text()}"
    box = row(page, "live").get_by_role("checkbox")
    box.focus()
    done = "Number(document.querySelector('td.of-progress').innerText.split('/')[0])"
    assert eventually(page, f"{done} > 0", 60)
    before = page.evaluate(done)
    assert eventually(page, f"{done} > {before}")
    assert focused(page) == "Choose live"
    assert page.evaluate("window.mark") == "not reloaded"
    page.get_by_role("link", name="live").click()
    page.wait_for_selector("html[data-drawn=yes]")
    page.evaluate("window.mark = 'not reloaded'")
    drawn = "document.querySelector('.chart')?.data[0].x.length ?? 0"
    assert eventually(page, f"({drawn}) > 0")
    points = page.evaluate(drawn)
    assert eventually(page, f"({drawn}) > {points}", 60)
    assert page.evaluate("window.mark") == "not reloaded"
    assert "running" in page.inner_text("#states")
    process.kill()
    process.wait()
    assert eventually(page, "document.querySelector('#states').innerText.includes('interrupted')", 60)
    assert "--resume" in page.inner_text("#states")
