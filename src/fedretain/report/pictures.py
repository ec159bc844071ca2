"""The report's pictures for a paper: PNG and vector PDF, drawn with matplotlib (the extra ``figures``)."""

from __future__ import annotations

import math
import textwrap
import warnings
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from fedretain.errors import MissingExtraError, RunError
from fedretain.files import write_atomically
from fedretain.report import heatmaps
from fedretain.report.comparison import Group, group_runs, plain_loss_first
from fedretain.report.curves import (
    ACCURACY,
    COMMUNICATION_TITLE,
    COMMUNICATION_UNIT,
    CURVES,
    MEASURE_CURVES,
    Point,
    accuracy_by_traffic,
    over_seeds,
)
from fedretain.report.figures import MOST_LEGEND_CLASSES, class_colours, evenly_spaced, line_style
from fedretain.report.measures import ClassHistory, class_history
from fedretain.report.reading import FloatArray, ForgettingRound, IntArray

MOST_SETTINGS = 6
MOST_PARTITIONS = 4
MOST_BARS = 30
_DASHES = {"solid": "-", "dash": "--", "dot": ":"}
_STYLE = {
    "pdf.fonttype": 42,  # TrueType: publishers refuse the default, Type 3
    "font.size": 8.0,
    "axes.titlesize": 8.0,
    "axes.linewidth": 0.6,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
}
_DPI = 300


def write_pictures(runs: Sequence[str | Path], folder: str | Path) -> list[Path]:
    """Write each picture that the runs have numbers for as ``NAME.png`` and ``NAME.pdf``; returns the files.

    Names: ``accuracy``, ``forgetting``, ``loss``, ``forgettable-examples``, ``communication`` (curves, mean ± one
    deviation over seeds), ``heatmaps`` (last measured round of each setting's first seed), ``partition``; of
    ``forgetting.measures`` the curves of ``MEASURE_CURVES``, and ``classes``. Where there is too much for one picture,
    ``NAME-1``, ``NAME-2``, ….
    """
    matplotlib = _matplotlib()
    groups = group_runs(runs)
    folder = Path(folder)
    written = []
    with matplotlib.rc_context(_STYLE), warnings.catch_warnings():
        # A name may hold a sign that the font lacks: it is drawn as a box, which is no reason to stop.
        warnings.filterwarnings("ignore", message="Glyph .* missing from")
        for name, figure in draw_pictures(groups):
            for kind in ("png", "pdf"):
                file = folder / f"{name}.{kind}"
                try:
                    write_atomically(file, partial(_save, figure, kind))
                except OSError as error:
                    raise RunError(
                        f"the picture {file} cannot be written: {error}; free some space or give another folder"
                    ) from error
                written.append(file)
    return written


def _matplotlib() -> Any:
    try:
        import matplotlib
        import matplotlib.colors
        import matplotlib.figure
    except ImportError as error:
        raise MissingExtraError("matplotlib", "figures", "drawing PNG and PDF pictures (--png)") from error
    return matplotlib


def _save(figure: Any, kind: str, file: BinaryIO) -> None:
    # Without the time of writing, the same runs give the same bytes.
    figure.savefig(file, format=kind, dpi=_DPI, metadata={"CreationDate": None} if kind == "pdf" else None)


def draw_pictures(groups: Sequence[Group]) -> Iterator[tuple[str, Any]]:
    """Name and matplotlib figure of each picture that the settings have numbers for, one after another."""
    for curve in (*CURVES, *MEASURE_CURVES):
        lines = [over_seeds(group, curve) for group in groups]
        if any(lines):
            yield curve.name, _curves(groups, lines, curve.title, "communication round", curve.unit)
    lines = [accuracy_by_traffic(group) for group in groups]
    if any(lines):
        yield "communication", _curves(groups, lines, COMMUNICATION_TITLE, COMMUNICATION_UNIT, ACCURACY.unit)
    yield from _numbered("heatmaps", list(_heatmaps(groups)))
    yield from _numbered("classes", list(_classes(groups)))
    yield from _numbered("partition", list(_partitions(groups)))


def _numbered(name: str, figures: Sequence[Any]) -> Iterator[tuple[str, Any]]:
    for number, figure in enumerate(figures, start=1):
        yield (name if len(figures) == 1 else f"{name}-{number}"), figure


def _blank(width: float, height: float) -> Any:
    return _matplotlib().figure.Figure(figsize=(width, height), layout="constrained")


def _text(text: str, width: int) -> str:
    """User text as written, in lines of at most so many characters: a dollar sign starts no formula."""
    return textwrap.fill(text, width).replace("$", r"\$")


