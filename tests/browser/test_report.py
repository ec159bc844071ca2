"""The report as a reader opens it: a file in a real browser, without a network."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest
from tests.report import conftest as report_runs

from fedretain.report import write_partition_page, write_report

playwright = pytest.importorskip("playwright.sync_api", reason="the browser tests need playwright")
pytestmark = pytest.mark.browser

HOSTILE = "<img src=x onerror='window.attacked = true'>&lt;</script><script>window.attacked = true</script>"


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One run's page and the comparison of two settings, the names in them hostile."""
    folder = tmp_path_factory.mktemp("reports")
    config = {**report_runs.CONFIG, "name": HOSTILE}
    runs = [
        report_runs.write_run(folder / "ce", config),
        report_runs.write_run(folder / "wsm", {**config, "loss": {"name": HOSTILE}}, forgetting=0.02),
    ]
    measured = report_runs.write_run(folder / "measured", {**config, "seed": 3})
    report_runs.write_measures(measured)
    return {
        "measured": write_report([measured], measured / "report.html"),
        "further": write_report([measured, runs[1]], folder / "further.html"),
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


def downloaded(page: Any, caption: str) -> tuple[str, list[list[str]]]:
    """The name and the cells of the CSV file that the button below a chart gives."""
    figure = page.locator("figure", has=page.get_by_text(caption, exact=True))
    with page.expect_download() as saved:
        figure.get_by_role("button", name="Download data (CSV)").click()
    with saved.value.path().open(encoding="utf-8", newline="") as file:
        return saved.value.suggested_filename, list(csv.reader(file))


@pytest.mark.parametrize("name", ["run", "comparison", "measured", "further"])
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


def test_curves_download_with_their_numbers(browser: Any, pages: dict[str, Path]) -> None:
    """The numbers of the conftest: 10 % at first, then 20 a round; forgetting 10 points, 2.5 to either side; 3 MB a
    round."""
    page, troubles = opened(browser, pages["run"])
    name, accuracy = downloaded(page, "Accuracy of the global model on the test data")
    assert name == "accuracy-of-the-global-model-on-the-test-data.csv"
    assert accuracy[0] == ["curve", "communication round", "test accuracy (%)"]
    assert accuracy[1:] == [["test accuracy", str(round), str(10 if round == 0 else 20 * round)] for round in range(5)]
    _, forgetting = downloaded(page, "Client forgetting: accuracy that local training costs on other clients' data")
    assert forgetting == [
        [
            *("curve", "communication round", "forgetting (percentage points)"),
            *("least forgetting model", "most forgetting model"),
        ],
        ["by model, mean", "2", "10", "7.5", "12.5"],
        ["by model, mean", "4", "10", "7.5", "12.5"],
        ["by data, mean", "2", "10", "", ""],
        ["by data, mean", "4", "10", "", ""],
    ]
    _, sent = downloaded(page, "Accuracy on the test data against the data sent between server and clients")
    assert [line[1:] for line in sent[1:]] == [["0", "10"], ["3", "20"], ["6", "40"], ["9", "60"], ["12", "80"]]
    assert troubles == []
    page.close()


def test_heatmaps_and_bars_download_with_their_numbers(browser: Any, pages: dict[str, Path]) -> None:
    """A heatmap gives all rounds of its slider, what was not measured stays empty; bars give counts and shares."""
    page, troubles = opened(browser, pages["run"])
    _, cells = downloaded(page, "Forgetting: accuracy lost by local training")
    assert cells == [
        ["round", "model of client i", "validation data of client k", "lost (percentage points)"],
        *(["2", "0", "0", "-5"], ["2", "0", "2", "20"], ["2", "2", "0", "10"], ["2", "2", "2", "0"]),
        *(["4", "2", "2", "0"], ["4", "2", "1", ""], ["4", "1", "2", "5"], ["4", "1", "1", ""]),
    ]
    _, bars = downloaded(page, "Class mix in the training data: each of 3 clients")
    assert bars[:4] == [
        ["client", "class", "training examples", "share of training examples (%)"],
        *(["0", "zero", "9", "90"], ["1", "zero", "0", "0"], ["2", "zero", "2", "20"]),
    ]
    assert len(bars) == 1 + 3 * 3
    assert troubles == []
    page.close()


def test_seeds_download_with_mean_and_deviation_and_names_as_written(browser: Any, tmp_path: Path) -> None:
    """0.2 and 0.4: mean 30 %, deviation √200 = 14.142136 %. The other setting has a comma and a quote in its name."""
    odd = {**report_runs.CONFIG, "loss": {"name": f'a "b", {HOSTILE}'}}
    runs = [
        report_runs.write_run(tmp_path / "0", accuracies=(0.2,)),
        report_runs.write_run(tmp_path / "1", {**report_runs.CONFIG, "seed": 1}, accuracies=(0.4,)),
        report_runs.write_run(tmp_path / "2", odd, accuracies=(0.5,)),
    ]
    page, troubles = opened(browser, write_report(runs, tmp_path / "report.html"))
    _, lines = downloaded(page, "Accuracy of the global model on the test data")
    assert lines == [
        ["curve", "communication round", "test accuracy (%)", "standard deviation", "seeds"],
        ["loss=ce", "1", "30", "14.142136", "2"],
        [f'loss=a "b", {HOSTILE}', "1", "50", "", ""],
    ]
    assert troubles == []
    page.close()


def test_pictures_of_further_measures_download_with_the_numbers_of_the_arrays(
    browser: Any, pages: dict[str, Path]
) -> None:
    """The arrays of the conftest: classes by round, the range of drift, cosines of both rounds behind the slider."""
    page, troubles = opened(browser, pages["measured"])
    _, accuracy = downloaded(page, "Which classes the global model knows: test accuracy by class")
    assert accuracy == [
        ["class", "communication round", "accuracy (%)"],
        *(["zero", "2", "90"], ["zero", "4", "100"], ["one", "2", "50"], ["one", "4", "0"], ["two", "2", "0"]),
        ["two", "4", ""],
    ]
    _, holders = downloaded(page, "Who was there: participants that hold each class")
    assert [line[2] for line in holders[1:]] == ["2", "2", "1", "1", "0", "2"]
    _, norms = downloaded(page, "Client drift: how far local training moves the model")
    assert norms[0][3:] == ["least participant", "greatest participant"]
    assert norms[1:] == [["mean", "2", "2", "1", "3"], ["mean", "4", "2", "2", "2"]]
    _, cosines = downloaded(page, "Which clients move the model the same way: cosines of their changes")
    assert cosines[0] == ["round", "change by client i", "change by client j", "cosine"]
    assert cosines[2] == ["2", "0", "2", "-0.25"]
    assert cosines[-2] == ["4", "2", "0", "0.75"]
    _, increase = downloaded(page, "Loss increase: what local training costs the previous round's clients")
    assert increase[1:] == [["mean", "2", "0.5", "0.5", "0.5"], ["mean", "4", "0.1", "-0.1", "0.3"]]
    _, fisher = downloaded(page, "Fisher agreement: whether pseudo data know which parameters earlier data need")
    assert fisher[1:] == [["mean", "2", "0.4", "0.2", "0.6"], ["mean", "4", "0.5", "0.5", "0.5"]]
    assert troubles == []
    page.close()


def test_the_slider_of_the_cosines_moves_them_alone(browser: Any, pages: dict[str, Path]) -> None:
    page, troubles = opened(browser, pages["measured"])
    section = page.locator("section", has=page.get_by_text("Who pulls in the same direction", exact=True))
    shown = "[...document.querySelectorAll('.chart')].find(c => c.data[0].zmin === -1).data[0].z[0][1]"
    assert page.evaluate(shown) == 0.75
    section.locator(".slider input").press("Home")
    assert page.evaluate(shown) == -0.25
    assert page.locator("figure.absent").count() == 0
    assert troubles == []
    page.close()
