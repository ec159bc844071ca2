from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedretain.errors import RunError
from fedretain.report import figures, partition_figure, read_run
from fedretain.report.comparison import group_runs
from fedretain.report.curves import ACCURACY

MakeRun = Callable[..., Path]


def test_reading_and_comparing_need_no_plotly() -> None:
    """A headless box trains and prints its table without plotly: importing the report must not load it."""
    code = "import sys, fedretain.report; sys.exit('plotly' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_accuracy_starts_at_the_initial_model_and_is_in_per_cent(make_run: MakeRun) -> None:
    (line,) = figures.accuracy_figure(read_run(make_run())).data
    assert line.x == (0, 1, 2, 3, 4)
    assert line.y == pytest.approx((10, 20, 40, 60, 80))


def test_loss_shows_test_and_training(make_run: MakeRun) -> None:
    test, train = figures.loss_figure(read_run(make_run())).data
    assert (test.name, train.name) == ("test loss", "local training loss")
    assert test.y == pytest.approx((2, 1, 2 / 3, 0.5), abs=1e-6)
    assert train.y == pytest.approx((1, 0.5, 1 / 3, 0.25), abs=1e-6)


def test_client_forgetting_has_both_averages_and_the_range_over_models(make_run: MakeRun) -> None:
    """Rounds 2 and 4, mean 10 points; the two participants lie 2.5 points to either side."""
    band, by_model, by_data = figures.client_forgetting_figure(read_run(make_run())).data
    assert by_model.x == by_data.x == (2, 4)
    assert by_model.y == by_data.y == pytest.approx((10, 10))
    assert by_model.line.dash != by_data.line.dash
    assert band.x == (2, 4, 4, 2)
    assert band.y == pytest.approx((7.5, 7.5, 12.5, 12.5))


def test_traffic_adds_up_in_megabytes(make_run: MakeRun) -> None:
    up, down = figures.traffic_figure(read_run(make_run())).data
    assert up.y == pytest.approx((2, 4, 6, 8))
    assert down.y == pytest.approx((1, 2, 3, 4))


def test_communication_adds_both_ways_from_the_initial_model_on(make_run: MakeRun) -> None:
    """2 MB up and 1 MB down a round: 3, 6, 9, 12 MB; the untrained model has 10 % right and cost nothing."""
    figure = figures.communication_figure(group_runs([make_run()]))
    (line,) = figure.data
    assert line.x == pytest.approx((0, 3, 6, 9, 12))
    assert line.y == pytest.approx((10, 20, 40, 60, 80))
    assert "MB" in figure.layout.xaxis.title.text


def test_what_the_bands_show_is_kept_as_numbers(make_run: MakeRun, experiment: Any) -> None:
    """One run: the participants' forgetting 10 ∓ 2.5 points. Seeds 0.2 and 0.4: deviation 14.142 over two runs."""
    run = make_run("a", experiment(), accuracies=(0.2, 0.5))
    _, by_model, by_data = figures.client_forgetting_figure(read_run(run)).data
    assert by_model.meta == {
        "least forgetting model": [pytest.approx(7.5)],
        "most forgetting model": [pytest.approx(12.5)],
    }
    assert by_data.meta is None
    runs = [run, make_run("b", experiment(seed=1), accuracies=(0.4, 0.5))]
    _, line = figures.seeds_figure(group_runs(runs), ACCURACY).data
    assert line.meta == {"standard deviation": [pytest.approx(14.142136), 0], "seeds": [2, 2]}


def test_every_figure_says_what_is_seen_and_in_which_unit(make_run: MakeRun) -> None:
    run = read_run(make_run())
    drawn = [
        figures.accuracy_figure(run),
        figures.loss_figure(run),
        figures.client_forgetting_figure(run),
        figures.forgettable_examples_figure(run),
        figures.traffic_figure(run),
        figures.communication_figure(group_runs([run])),
        partition_figure(run.class_counts, run.class_names),
    ]
    for figure in drawn:
        assert figure.layout.title.text
        assert figure.layout.xaxis.title.text
        assert figure.layout.yaxis.title.text


def test_curves_over_seeds_are_means_with_a_band(make_run: MakeRun, experiment: Any) -> None:
    """Accuracies 0.2 and 0.4 in round 1: mean 30 %, deviation √2 · 10 = 14.142 %; one seed: no band."""
    runs = [
        make_run("a", experiment(), accuracies=(0.2, 0.5)),
        make_run("b", experiment(seed=1), accuracies=(0.4, 0.5)),
        make_run("c", experiment(loss={"name": "wsm"}), accuracies=(0.6, 0.7)),
    ]
    figure = figures.seeds_figure(group_runs(runs), ACCURACY)
    band, ce, wsm = figure.data
    assert ce.y == pytest.approx((30, 50))
    assert band.y == pytest.approx((30 - 14.142136, 50, 50, 30 + 14.142136), abs=1e-5)
    assert ce.customdata[0] == " ± 14.14"
    assert (wsm.y, wsm.customdata) == (pytest.approx((60, 70)), ("", ""))
    assert ce.line.color != wsm.line.color


def test_more_settings_than_colours_stay_distinct() -> None:
    styles = [figures.line_style(number) for number in range(18)]
    assert len(set(styles)) == 18


def test_partition_bars_are_shares_of_each_client() -> None:
    """Client 0 holds 9 and 1 of 10 examples: 90 % and 10 %; client 1 nothing at all: empty bars, no NaN."""
    figure = partition_figure([[9, 1], [0, 0]], ["cat", "dog"])
    cat, dog, sizes = figure.data
    assert (cat.name, cat.x, dog.x) == ("cat", (90.0, 0.0), (10.0, 0.0))
    assert cat.y == ("0", "1")
    assert sizes.text == ("n = 10", "n = 0")
    assert "each of 2 clients" in figure.layout.title.text


def test_many_clients_are_shown_by_a_selection_that_the_title_names() -> None:
    figure = partition_figure(np.ones((1000, 3), dtype=int))
    assert "40 of 1000 clients" in figure.layout.title.text
    assert len(figure.data[0].y) == 40
    assert (figure.data[0].y[0], figure.data[0].y[-1]) == ("0", "999")


def test_many_classes_need_no_legend_and_keep_their_names() -> None:
    figure = partition_figure(np.eye(30, dtype=int))
    assert figure.layout.showlegend is False
    assert len({bar.marker.color for bar in figure.data[:30]}) == 30
    assert figure.data[29].name == "class 29"


def test_class_counts_of_a_wrong_shape_are_refused() -> None:
    with pytest.raises(RunError, match=r"\[clients, classes\]"):
        partition_figure([1, 2, 3])


def test_names_are_shown_as_written() -> None:
    figure = partition_figure([[1]], ["<b>cat & dog</b>"], "<i>mine</i>")
    assert figure.data[0].name == "&lt;b&gt;cat &amp; dog&lt;/b&gt;"
    assert figure.layout.title.text.startswith("&lt;i&gt;mine&lt;/i&gt;")


@pytest.mark.parametrize(("count", "most"), [(5, 40), (40, 40), (41, 40), (199, 40), (1000, 2), (3, 1)])
def test_a_selection_is_ordered_distinct_and_no_larger_than_allowed(count: int, most: int) -> None:
    chosen = figures.evenly_spaced(count, most)
    assert chosen == sorted(set(chosen))
    assert len(chosen) == min(count, most)
    assert chosen[0] == 0
    assert most == 1 or chosen[-1] == count - 1