def _curves(groups: Sequence[Group], lines: Sequence[Sequence[Point]], title: str, x: str, y: str) -> Any:
    """One line a setting, mean over seeds, in a band of ± one sample standard deviation."""
    longest = max(len(group.label) for group in groups)
    columns = 3 if longest <= 12 else 2 if longest <= 24 else 1
    legend_lines = sum(math.ceil(len(group.label) / 55) for group in groups) / columns if len(groups) > 1 else 0
    figure = _blank(3.5, 2.5 + 0.15 * math.ceil(legend_lines))
    axes = figure.subplots()
    handles, labels = [], []
    for number, (group, points) in enumerate(zip(groups, lines, strict=True)):
        if not points:
            continue
        colour, dash = line_style(number)
        at = np.array([point.x for point in points])
        mean = np.array([point.y.mean for point in points])
        deviation = np.array([point.y.std or 0.0 for point in points])
        if deviation.any():
            axes.fill_between(at, mean - deviation, mean + deviation, color=colour, alpha=0.18, linewidth=0)
        marker = "o" if len(points) <= 15 else ""
        handles += axes.plot(
            at, mean, color=colour, linestyle=_DASHES[dash], linewidth=1.2, marker=marker, markersize=2.5
        )
        labels.append(_text(group.label, 55))
    axes.set_title(title, loc="left", wrap=True)
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.grid(color="0.88", linewidth=0.5)
    axes.set_axisbelow(True)
    if x == "communication round":
        axes.xaxis.get_major_locator().set_params(integer=True)
    if len(groups) > 1:
        figure.legend(handles, labels, loc="outside lower left", ncols=columns, fontsize=7)
    return figure


def _heatmaps(groups: Sequence[Group]) -> Iterator[Any]:
    """Forgetting beside accuracy, a row for each setting, plain cross-entropy on top; one scale for all settings.

    As Legate et al. 2023, Fig. 3: y the model of client i, x the data of client k; the scale of forgetting is centred
    on zero, blue – white – red.
    """
    measured = []
    for group in plain_loss_first(groups):
        run = group.runs[0]
        if run.forgetting_files:
            measured += [(group, matrix) for matrix in heatmaps.read_rounds(run, [max(run.forgetting_files)])]
    limit = heatmaps.forgetting_limit([matrix for _, matrix in measured])
    for start in range(0, len(measured), MOST_SETTINGS):
        yield _heatmap_rows(measured[start : start + MOST_SETTINGS], limit)


def _heatmap_rows(measured: Sequence[tuple[Group, ForgettingRound]], limit: float) -> Any:
    colors = _matplotlib().colors
    rising = colors.LinearSegmentedColormap.from_list("forgetting", heatmaps.FORGETTING_COLOURS)
    figure = _blank(7.0, 2.9 * len(measured))
    axes = figure.subplots(len(measured), 2, squeeze=False)
    for row, (group, matrix) in zip(axes, measured, strict=True):
        sides = (
            ("forgetting by local training", matrix.forgetting, rising, -limit, limit, "lost (percentage points)"),
            ("accuracy after local training", matrix.after, "viridis", 0.0, 100.0, "accuracy (%)"),
        )
        for place, (what, values, colours, low, high, unit) in zip(row, sides, strict=True):
            mesh = _cells(place, matrix, values, colours, low, high)
            place.set_title(f"{_text(group.label, 45)}, round {matrix.round}\n{what}", loc="left")
            bar = figure.colorbar(mesh, ax=place, label=unit)
            # matplotlib would put a bitmap into the PDF; the edges close the hairlines between the steps.
            bar.solids.set(rasterized=False, edgecolor="face")
    return figure


def _cells(axes: Any, matrix: ForgettingRound, values: FloatArray, colours: Any, low: float, high: float) -> Any:
    """The matrix with the model on y, first model on top; grey where nothing was measured, a dot on own data."""
    axes.set_facecolor("0.7")
    # A mesh, not an image: its cells stay sharp in the PDF at every size.
    shown = np.ma.masked_invalid(100 * values.T)
    mesh = axes.pcolormesh(shown, cmap=colours, vmin=low, vmax=high)
    models, data = matrix.models.tolist(), matrix.data.tolist()
    own = [(data.index(client) + 0.5, row + 0.5) for row, client in enumerate(models) if client in data]
    if own:
        size = 14 / max(1.0, math.sqrt(len(models) / 10))
        axes.scatter(*zip(*own, strict=True), s=size, color="white", edgecolors="black", linewidths=0.5)
    axes.set(xlabel="validation data of client k", ylabel="model of client i")
    axes.set(xlim=(0, len(data)), ylim=(len(models), 0))
    for axis, clients in ((axes.xaxis, data), (axes.yaxis, models)):
        ticks = evenly_spaced(len(clients), 20)
        axis.set_ticks([tick + 0.5 for tick in ticks], [str(clients[tick]) for tick in ticks], fontsize=6)
    return mesh


