"""The report as a reader opens it: a file in a real browser, without a network."""

from __future__ import annotations

import importlib.util
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fedretain.report import write_partition_page, write_report

playwright = pytest.importorskip("playwright.sync_api", reason="the browser tests need playwright")
pytestmark = pytest.mark.browser

# The run directories of tests/report: its conftest is not on the path of this folder.
_FILE = Path(__file__).parents[1] / "report" / "conftest.py"
_SPEC = importlib.util.spec_from_file_location("report_runs", _FILE)
assert _SPEC is not None
assert _SPEC.loader is not None
report_runs = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(report_runs)

HOSTILE = "<img src=x onerror='window.attacked = true'>&lt;</script><script>window.attacked = true</script>"


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if chromium is None:
        pytest.skip("no Chromium found: install the package chromium to run the browser tests")
    arguments = ["--no-sandbox", "--disable-gpu", "--disable-background-networking"]
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=chromium, args=arguments)
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One run's page and the comparison of two settings, the names in them hostile."""
    folder = tmp_path_factory.mktemp("reports")
    config = {**report_runs.CONFIG, "name": HOSTILE}
    runs = [
        report_runs.write_run(folder / "ce", config),
        report_runs.write_run(folder / "wsm", {**config, "loss": {"name": HOSTILE}}, forgetting=0.02),
    ]
    return {
        "run": write_report(runs[:1], runs[0] / "report.html"),
        "comparison": write_report(runs, folder / "report.html"),
    }


def opened(browser: Any, file: Path, **options: Any) -> tuple[Any, list[str]]:
    """The page once drawn, and what went wrong on the way: console errors, exceptions, requests."""
    page = browser.new_page(**options)
    troubles: list[str] = []
    page.on("console", lambda m: troubles.append(m.text) if m.type in ("error", "warning") else None)
    page.on("pageerror", lambda error: troubles.append(str(error)))
    local = (file.as_uri(), "data:", "blob:")
    page.on("request", lambda r: None if r.url.startswith(local) else troubles.append(r.url))
    page.goto(file.as_uri())
    page.wait_for_selector("html[data-drawn=yes]")
    return page, troubles


def eventually(page: Any, expression: str) -> bool:
    """Whether the expression comes true within five seconds.

    Playwright's own wait evaluates text inside the page, which the page's content policy forbids.
    """
    for _ in range(100):
        if page.evaluate(expression):
            return True
        page.wait_for_timeout(50)
    return False


def heatmaps(page: Any) -> list[Any]:
    """The cells of every heatmap as plotly holds them."""
    found: list[Any] = page.evaluate(
        "[...document.querySelectorAll('.chart')].filter(c => c.data[0].type === 'heatmap')"
        ".map(c => ({x: c.data[0].x, y: c.data[0].y, z: c.data[0].z}))"
    )
    return found


@pytest.mark.parametrize("name", ["run", "comparison"])
def test_the_page_opens_from_a_file_without_error_or_network(browser: Any, pages: dict[str, Path], name: str) -> None:
    """Also: nothing sticks out sideways, and names that look like markup are shown, not obeyed."""
    page, troubles = opened(browser, pages[name])
    for width in (1280, 400):
        page.set_viewport_size({"width": width, "height": 900})
        assert eventually(page, f"document.documentElement.scrollWidth <= {width}")
    assert troubles == []
    assert page.evaluate("window.attacked") is None
    assert HOSTILE in page.inner_text("h1") + page.inner_text("body")
    page.close()


def test_class_names_are_shown_as_written(browser: Any, tmp_path: Path) -> None:
    """Plotly reads a little HTML in its texts: here it must not."""
    names = [HOSTILE, "<b>bold</b> %{x}"]
    page, troubles = opened(browser, write_partition_page([[1, 2]], names, tmp_path / "page.html", "split"))
    assert page.locator(".legendtext").all_text_contents() == names
    assert page.evaluate("window.attacked") is None
    assert troubles == []
    page.close()


def test_the_slider_changes_both_heatmaps(browser: Any, pages: dict[str, Path]) -> None:
    """Round 4 comes first (models 2 and 1); one step back is round 2 (models 0 and 2, F from the conftest):
    forgetting −5, 20 / 10, 0 and accuracy 90 minus that."""
    page, troubles = opened(browser, pages["run"])
    slider = page.locator(".slider input")
    assert page.inner_text(".slider output") == "4"
    assert [cells["y"] for cells in heatmaps(page)] == [["2", "1"], ["2", "1"]]
    before = page.locator(".chart .hm image").first.get_attribute("href")
    slider.press("ArrowLeft")
    assert page.inner_text(".slider output") == "2"
    forgetting, accuracy = heatmaps(page)
    assert forgetting == {"x": ["0", "2"], "y": ["0", "2"], "z": [[-5, 20], [10, 0]]}
    assert accuracy["z"] == [[95, 70], [80, 90]]
    assert page.locator(".chart .hm image").first.get_attribute("href") != before
    slider.press("ArrowRight")
    assert [cells["y"] for cells in heatmaps(page)] == [["2", "1"], ["2", "1"]]
    assert troubles == []
    page.close()


def test_one_slider_moves_every_setting_of_a_comparison(browser: Any, pages: dict[str, Path]) -> None:
    page, troubles = opened(browser, pages["comparison"])
    page.locator(".slider input").press("Home")
    assert [cells["x"] for cells in heatmaps(page)] == [["0", "2"]] * 4
    assert troubles == []
    page.close()


def test_a_setting_that_did_not_measure_a_round_says_so(browser: Any, tmp_path: Path) -> None:
    """The second run lacks round 4: its two heatmaps step aside there and come back in round 2."""
    runs = [
        report_runs.write_run(tmp_path / "ce"),
        report_runs.write_run(tmp_path / "wsm", {**report_runs.CONFIG, "loss": {"name": "wsm"}}),
    ]
    (runs[1] / "forgetting" / "round-000004.npz").unlink()
    page, troubles = opened(browser, write_report(runs, tmp_path / "report.html"))
    assert page.locator("figure.absent").count() == 2
    page.locator(".slider input").press("Home")
    assert page.locator("figure.absent").count() == 0
    assert troubles == []
    page.close()


def test_figures_follow_the_colour_scheme(browser: Any, pages: dict[str, Path]) -> None:
    """A light page has dark text in its figures; when the reader's system turns dark, they turn light."""
    page, troubles = opened(browser, pages["run"], color_scheme="light")
    ink = "document.querySelector('.chart').layout.font.color"
    light = page.evaluate(ink)
    page.emulate_media(color_scheme="dark")
    dark = page.evaluate("getComputedStyle(document.body).color")
    assert dark != light
    assert eventually(page, f"{ink} === '{dark}'")
    assert troubles == []
    page.close()


def test_the_comparison_links_to_the_runs_own_page(browser: Any, pages: dict[str, Path]) -> None:
    page, _ = opened(browser, pages["comparison"])
    page.click("a")
    page.wait_for_selector("html[data-drawn=yes]")
    assert page.url == pages["run"].as_uri()
    page.close()
