"""Pictures of forgetting.measures: the numbers in them are those of the arrays in the run directory."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedretain.errors import RunError
from fedretain.forgetting import Vanishing
from fedretain.report import measures, pictures, read_run, words, write_pictures, write_report
from fedretain.report.comparison import group_runs
from fedretain.report.curves import MEASURE_CURVES
from fedretain.report.further import comparison_sections, run_sections

_SPEC = importlib.util.spec_from_file_location("report_runs", Path(__file__).with_name("conftest.py"))
assert _SPEC is not None
assert _SPEC.loader is not None
report_runs = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(report_runs)

MakeRun = Callable[..., Path]


@pytest.fixture
def measured(make_run: MakeRun) -> Path:
    path = make_run()
    report_runs.write_measures(path)
    return path


def caption(figure: Any) -> str:
    text: str = figure.layout.title.text
    return text


def test_the_history_of_classes_is_that_of_the_arrays(measured: Path) -> None:
    """Round 2: two holders of class zero, one of one, none of two. Round 4: 2, 1 and 2."""
    history = measures.class_history(read_run(measured))
    assert history is not None
    assert history.rounds == [2, 4]
    assert history.names == ("zero", "one", "two")
    np.testing.assert_array_equal(history.accuracy, [[0.9, 0.5, 0.0], [1.0, 0.0, np.nan]])
    assert history.holders.tolist() == [[2, 1, 0], [2, 1, 2]]
    assert history.vanished == [Vanishing(2, 2, 0), Vanishing(4, 1, 1)]


def test_class_maps_show_rounds_as_columns_and_mark_the_absent_and_the_vanished(measured: Path) -> None:
    history = measures.class_history(read_run(measured))
    assert history is not None
    cells, absent, lost = measures.class_accuracy_figure(history).data
    assert (list(cells.x), list(cells.y)) == (["2", "4"], ["zero", "one", "two"])
    assert [list(row) for row in cells.z] == [[90, 100], [50, 0], [0, None]]
    assert list(zip(absent.x, absent.y, strict=True)) == [("2", "two")]
    assert list(zip(lost.x, lost.y, strict=True)) == [("2", "two"), ("4", "one")]
    presence = measures.class_presence_figure(history, "loss=<b>")
    assert [list(row) for row in presence.data[0].z] == [[2, 2], [1, 1], [0, 2]]
    assert caption(presence) == "loss=&lt;b&gt; – who was there: participants that hold each class"


def test_many_rounds_and_classes_are_thinned_with_the_ends_kept() -> None:
    shape = (300, 250)
    history = measures.ClassHistory(
        list(range(1, 301)), tuple(map(str, range(250))), np.ones(shape), np.ones(shape), np.ones(shape, dtype=int)
    )
    shown = history.thinned()
    assert (len(shown.rounds), len(shown.names)) == (measures.MOST_COLUMNS, measures.MOST_CLASSES)
    assert (shown.rounds[0], shown.rounds[-1], shown.names[-1]) == (1, 300, "249")
    assert shown.accuracy.shape == (measures.MOST_COLUMNS, measures.MOST_CLASSES)


def test_curves_are_means_in_the_range_of_their_values(measured: Path) -> None:
    """Norms 1, 3 and 2, 2; one pair of clients a round; loss increases 0.5 and −0.1, 0.3; agreements 0.2, 0.6; 0.5."""
    run = read_run(measured)
    expected = {
        measures.drift_norm_figure: ([2, 2], [1, 2], [3, 2]),
        measures.drift_cosine_figure: ([-0.25, 0.75], [-0.25, 0.75], [-0.25, 0.75]),
        measures.loss_increase_figure: ([0.5, 0.1], [0.5, -0.1], [0.5, 0.3]),
        measures.fisher_figure: ([0.4, 0.5], [0.2, 0.5], [0.6, 0.5]),
    }
    for draw, (mean, low, high) in expected.items():
        band, line = draw(run).data
        assert list(line.x) == [2, 4]
        assert list(line.y) == pytest.approx(mean)
        assert list(line.meta.values()) == [pytest.approx(low), pytest.approx(high)]
        assert list(band.y) == pytest.approx([*low, *reversed(high)])
    absent, held = measures.class_forgetting_figure(run).data
    assert (list(absent.y), list(held.y)) == ([30, 40], [5, 0])


def test_cosines_have_a_frame_a_round(measured: Path) -> None:
    figure = measures.cosine_heatmap(read_run(measured))
    assert [frame.name for frame in figure.frames] == ["2", "4"]
    assert [list(row) for row in figure.frames[0].data[0].z] == [[1, -0.25], [-0.25, 1]]
    assert [list(row) for row in figure.data[0].z] == [[1, 0.75], [0.75, 1]]
    assert (figure.data[0].zmin, figure.data[0].zmax) == (-1, 1)
    assert list(figure.data[0].x) == ["0", "2"]


def test_only_what_was_measured_is_shown(measured: Path, make_run: MakeRun) -> None:
    assert run_sections(read_run(make_run("bare"))) == []
    assert comparison_sections(group_runs([make_run("bare2")]), "") == []
    titles = [section.title for section in run_sections(read_run(measured))]
    assert titles == [
        "Which classes vanish, when, and who was absent",
        "What local training costs by class",
        "Client drift",
        "Who pulls in the same direction",
        "What becomes of earlier clients' data",
    ]
    for file in (measured / "fisher").iterdir():
        file.unlink()
    last = run_sections(read_run(measured))[-1]
    assert [caption(figure) for figure in last.figures] == [
        "Loss increase: what local training costs the previous round's clients"
    ]


def test_a_comparison_has_every_measured_curve_and_the_class_maps(measured: Path, make_run: MakeRun) -> None:
    """The second setting measured nothing: the curves have one line, the maps are those of the first."""
    other = make_run("wsm", {**report_runs.CONFIG, "loss": {"name": "wsm"}})
    curves, maps = comparison_sections(group_runs([measured, other]), "")
    assert [caption(figure) for figure in curves.figures] == [curve.title for curve in MEASURE_CURVES]
    assert all(len(figure.data) == 1 for figure in curves.figures)
    assert [list(figure.data[0].y) for figure in curves.figures][3] == [2, 2]
    assert len(maps.figures) == 2
    assert write_report([measured, other], measured / "both.html").exists()


def test_what_vanished_in_words() -> None:
    found = [Vanishing(2, 2, 0), Vanishing(4, 1, 1), Vanishing(6, 1, 0)]
    assert words.about_vanished([], ()) == "No class vanished in the measured rounds."
    assert words.about_vanished(found[:1], ("a", "b", "c")) == (
        "A class vanished once in the measured rounds, 1 of them while no participant held it."
    )
    assert words.about_vanished(found, ("a", "b", "c")) == (
        "A class vanished 3 times in the measured rounds, 2 of them while no participant held it. Most often: b (2)."
    )


def test_a_file_that_lacks_an_array_is_named(measured: Path) -> None:
    np.savez(measured / "drift" / "round-000004.npz", models=np.array([0]))
    with pytest.raises(RunError, match=r"drift/round-000004\.npz: no array norms"):
        measures.drift_norm_figure(read_run(measured))


def test_pictures_for_papers_hold_the_same_numbers(measured: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="the pictures need matplotlib: pip install 'fedretain[figures]'")
    drawn = dict(pictures.draw_pictures(group_runs([measured])))
    for curve in MEASURE_CURVES:
        (line,) = drawn[curve.name].axes[0].lines
        assert line.get_xdata().tolist() == [2, 4]
    np.testing.assert_allclose(drawn["drift-cosine"].axes[0].lines[0].get_ydata(), [-0.25, 0.75])
    np.testing.assert_allclose(drawn["class-forgetting-absent"].axes[0].lines[0].get_ydata(), [30, 40])
    accuracy, holders = drawn["classes"].axes[:2]
    cells, absent, lost = accuracy.collections
    np.testing.assert_allclose(cells.get_array().filled(-1), [[90, 100], [50, 0], [0, -1]])
    np.testing.assert_allclose(absent.get_offsets(), [[0.5, 2.5]])
    np.testing.assert_allclose(lost.get_offsets(), [[0.5, 2.5], [1.5, 1.5]])
    np.testing.assert_allclose(holders.collections[0].get_array(), [[2, 2], [1, 1], [0, 2]])
    written = {file.name for file in write_pictures([measured], tmp_path / "pictures")}
    assert {"classes.png", "classes.pdf", "loss-increase.pdf", "fisher-agreement.png"} <= written