def _classes(groups: Sequence[Group]) -> Iterator[Any]:
    """Test accuracy by class beside the participants that hold it, a row for each setting's first seed."""
    found = [(group, class_history(group.runs[0])) for group in plain_loss_first(groups)]
    known = [(group, history.thinned()) for group, history in found if history is not None]
    for start in range(0, len(known), MOST_SETTINGS):
        rows = known[start : start + MOST_SETTINGS]
        figure = _blank(7.0, sum(0.9 + 0.14 * min(max(len(history.names), 6), 40) for _, history in rows))
        for places, (group, history) in zip(figure.subplots(len(rows), 2, squeeze=False), rows, strict=True):
            most = max(1, int(history.holders.max(initial=0)))
            sides = (
                (
                    "test accuracy by class (dot: nobody holds it, cross: vanished)",
                    100 * history.accuracy,
                    "viridis",
                    100,
                    "accuracy (%)",
                ),
                ("participants that hold each class", history.holders.astype(float), "cividis", most, "participants"),
            )
            for place, (what, values, colours, high, unit) in zip(places, sides, strict=True):
                _class_cells(figure, place, history, values, colours, high, unit)
                place.set_title(f"{_text(group.label, 45)}\n{what}", loc="left")
            absent = np.argwhere(history.holders == 0) + 0.5
            places[0].scatter(*absent.T, s=12, color="white", edgecolors="black", linewidths=0.5)
            lost = [(history.rounds.index(one.round) + 0.5, one.label + 0.5) for one in history.vanished]
            places[0].scatter(
                *np.array(lost).reshape(-1, 2).T, s=9, marker="X", color="black", edgecolors="white", linewidths=0.4
            )
        yield figure


def _class_cells(
    figure: Any, axes: Any, history: ClassHistory, values: FloatArray, colours: str, high: float, unit: str
) -> None:
    """Classes as rows, first class on top, measured rounds as columns; grey where there is no test example."""
    axes.set_facecolor("0.7")
    mesh = axes.pcolormesh(np.ma.masked_invalid(values.T), cmap=colours, vmin=0, vmax=high)
    axes.set(xlabel="communication round", xlim=(0, len(history.rounds)), ylim=(len(history.names), 0))
    for axis, titles, most in (
        (axes.xaxis, [str(round) for round in history.rounds], 8),
        (axes.yaxis, [_text(name, 20) for name in history.names], 40),
    ):
        ticks = evenly_spaced(len(titles), most)
        axis.set_ticks([tick + 0.5 for tick in ticks], [titles[tick] for tick in ticks], fontsize=6)
    bar = figure.colorbar(mesh, ax=axes, label=unit)
    bar.solids.set(rasterized=False, edgecolor="face")


def _partitions(groups: Sequence[Group]) -> Iterator[Any]:
    """The class mix of each client, once for every partition that differs; side by side as in Fig. 10 of the paper."""
    different: list[tuple[str, IntArray, tuple[str, ...]]] = []
    for group in groups:
        run = group.runs[0]
        counts = run.class_counts
        if counts is None or not counts.size or any(np.array_equal(counts, known) for _, known, _ in different):
            continue
        split = [f"{key}={value}" for key, value in group.settings.items() if key.startswith(("partition", "data"))]
        different.append((", ".join(split) or group.label, counts, run.class_names))
    for start in range(0, len(different), MOST_PARTITIONS):
        yield _partition_bars(different[start : start + MOST_PARTITIONS], titled=len(different) > 1)


def _partition_bars(partitions: Sequence[tuple[str, IntArray, tuple[str, ...]]], *, titled: bool) -> Any:
    """Share of each class in a client's training data, stacked to 100 % (Legate et al. 2023, Fig. 2)."""
    most = max(min(len(counts), MOST_BARS) for _, counts, _ in partitions)
    classes = max(counts.shape[1] for _, counts, _ in partitions)
    class_names = max((names for _, _, names in partitions), key=len)
    figure = _blank(max(3.5, 2.4 * len(partitions)), 1.3 + 0.14 * max(most, 6) + 0.16 * math.ceil(classes / 5))
    bars: list[Any] = []
    for axes, (label, counts, _) in zip(figure.subplots(1, len(partitions), squeeze=False)[0], partitions, strict=True):
        shown = evenly_spaced(len(counts), MOST_BARS)
        selected = counts[shown]
        shares = 100 * selected / np.maximum(selected.sum(axis=1), 1)[:, None]
        left = np.zeros(len(shown))
        drawn = []
        for c, colour in enumerate(class_colours(classes)[: counts.shape[1]]):
            drawn.append(axes.barh(range(len(shown)), shares[:, c], left=left, color=colour, height=0.85))
            left += shares[:, c]
        bars = max(bars, drawn, key=len)
        axes.set_yticks(range(len(shown)), [str(client) for client in shown], fontsize=6)
        axes.set(xlim=(0, 100), ylim=(len(shown) - 0.5, -0.5), xlabel="share of training examples (%)")
        which = "" if len(shown) == len(counts) else f"{len(shown)} of {len(counts)} clients"
        axes.set_title("\n".join(filter(None, [_text(label, 30) if titled else "", which])), loc="left")
    figure.axes[0].set_ylabel("client")
    figure.suptitle("Class mix in the clients' training data", fontsize=8)
    if classes <= MOST_LEGEND_CLASSES:
        titles = [_text(class_names[c], 20) if c < len(class_names) else f"class {c}" for c in range(len(bars))]
        figure.legend(bars, titles, loc="outside lower center", ncols=5, fontsize=6)
    return figure
