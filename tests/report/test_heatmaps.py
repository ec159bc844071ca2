from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from fedretain.report import ForgettingRound, heatmaps, read_run

MakeRun = Callable[..., Path]


def matrix(round: int, models: int, data: int, value: float = 0.1) -> ForgettingRound:
    forgetting = np.full((data, models), value)
    after = 0.9 - forgetting
    return ForgettingRound(
        round, np.arange(models), np.arange(data)[::-1].copy(), np.full(data, 0.9), after, forgetting
    )


def test_models_stand_on_y_and_data_on_x(make_run: MakeRun) -> None:
    """Stored F[k, i] = [[−5, 10], [20, 0]] points for data k and model i; drawn with the model's row first:
    model 0 on data 0 and 2 gives −5, 20; model 2 gives 10, 0. Accuracy is 90 − F."""
    matrices = heatmaps.read_rounds(read_run(make_run()), [2])
    forgetting, own = heatmaps.forgetting_heatmap(matrices, 20.0).data
    assert (forgetting.x, forgetting.y) == (("0", "2"), ("0", "2"))
    np.testing.assert_allclose(np.array(forgetting.z, dtype=float), [[-5, 20], [10, 0]])
    assert (own.x, own.y) == (("0", "2"), ("0", "2"))
    accuracy, _ = heatmaps.accuracy_heatmap(matrices).data
    np.testing.assert_allclose(np.array(accuracy.z, dtype=float), [[95, 70], [80, 90]])


def test_each_measured_round_is_a_frame_and_the_last_is_drawn(make_run: MakeRun) -> None:
    """Round 4 has models 2 and 1; client 1 has no validation data, so its column is blank."""
    run = read_run(make_run())
    figure = heatmaps.forgetting_heatmap(heatmaps.read_rounds(run, heatmaps.rounds_to_show([run])), 20.0)
    assert [frame.name for frame in figure.frames] == ["2", "4"]
    assert figure.data[0].y == ("2", "1")
    assert [list(row) for row in figure.data[0].z] == [[0.0, None], [5.0, None]]


def test_the_forgetting_scale_is_centred_on_zero(make_run: MakeRun) -> None:
    """The largest of all cells of rounds 2 and 4 is 0.2, so that the scale runs from −20 to 20 points."""
    matrices = heatmaps.read_rounds(read_run(make_run()), [2, 4])
    limit = heatmaps.forgetting_limit(matrices)
    assert limit == pytest.approx(20)
    cells = heatmaps.forgetting_heatmap(matrices, limit).data[0]
    assert (cells.zmin, cells.zmax) == (-limit, limit)
    assert cells.colorscale[3] == (0.5, "#F7F7F7")


def test_the_scale_of_no_forgetting_at_all_has_a_width() -> None:
    assert heatmaps.forgetting_limit([matrix(1, 2, 2, 0.0)]) == 1.0
    assert heatmaps.forgetting_limit([matrix(1, 2, 2, np.nan)]) == 1.0
    assert heatmaps.forgetting_limit([]) == 1.0


def test_frames_carry_axes_that_end_at_their_own_cells() -> None:
    figure = heatmaps.accuracy_heatmap([matrix(1, 2, 3), matrix(2, 4, 5)])
    assert figure.frames[0].layout.xaxis.range == (-0.5, 2.5)
    assert figure.frames[0].layout.yaxis.range == (1.5, -0.5)
    assert figure.layout.yaxis.range == (3.5, -0.5)


def test_a_large_matrix_is_cut_but_keeps_the_models_own_data() -> None:
    """200 models and 500 data clients: 60 models stay, with their 60 own data clients and 40 others."""
    small = heatmaps.cut(matrix(1, 200, 500))
    assert (len(small.models), len(small.data)) == (60, 100)
    assert small.forgetting.shape == small.after.shape == (100, 60)
    assert set(small.models) <= set(small.data)
    assert len(set(small.data)) == 100


def test_a_cut_moves_no_value() -> None:
    """Every cell is 1000 · data client + model client, before and after the cut."""
    models, data = np.arange(80) * 2, np.arange(300)
    cells = 1000.0 * data[:, None] + models[None, :]
    whole = ForgettingRound(1, models, data, 1000.0 * data, cells, cells)
    small = heatmaps.cut(whole)
    expected = 1000.0 * small.data[:, None] + small.models[None, :]
    np.testing.assert_array_equal(small.forgetting, expected)
    np.testing.assert_array_equal(small.after, expected)
    np.testing.assert_array_equal(small.before, 1000.0 * small.data)


def test_many_rounds_are_thinned_out_with_the_first_and_the_last(make_run: MakeRun) -> None:
    path = make_run()
    for round in range(5, 200):
        shutil.copy(path / "forgetting" / "round-000002.npz", path / "forgetting" / f"round-{round:06d}.npz")
    rounds = heatmaps.rounds_to_show([read_run(path)])
    assert len(rounds) == heatmaps.MOST_ROUNDS
    assert (rounds[0], rounds[-1]) == (2, 199)


def test_large_matrices_leave_room_for_fewer_rounds(make_run: MakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two matrices of 2 × 2 cells a round are 8 cells; a page of 24 cells holds 3 rounds."""
    monkeypatch.setattr(heatmaps, "MOST_CELLS", 24)
    path = make_run()
    for round in (5, 6, 7):
        shutil.copy(path / "forgetting" / "round-000002.npz", path / "forgetting" / f"round-{round:06d}.npz")
    assert heatmaps.rounds_to_show([read_run(path)]) == [2, 5, 7]


def test_a_label_from_a_run_is_shown_as_written() -> None:
    figure = heatmaps.accuracy_heatmap([matrix(1, 2, 2)], "loss=<b>")
    assert figure.layout.title.text == "loss=&lt;b&gt; – accuracy after local training"
