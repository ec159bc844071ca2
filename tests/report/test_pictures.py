from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedretain.errors import MissingExtraError, RunError
from fedretain.report import pictures, write_pictures
from fedretain.report.comparison import group_runs

pytest.importorskip("matplotlib", reason="the pictures need matplotlib: pip install 'fedretain[figures]'")

MakeRun = Callable[..., Path]
NAMES = ["accuracy", "forgetting", "loss", "forgettable-examples", "communication", "heatmaps", "partition"]


def drawn(runs: list[Path]) -> dict[str, Any]:
    return dict(pictures.draw_pictures(group_runs(runs)))


def test_every_picture_is_a_png_and_a_vector_pdf(make_run: MakeRun, tmp_path: Path) -> None:
    """No bitmap in the PDF, and no Type 3 font."""
    files = write_pictures([make_run()], tmp_path / "new" / "pictures")
    assert [file.name for file in files] == [f"{name}.{kind}" for name in NAMES for kind in ("png", "pdf")]
    assert sorted(files) == sorted((tmp_path / "new" / "pictures").iterdir())
    for file in files:
        content = file.read_bytes()
        if file.suffix == ".png":
            assert content.startswith(b"\x89PNG")
        else:
            assert content.startswith(b"%PDF")
            assert b"/Subtype /Image" not in content
            assert b"/Type3" not in content


def test_the_same_run_gives_the_same_bytes(make_run: MakeRun, tmp_path: Path) -> None:
    """The partition alone, for time's sake."""
    run = make_run()
    shutil.rmtree(run / "forgetting")
    (run / "metrics.jsonl").unlink()
    first, second = (write_pictures([run], tmp_path / folder) for folder in ("first", "second"))
    assert [file.name for file in first] == ["partition.png", "partition.pdf"]
    assert [file.read_bytes() for file in first] == [file.read_bytes() for file in second]


def test_curves_are_means_with_a_band_over_seeds(make_run: MakeRun, experiment: Any) -> None:
    """Round 1: 20 and 40 %, mean 30, band 30 ± 14.142; round 2: 50 and 50 %. The second setting has one seed."""
    runs = [
        make_run("a", experiment(), accuracies=(0.2, 0.5)),
        make_run("b", experiment(seed=1), accuracies=(0.4, 0.5)),
        make_run("c", experiment(loss={"name": "wsm"}), accuracies=(0.6, 0.7)),
    ]
    figure = drawn(runs)["accuracy"]
    (axes,) = figure.axes
    ce, wsm = axes.lines
    np.testing.assert_allclose(ce.get_xydata(), [[1, 30], [2, 50]])
    np.testing.assert_allclose(wsm.get_xydata(), [[1, 60], [2, 70]])
    (band,) = axes.collections
    heights = band.get_paths()[0].vertices[:, 1]
    assert (heights.min(), heights.max()) == pytest.approx((30 - 200**0.5, 50))
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["loss=ce", "loss=wsm"]
    assert axes.get_ylabel() == "test accuracy (%)"


def test_heatmaps_share_a_zero_centred_scale_with_cross_entropy_on_top(make_run: MakeRun, experiment: Any) -> None:
    """Only round 2 is left, F[k, i] = [[−5, f], [2f, 0]] points, f = 30 for ce, 1 for wsm; scale ± 60 for both.

    Drawn with the model on y: model 0 has −5 and 2f, model 2 has f and 0. Accuracy is 90 − F.
    """
    runs = [
        make_run("b", experiment(loss={"name": "wsm"}), forgetting=0.01),
        make_run("a", experiment(), forgetting=0.3),
    ]
    for run in runs:
        (run / "forgetting" / "round-000004.npz").unlink()
    panels = drawn(runs)["heatmaps"].axes[:4]
    assert [panel.get_title(loc="left").split("\n")[0] for panel in panels] == [
        *["loss=ce, round 2"] * 2,
        *["loss=wsm, round 2"] * 2,
    ]
    forgetting, accuracy, other, _ = (panel.collections[0] for panel in panels)
    assert forgetting.get_clim() == other.get_clim() == pytest.approx((-60, 60))
    assert accuracy.get_clim() == (0, 100)
    np.testing.assert_allclose(forgetting.get_array(), [[-5, 60], [30, 0]], atol=1e-9)
    np.testing.assert_allclose(accuracy.get_array(), [[95, 30], [60, 90]])
    np.testing.assert_allclose(other.get_array(), [[-5, 2], [1, 0]], atol=1e-9)
    middle = forgetting.get_cmap()(0.5)[:3]
    assert min(middle) > 0.95


