"""Client × client heatmaps of forgetting and accuracy, one frame a round."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from fedretain.report.figures import blank_figure, escape, evenly_spaced, graph_objects
from fedretain.report.reading import FloatArray, ForgettingRound, IntArray, RunData, read_forgetting

MOST_ROUNDS = 40
MOST_MODELS = 60
MOST_DATA = 100
# A page of about ten megabytes beside plotly itself: a cell takes some six characters of JSON.
MOST_CELLS = 1_500_000

# Colour-blind-safe: blue – white – red, lightness falling to both sides of zero (after ColorBrewer's RdBu).
FORGETTING_COLOURS = ("#2166AC", "#67A9CF", "#D1E5F0", "#F7F7F7", "#FDDBC7", "#EF8A62", "#B2182B")
ACCURACY_COLOURS = "Viridis"
_NOT_MEASURED = "#B4B4B4"


def rounds_to_show(runs: Sequence[RunData]) -> list[int]:
    """The rounds of the slider: all in which any run measured forgetting, thinned out when too many."""
    measured = sorted({round for run in runs for round in run.forgetting_files})
    if not measured:
        return []
    cells = 0
    for run in runs:
        if run.forgetting_files:
            last = read_forgetting(run, max(run.forgetting_files))
            cells += 2 * min(len(last.models), MOST_MODELS) * min(len(last.data), MOST_DATA)
    most = min(MOST_ROUNDS, max(MOST_CELLS // max(cells, 1), 2))
    return [measured[position] for position in evenly_spaced(len(measured), most)]


def read_rounds(run: RunData, rounds: Sequence[int]) -> list[ForgettingRound]:
    """The forgetting matrices of those rounds that the run measured, cut to what a picture can show."""
    return [cut(read_forgetting(run, round)) for round in rounds if round in run.forgetting_files]


def cut(matrix: ForgettingRound) -> ForgettingRound:
    """At most 60 models and 100 data clients, among them the shown models' own data."""
    models = evenly_spaced(len(matrix.models), MOST_MODELS)
    if len(matrix.data) <= MOST_DATA:
        data = list(range(len(matrix.data)))
    else:
        own = set(matrix.models[models].tolist())
        kept = [position for position, client in enumerate(matrix.data.tolist()) if client in own]
        others = [position for position in range(len(matrix.data)) if position not in set(kept)]
        spare = evenly_spaced(len(others), MOST_DATA - len(kept))
        data = sorted([*kept, *(others[position] for position in spare)])
    return ForgettingRound(
        matrix.round,
        matrix.models[models],
        matrix.data[data],
        matrix.before[data],
        matrix.after[np.ix_(data, models)],
        matrix.forgetting[np.ix_(data, models)],
    )


def is_cut(run: RunData, rounds: Sequence[int]) -> bool:
    """Whether :func:`cut` leaves clients out in one of the rounds."""
    measured = [read_forgetting(run, round) for round in rounds if round in run.forgetting_files]
    return any(len(one.models) > MOST_MODELS or len(one.data) > MOST_DATA for one in measured)


def forgetting_limit(matrices: Sequence[ForgettingRound]) -> float:
    """Half the width of a zero-centred colour scale that holds every matrix, in percentage points."""
    values = [np.abs(matrix.forgetting[np.isfinite(matrix.forgetting)]) for matrix in matrices]
    largest = max((float(value.max()) for value in values if value.size), default=0.0)
    return 100 * largest if largest > 0 else 1.0


def forgetting_heatmap(matrices: Sequence[ForgettingRound], limit: float, label: str = "") -> Any:
    """F[k, i] of Legate et al. 2023, Eq. 5 and Fig. 3: y the model of client i, x the data of client k."""
    steps = len(FORGETTING_COLOURS) - 1
    return _heatmap(
        _titled("Forgetting: accuracy lost by local training", label),
        [(matrix, matrix.forgetting) for matrix in matrices],
        hover="accuracy lost: %{z:.1f} points",
        zmin=-limit,
        zmax=limit,
        colorscale=[[step / steps, colour] for step, colour in enumerate(FORGETTING_COLOURS)],
        colorbar={"title": {"text": "lost (percentage points)", "side": "right"}, "thickness": 12},
    )


def accuracy_heatmap(matrices: Sequence[ForgettingRound], label: str = "") -> Any:
    """Acc_k(w_t^i), Fig. 3 right: accuracy of client i's model after local training on client k's data."""
    return _heatmap(
        _titled("Accuracy after local training", label),
        [(matrix, matrix.after) for matrix in matrices],
        hover="accuracy: %{z:.1f} %",
        zmin=0,
        zmax=100,
        colorscale=ACCURACY_COLOURS,
        colorbar={"title": {"text": "accuracy (%)", "side": "right"}, "thickness": 12},
    )


def _titled(title: str, label: str) -> str:
    return f"{escape(label)} – {title[0].lower()}{title[1:]}" if label else title


def _heatmap(title: str, frames: Sequence[tuple[ForgettingRound, FloatArray]], hover: str, **style: Any) -> Any:
    """The last frame drawn, all of them in ``figure.frames`` under the round's number."""
    go = graph_objects()
    figure = blank_figure(
        title,
        "validation data of client k",
        "model of client i",
        height=400,
        hovermode="closest",
        showlegend=False,
        plot_bgcolor=_NOT_MEASURED,
        margin={"l": 55, "r": 10, "t": 40, "b": 45},
    )
    figure.update_xaxes(type="category", showgrid=False)
    figure.update_yaxes(type="category", showgrid=False)
    drawn = [(matrix.round, _cells(matrix, values)) for matrix, values in frames]
    figure.frames = [
        go.Frame(name=str(round), data=[go.Heatmap(cells), go.Scatter(own)], layout=_ranges(cells))
        for round, (cells, own) in drawn
    ]
    if drawn:
        cells, own = drawn[-1][1]
        template = f"model of client %{{y}}, data of client %{{x}}<br>{hover}<extra></extra>"
        figure.add_trace(go.Heatmap(cells, hovertemplate=template, hoverongaps=False, **style))
        marker = {"symbol": "circle", "size": 6, "color": "white", "line": {"color": "black", "width": 1}}
        figure.add_trace(go.Scatter(own, mode="markers", marker=marker, hoverinfo="skip"))
        figure.update_layout(_ranges(cells))
    return figure


def _cells(matrix: ForgettingRound, values: FloatArray) -> tuple[dict[str, Any], dict[str, Any]]:
    """The heatmap's cells in per cent (None: not measured), and the places of models on their own data."""
    models, data = _names(matrix.models), _names(matrix.data)
    # Stored as [data k, model i]; drawn with the model on y as in the paper.
    rows: npt.NDArray[np.float64] = np.round(100 * values.T, 2)
    z = [[float(value) if np.isfinite(value) else None for value in row] for row in rows]
    own = [client for client in models if client in set(data)]
    return {"x": data, "y": models, "z": z}, {"x": own, "y": own}


def _ranges(cells: dict[str, Any]) -> dict[str, Any]:
    """Axes that end at the outermost cells, first model on top, so that own data run down the diagonal."""
    return {
        "xaxis": {"range": [-0.5, len(cells["x"]) - 0.5]},
        "yaxis": {"range": [len(cells["y"]) - 0.5, -0.5]},
    }


def _names(clients: IntArray) -> list[str]:
    return [str(int(client)) for client in clients]
