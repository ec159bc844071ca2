"""Curves and partition bars: pure functions from what was read to a plotly figure.

Every figure carries its own title, so that it can stand alone; the page shows that title as a caption. Text
that comes from a run (labels, class names) is escaped, because plotly reads a little HTML in its strings. What a
line's ``meta`` holds are further columns of the data that the page offers as CSV.
"""

from __future__ import annotations

import colorsys
import html
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from fedretain.errors import RunError
from fedretain.report.comparison import Group
from fedretain.report.curves import (
    ACCURACY,
    COMMUNICATION_TITLE,
    COMMUNICATION_UNIT,
    Curve,
    Point,
    accuracy_by_traffic,
    initial_accuracy,
    over_seeds,
)
from fedretain.report.reading import IntArray, RunData, client_values, finite

MOST_CLIENTS = 40
MOST_LEGEND_CLASSES = 20

# Okabe and Ito's palette without its yellow and black, which vanish on a light and on a dark page.
LINE_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
LINE_DASHES = ("solid", "dash", "dot")
# Paul Tol's muted scheme and its grey, told apart under the common colour-vision deficiencies.
CLASS_COLOURS = (
    *("#332288", "#88CCEE", "#44AA99", "#117733", "#999933", "#DDCC77"),
    *("#CC6677", "#882255", "#AA4499", "#BBBBBB"),
)
_GRID = "rgba(128, 128, 128, 0.25)"
_CLEAR = "rgba(0, 0, 0, 0)"


def graph_objects() -> Any:
    """plotly's figure classes, imported only when a picture is drawn."""
    try:
        import plotly.graph_objects as go
    except ImportError as error:
        raise RunError("drawing a report needs the package 'plotly': pip install plotly") from error
    return go


def escape(text: object) -> str:
    """User text for plotly strings and HTML: shown as written, never read as markup."""
    return html.escape(str(text), quote=False)


def blank_figure(title: str, x: str, y: str, **layout: Any) -> Any:
    """A figure without traces in the report's style; axis titles carry the units."""
    axis = {"gridcolor": _GRID, "zeroline": False, "automargin": True}
    return graph_objects().Figure(
        layout={
            "template": "none",
            "title": {"text": title},
            "xaxis": {**axis, "title": {"text": x}},
            "yaxis": {**axis, "title": {"text": y}},
            "font": {"family": "system-ui, sans-serif", "size": 13},
            "paper_bgcolor": _CLEAR,
            "plot_bgcolor": _CLEAR,
            "margin": {"l": 55, "r": 15, "t": 40, "b": 45},
            "height": 360,
            "legend": {"orientation": "h", "y": 1.02, "yanchor": "bottom", "x": 0, "xanchor": "left"},
            "hovermode": "x unified",
            **layout,
        }
    )


def evenly_spaced(count: int, most: int) -> list[int]:
    """At most ``most`` positions of ``range(count)``, evenly spaced, first and last among them."""
    if count <= most:
        return list(range(count))
    return [round(position) for position in np.linspace(0, count - 1, most)]