def test_cells_without_data_are_blank_and_own_data_have_a_dot(make_run: MakeRun) -> None:
    """Round 4: models 2 and 1 on the data of clients 2 and 1; client 1 has no validation data."""
    cells, own = drawn([make_run()])["heatmaps"].axes[0].collections
    np.testing.assert_array_equal(np.ma.getmaskarray(cells.get_array()), [[False, True], [False, True]])
    np.testing.assert_allclose(own.get_offsets(), [[0.5, 0.5], [1.5, 1.5]])


def test_many_settings_take_several_heatmaps_on_one_scale(make_run: MakeRun, experiment: Any) -> None:
    """Seven settings, six to a picture; the last forgets most, half of 40 points in round 4: the scale of both."""
    runs = [
        make_run(str(n), experiment(local={"lr": n + 1}), forgetting=0.4 if n == 6 else 0.1)
        for n in range(pictures.MOST_SETTINGS + 1)
    ]
    figures = drawn(runs)
    limits = [figures[name].axes[0].collections[0].get_clim() for name in ("heatmaps-1", "heatmaps-2")]
    assert limits == [pytest.approx((-20, 20))] * 2
    assert "heatmaps" not in figures


def test_bars_are_shares_of_each_client(make_run: MakeRun) -> None:
    """Client 0 holds 9, 1, 0 of 10 examples; three settings would share this partition, so it is drawn once."""
    figure = drawn([make_run()])["partition"]
    (axes,) = figure.axes
    widths = np.array([[bar.get_width() for bar in bars] for bars in axes.containers])
    np.testing.assert_allclose(widths.T, [[90, 10, 0], [0, 50, 50], [20, 20, 60]])
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["zero", "one", "two"]


def test_partitions_that_differ_stand_side_by_side(make_run: MakeRun, experiment: Any) -> None:
    """Two losses on one split, and one loss on another split with more clients and fewer classes."""
    split = {"kind": "dirichlet", "clients": 50, "alpha": 100}
    runs = [
        make_run("a", experiment()),
        make_run("b", experiment(loss={"name": "wsm"})),
        make_run("c", experiment(partition=split)),
    ]
    np.savez(runs[2] / "partition.npz", class_counts=np.ones((50, 2), dtype=int))
    figure = drawn(runs)["partition"]
    first, second = figure.axes
    assert first.get_title(loc="left").split() == ["partition.clients=3,", "partition.alpha=0.1"]
    assert "30 of 50 clients" in second.get_title(loc="left")
    assert len(figure.legends[0].get_texts()) == 3


def test_names_are_drawn_as_written(make_run: MakeRun, experiment: Any, tmp_path: Path) -> None:
    """Dollar signs start no formula, and a sign that the font lacks is no error."""
    losses, classes = ["🎉 $", "$\\frac{$ _<b>"], ["_$\\frac{$", "$x^$"]
    runs = [make_run(str(n), experiment(loss={"name": loss}), accuracies=(0.2,)) for n, loss in enumerate(losses)]
    for run in runs:
        np.savez(run / "partition.npz", class_counts=np.array([[1, 2]]), class_names=np.array(classes))
    assert len(write_pictures(runs, tmp_path / "pictures")) == 2 * 5
    figures = drawn(runs)
    shown = {
        name: [text.get_text().replace("\\$", "$") for text in figures[name].legends[0].get_texts()]
        for name in ("accuracy", "partition")
    }
    assert shown == {"accuracy": [f"loss={loss}" for loss in losses], "partition": classes}


def test_a_run_without_rounds_has_no_picture(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("seed: 1\n")
    assert write_pictures([tmp_path], tmp_path / "pictures") == []
    assert not (tmp_path / "pictures").exists()


def test_without_matplotlib_the_error_names_the_extra(
    make_run: MakeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'fedretain\[figures\]'"):
        write_pictures([make_run()], tmp_path / "pictures")
    assert not (tmp_path / "pictures").exists()


def test_importing_the_report_loads_no_matplotlib() -> None:
    code = "import sys, fedretain.report; sys.exit('matplotlib' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_full_disk_is_said_with_the_file(make_run: MakeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    run = make_run()
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(RunError, match=r"accuracy\.png cannot be written.*No space left"):
        write_pictures([run], tmp_path / "pictures")
    assert list((tmp_path / "pictures").iterdir()) == []