def line_style(number: int) -> tuple[str, str]:
    """Colour and dash of the n-th line; when the colours are used up they return dashed, then dotted."""
    dash = LINE_DASHES[number // len(LINE_COLOURS) % len(LINE_DASHES)]
    return LINE_COLOURS[number % len(LINE_COLOURS)], dash


def accuracy_figure(run: RunData) -> Any:
    """Test accuracy of the global model, round by round, from the initial model on."""
    figure = blank_figure(ACCURACY.title, "communication round", ACCURACY.unit)
    rounds, values = run.series(ACCURACY.key)
    initial = initial_accuracy(run)
    if initial is not None and 0 not in rounds:
        rounds, values = [0, *rounds], [initial, *values]
    figure.add_trace(_line("test accuracy", rounds, [100 * value for value in values]))
    return _whole_rounds(figure)


def loss_figure(run: RunData) -> Any:
    """Test loss of the global model beside the participants' mean training loss."""
    figure = blank_figure(
        "Loss on the test data, and of the clients during local training",
        "communication round",
        "mean loss per example (nats)",
    )
    for number, (key, name) in enumerate((("test_loss", "test loss"), ("train_loss", "local training loss"))):
        rounds, values = run.series(key)
        if rounds:
            figure.add_trace(_line(name, rounds, values, number))
    return _whole_rounds(figure)


def client_forgetting_figure(run: RunData) -> Any:
    """Mean client forgetting under its two averages, with the range over the participants' models.

    By model: mean over the data of the other clients, for a given model (Legate 2022, §2.1). By data: mean
    over the models of the other clients, for given data (Legate et al. 2023, Eq. 6).
    """
    figure = blank_figure(
        "Client forgetting: accuracy that local training costs on other clients' data",
        "communication round",
        "forgetting (percentage points)",
    )
    ranges: dict[int, tuple[float, float]] = {}
    for row in run.metrics:
        by_model = map(finite, client_values(row, "forgetting_by_model"))
        known = [value for value in by_model if value is not None]
        if known:
            ranges[int(row["round"])] = (100 * min(known), 100 * max(known))
    if ranges:
        low, high = (list(column) for column in zip(*ranges.values(), strict=True))
        figure.add_trace(_band("least to most forgetting model", list(ranges), low, high, legend=True))
    for number, (key, name) in enumerate(
        (("forgetting_by_model", "by model, mean"), ("forgetting_by_data", "by data, mean"))
    ):
        rounds, values = run.series(key)
        if rounds:
            line = _line(name, rounds, [100 * value for value in values], number)
            # The two means coincide when every model is measured on the same clients: dashes show both.
            line.line.dash = LINE_DASHES[number]
            if key == "forgetting_by_model" and ranges:
                line.meta = {
                    name: [round(ranges[t][end], 6) if t in ranges else None for t in rounds]
                    for end, name in enumerate(("least forgetting model", "most forgetting model"))
                }
            figure.add_trace(line)
    return _whole_rounds(figure)


def forgettable_examples_figure(run: RunData) -> Any:
    """How many training examples a local model had right and the next received model gets wrong."""
    figure = blank_figure(
        "Forgettable examples: right after local training, wrong again in the next global model",
        "communication round",
        "training examples",
    )
    figure.add_trace(_line("forgettable examples", *run.series("forgettable_examples")))
    figure.update_yaxes(rangemode="tozero")
    return _whole_rounds(figure)


def traffic_figure(run: RunData) -> Any:
    """Bytes sent between server and clients, added up over the rounds."""
    figure = blank_figure("Data sent between server and clients so far", "communication round", "sent (MB = 10⁶ bytes)")
    for number, (key, name) in enumerate(
        (("upload_bytes", "clients to server"), ("download_bytes", "server to clients"))
    ):
        rounds, values = run.series(key)
        if rounds:
            line = _line(name, rounds, [float(total) for total in np.cumsum(values) / 1e6], number)
            line.line.dash = LINE_DASHES[number]
            figure.add_trace(line)
    figure.update_yaxes(rangemode="tozero")
    return _whole_rounds(figure)


def range_figure(
    title: str, unit: str, name: str, of_what: str, by_round: Mapping[int, Sequence[float]], mean: Sequence[float]
) -> Any:
    """A mean against rounds in the range of the values that it is the mean of; ``of_what`` are these, in words."""
    figure = blank_figure(title, "communication round", unit)
    rounds = list(by_round)
    low, high = ([pick(values) for values in by_round.values()] for pick in (min, max))
    figure.add_trace(_band(f"least to greatest {of_what}", rounds, low, high, legend=True))
    line = _line(name, rounds, mean)
    line.meta = {
        f"least {of_what}": [round(value, 6) for value in low],
        f"greatest {of_what}": [round(value, 6) for value in high],
    }
    figure.add_trace(line)
    return _whole_rounds(figure)


def lines_figure(title: str, unit: str, lines: Mapping[str, tuple[Sequence[int], Sequence[float]]]) -> Any:
    """Several numbers of one unit against rounds, each with its name."""
    figure = blank_figure(title, "communication round", unit)
    for number, (name, (rounds, values)) in enumerate(lines.items()):
        if rounds:
            figure.add_trace(_line(name, rounds, values, number))
    figure.update_layout(showlegend=True)
    return _whole_rounds(figure)


def seeds_figure(groups: Sequence[Group], curve: Curve) -> Any:
    """One measured number against rounds for each setting: mean over its seeds, band of ± one deviation."""
    figure = blank_figure(curve.title, "communication round", curve.unit)
    for number, group in enumerate(groups):
        _add_seeds(figure, group.label, over_seeds(group, curve), number)
    figure.update_layout(showlegend=True)
    return _whole_rounds(figure)


def communication_figure(groups: Sequence[Group]) -> Any:
    """What accuracy costs: test accuracy against megabytes sent, mean over seeds with a band of ± one deviation."""
    figure = blank_figure(COMMUNICATION_TITLE, COMMUNICATION_UNIT, ACCURACY.unit)
    for number, group in enumerate(groups):
        _add_seeds(figure, group.label, accuracy_by_traffic(group), number)
    figure.update_xaxes(rangemode="tozero")
    figure.update_layout(showlegend=len(groups) > 1)
    return figure


def _add_seeds(figure: Any, label: str, points: Sequence[Point], number: int) -> None:
    if not points:
        return
    x = [point.x for point in points]
    means = [point.y.mean for point in points]
    deviations = [point.y.std for point in points]
    repeated = any(deviation is not None for deviation in deviations)
    if repeated:
        low = [mean - (deviation or 0.0) for mean, deviation in zip(means, deviations, strict=True)]
        high = [mean + (deviation or 0.0) for mean, deviation in zip(means, deviations, strict=True)]
        figure.add_trace(_band(escape(label), x, low, high, number))
    line = _line(escape(label), x, means, number)
    line.customdata = ["" if deviation is None else f" ± {deviation:.2f}" for deviation in deviations]
    line.hovertemplate = "%{y:.2f}%{customdata}"
    if repeated:
        rounded = [None if deviation is None else round(deviation, 6) for deviation in deviations]
        line.meta = {"standard deviation": rounded, "seeds": [point.y.runs for point in points]}
    figure.add_trace(line)


def partition_figure(class_counts: Any, class_names: Sequence[str] = (), title: str | None = None) -> Any:
    """Who holds what: the class shares of each client's training data, stacked to 100 %.

    share[k, c] = n_kc / n_k, as in Legate et al. 2023, Fig. 2. More than 40 clients are shown by 40 of them,
    evenly spaced by number, and the title says so.
    """
    counts: IntArray = np.asarray(class_counts, dtype=np.int64)
    if counts.ndim != 2:
        raise RunError(f"class_counts must be [clients, classes], not of shape {counts.shape}")
    clients, classes = counts.shape
    shown = evenly_spaced(clients, MOST_CLIENTS)
    which = f"each of {clients} clients"
    if len(shown) < clients:
        which = f"{len(shown)} of {clients} clients (evenly spaced by number)"
    figure = blank_figure(
        escape(title or "Class mix in the training data") + f": {which}",
        "share of training examples (%)",
        "client",
        barmode="stack",
        bargap=0.15,
        height=170 + 20 * max(len(shown), 3),
        hovermode="closest",
        showlegend=classes <= MOST_LEGEND_CLASSES,
    )
    selected = counts[shown]
    totals = selected.sum(axis=1)
    shares = 100 * selected / np.maximum(totals, 1)[:, None]
    names = [class_names[c] if c < len(class_names) else f"class {c}" for c in range(classes)]
    labels = [str(client) for client in shown]
    for c, colour in enumerate(class_colours(classes)):
        figure.add_bar(
            orientation="h",
            name=escape(names[c]),
            y=labels,
            x=[round(float(share), 3) for share in shares[:, c]],
            customdata=[[int(n), int(total)] for n, total in zip(selected[:, c], totals, strict=True)],
            hovertemplate="client %{y}: %{customdata[0]} of %{customdata[1]} examples (%{x:.1f} %)",
            marker={"color": colour, "line": {"width": 0}},
        )
    figure.add_scatter(
        mode="text",
        x=[101] * len(shown),
        y=labels,
        text=[f"n = {int(total)}" for total in totals],
        textposition="middle right",
        textfont={"size": 11},
        hoverinfo="skip",
        showlegend=False,
    )
    figure.update_xaxes(range=[0, 118], tickvals=[0, 20, 40, 60, 80, 100], showgrid=False)
    # Client 0 on top; the range is given because the text beside the bars would widen an automatic one.
    figure.update_yaxes(type="category", range=[len(shown) - 0.5, -0.5], dtick=1, showgrid=False, tickfont={"size": 11})
    figure.update_layout(legend={"traceorder": "normal"})
    return figure


def class_colours(classes: int) -> list[str]:
    """A colour for each class: a colour-blind-safe scheme for up to ten, else round the wheel."""
    if classes <= len(CLASS_COLOURS):
        return list(CLASS_COLOURS[:classes])
    # Too many for distinct colours: neighbours on the wheel alternate in lightness, hovering tells the name.
    # As #rrggbb, which plotly and matplotlib both read.
    wheel = (colorsys.hls_to_rgb(c / classes, (0.38, 0.55, 0.72)[c % 3], 0.55) for c in range(classes))
    return ["#" + "".join(f"{round(255 * part):02x}" for part in rgb) for rgb in wheel]


def _whole_rounds(figure: Any) -> Any:
    """Few rounds are counted one by one: there is no round 2.5."""
    rounds = [round for trace in figure.data for round in trace.x]
    if rounds and max(rounds) - min(rounds) <= 12:
        figure.update_xaxes(dtick=1)
    return figure


def _line(name: str, rounds: Sequence[float], values: Sequence[float], number: int = 0) -> Any:
    colour, dash = line_style(number)
    return graph_objects().Scatter(
        name=name,
        x=list(rounds),
        y=[round(value, 6) for value in values],
        mode="lines+markers" if len(rounds) <= 30 else "lines",
        line={"color": colour, "width": 2, "dash": dash},
        marker={"size": 5},
        legendgroup=name,
        hovertemplate="%{y:.4~g}",
    )


def _band(
    name: str,
    rounds: Sequence[float],
    low: Sequence[float],
    high: Sequence[float],
    number: int = 0,
    *,
    legend: bool = False,
) -> Any:
    colour, _ = line_style(number)
    red, green, blue = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    outline = [*low, *reversed(high)]
    return graph_objects().Scatter(
        name=name,
        x=[*rounds, *reversed(rounds)],
        y=[round(value, 6) if math.isfinite(value) else None for value in outline],
        mode="lines",
        fill="toself",
        fillcolor=f"rgba({red}, {green}, {blue}, 0.18)",
        line={"width": 0},
        legendgroup=None if legend else name,
        showlegend=legend,
        hoverinfo="skip",
    )
