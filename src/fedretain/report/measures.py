"""Pictures of what ``forgetting.measures`` adds: classes, drift, loss increase, Fisher agreement."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from fedretain.forgetting import Vanishing, vanishings
from fedretain.report.figures import blank_figure, escape, evenly_spaced, graph_objects, lines_figure, range_figure
from fedretain.report.heatmaps import ACCURACY_COLOURS, FORGETTING_COLOURS, MOST_MODELS, MOST_ROUNDS
from fedretain.report.reading import FloatArray, IntArray, RunData, read_measure

MOST_COLUMNS = 120
"""Measured rounds that a picture of classes shows."""
MOST_CLASSES = 100


@dataclass(frozen=True)
class ClassHistory:
    """Accuracy of the global model by class through the measured rounds, and how many participants held each class."""

    rounds: list[int]
    names: tuple[str, ...]
    before: FloatArray
    """[rounds, classes] of the model that the round started from."""
    accuracy: FloatArray
    """[rounds, classes] of the model that the round ended with; NaN for a class without test examples."""
    holders: IntArray
    """[rounds, classes]: participants with training examples of the class."""

    @property
    def vanished(self) -> list[Vanishing]:
        """Which classes the global model lost, when, and how many participants held them."""
        # The measure wants to know of each participant; which ones hold a class makes no difference to it.
        held = np.arange(self.holders.max(initial=0)) < self.holders[:, :, None]
        return vanishings(self.rounds, self.before, self.accuracy, held)

    def thinned(self) -> ClassHistory:
        """At most 120 rounds and 100 classes, evenly spaced, for a picture."""
        at = evenly_spaced(len(self.rounds), MOST_COLUMNS)
        classes = evenly_spaced(len(self.names), MOST_CLASSES)
        cut = np.ix_(at, classes)
        rounds, names = [self.rounds[t] for t in at], tuple(self.names[c] for c in classes)
        return ClassHistory(rounds, names, self.before[cut], self.accuracy[cut], self.holders[cut])


def class_history(run: RunData) -> ClassHistory | None:
    """What the measure ``classes`` left in the run directory; None when it was not measured."""
    found = read_measure(run, "classes", ("before", "aggregated", "held"))
    if not found:
        return None
    before, accuracy = (np.stack([arrays[key] for arrays in found.values()]) for key in ("before", "aggregated"))
    holders = np.stack([arrays["held"].sum(axis=1) for arrays in found.values()]).astype(np.int64)
    known = run.class_names
    names = tuple(known[c] if c < len(known) else f"class {c}" for c in range(accuracy.shape[1]))
    return ClassHistory(list(found), names, before.astype(np.float64), accuracy.astype(np.float64), holders)


def class_accuracy_figure(history: ClassHistory, label: str = "") -> Any:
    """Which classes the global model knows after each round; marked where nobody held them, and where they vanish."""
    shown = history.thinned()
    figure = _class_map(
        _titled("Which classes the global model knows: test accuracy by class", label),
        shown,
        np.round(100 * shown.accuracy, 2),
        "accuracy (%)",
        "accuracy after the round: %{z:.1f} %",
        zmin=0,
        zmax=100,
        colorscale=ACCURACY_COLOURS,
    )
    absent = [(t, c) for t, c in np.argwhere(shown.holders == 0).tolist()]
    lost = [(shown.rounds.index(one.round), one.label) for one in shown.vanished]
    # The cross lies on the dot where both are true, so it is the smaller and the darker one.
    for name, marker, places in (
        ("no participant holds it", _mark("circle", 9, "white", "black"), absent),
        ("vanished in this round", _mark("x", 6, "black", "white"), lost),
    ):
        figure.add_scatter(
            name=name,
            x=[str(shown.rounds[t]) for t, _ in places],
            y=[escape(shown.names[c]) for _, c in places],
            mode="markers",
            marker=marker,
            hoverinfo="skip",
        )
    return figure


def class_presence_figure(history: ClassHistory, label: str = "") -> Any:
    """Who was absent: how many of a round's participants have training examples of each class."""
    shown = history.thinned()
    most = max(1, int(history.holders.max(initial=0)))
    figure = _class_map(
        _titled("Who was there: participants that hold each class", label),
        shown,
        shown.holders,
        "participants",
        "participants with examples of it: %{z}",
        zmin=0,
        zmax=most,
        colorscale="Cividis",
    )
    if most <= 10:
        figure.data[0].colorbar.dtick = 1
    return figure


def class_forgetting_figure(run: RunData) -> Any:
    """What local training costs on the classes that a client holds, and on those that it does not hold."""
    lines = {}
    for name, key in (("classes it does not hold", "absent"), ("classes it holds", "held")):
        rounds, values = run.series(f"class_forgetting_{key}")
        lines[name] = (rounds, [100 * value for value in values])
    title = "Class forgetting: accuracy that a client's local training costs, by whether it holds the class"
    return lines_figure(title, "forgetting (percentage points)", lines)


def drift_norm_figure(run: RunData) -> Any:
    """‖w_k − w‖ of the participants: mean, shortest, longest."""
    norms = {round: arrays["norms"].tolist() for round, arrays in read_measure(run, "drift", ("norms",)).items()}
    title = "Client drift: how far local training moves the model"
    mean = [float(np.mean(values)) for values in norms.values()]
    return range_figure(title, "length of the change ‖w_k − w‖", "mean", "participant", norms, mean)


def drift_cosine_figure(run: RunData) -> Any:
    """cos(w_i − w, w_j − w) of all pairs of participants: mean, least, greatest."""
    pairs = {round: _pairs(arrays["cosines"]) for round, arrays in read_measure(run, "drift", ("cosines",)).items()}
    pairs = {round: values for round, values in pairs.items() if values}
    title = "Client drift: whether the clients move the model the same way"
    mean = [float(np.mean(values)) for values in pairs.values()]
    return range_figure(title, "cosine of two clients' changes", "mean of all pairs", "pair", pairs, mean)


def cosine_heatmap(run: RunData) -> Any:
    """Pairwise cosines of the participants' changes, a frame for each measured round (at most 40 of them)."""
    found = read_measure(run, "drift", ("models", "cosines"))
    rounds = [list(found)[position] for position in evenly_spaced(len(found), MOST_ROUNDS)]
    go = graph_objects()
    figure = blank_figure(
        "Which clients move the model the same way: cosines of their changes",
        "change by client j",
        "change by client i",
        height=420,
        hovermode="closest",
        showlegend=False,
    )
    frames = {round: _cosine_cells(found[round]["models"], found[round]["cosines"]) for round in rounds}
    figure.frames = [
        go.Frame(name=str(round), data=[go.Heatmap(cells)], layout=_ranges(cells)) for round, cells in frames.items()
    ]
    steps = len(FORGETTING_COLOURS) - 1
    last = frames[rounds[-1]]
    figure.add_heatmap(
        **last,
        zmin=-1,
        zmax=1,
        # Blue for agreement, red for conflict: the other way round than forgetting, where red is the bad end too.
        colorscale=[[step / steps, colour] for step, colour in enumerate(reversed(FORGETTING_COLOURS))],
        colorbar={"title": {"text": "cosine", "side": "right"}, "thickness": 12},
        hovertemplate="clients %{y} and %{x}: cosine %{z:.2f}<extra></extra>",
        hoverongaps=False,
    )
    figure.update_xaxes(type="category", showgrid=False)
    figure.update_yaxes(type="category", showgrid=False)
    figure.update_layout(_ranges(last))
    return figure


def loss_increase_figure(run: RunData) -> Any:
    """Mean loss of the round's local models minus that of the received one, on the previous round's clients."""
    found = read_measure(run, "loss_increase", ("loss_increase",))
    increases = {round: _known(arrays["loss_increase"]) for round, arrays in found.items()}
    title = "Loss increase: what local training costs the previous round's clients"
    mean = [float(np.mean(values)) for values in increases.values()]
    return range_figure(title, "mean loss per example (nats)", "mean", "previous client", increases, mean)


def fisher_figure(run: RunData) -> Any:
    """Correlation of the Fisher diagonals of pseudo data and of the data of the last ten rounds."""
    found = read_measure(run, "fisher", ("agreement",))
    agreements = {round: _known(arrays["agreement"]) for round, arrays in found.items()}
    agreements = {round: values for round, values in agreements.items() if values}
    title = "Fisher agreement: whether pseudo data know which parameters earlier data need"
    mean = [float(np.mean(values)) for values in agreements.values()]
    return range_figure(title, "correlation of Fisher diagonals", "mean", "participant", agreements, mean)


def _class_map(title: str, history: ClassHistory, values: Any, unit: str, hover: str, **style: Any) -> Any:
    """Classes as rows, measured rounds as columns; what has no value stays grey."""
    figure = blank_figure(
        title,
        "communication round",
        "class",
        height=min(190 + 22 * len(history.names), 1100),
        hovermode="closest",
        plot_bgcolor="#B4B4B4",
    )
    cells = [[float(value) if np.isfinite(value) else None for value in row] for row in np.asarray(values).T]
    figure.add_heatmap(
        x=[str(round) for round in history.rounds],
        y=[escape(name) for name in history.names],
        z=cells,
        colorbar={"title": {"text": unit, "side": "right"}, "thickness": 12},
        hovertemplate=f"round %{{x}}, %{{y}}<br>{hover}<extra></extra>",
        hoverongaps=False,
        **style,
    )
    # Given ranges: the marks on top would widen automatic ones.
    figure.update_xaxes(type="category", showgrid=False, nticks=20, range=[-0.5, len(history.rounds) - 0.5])
    figure.update_yaxes(type="category", showgrid=False, range=[len(history.names) - 0.5, -0.5])
    return figure


def _mark(symbol: str, size: int, fill: str, edge: str) -> dict[str, Any]:
    return {"symbol": symbol, "size": size, "color": fill, "line": {"color": edge, "width": 1}}


def _cosine_cells(models: Any, cosines: Any) -> dict[str, Any]:
    shown = evenly_spaced(len(models), MOST_MODELS)
    names = [str(int(models[position])) for position in shown]
    rows = np.round(cosines[np.ix_(shown, shown)], 4)
    return {"x": names, "y": names, "z": [[float(v) if np.isfinite(v) else None for v in row] for row in rows]}


def _ranges(cells: dict[str, Any]) -> dict[str, Any]:
    return {"xaxis": {"range": [-0.5, len(cells["x"]) - 0.5]}, "yaxis": {"range": [len(cells["y"]) - 0.5, -0.5]}}


def _pairs(cosines: Any) -> list[float]:
    """The cosines of all pairs i < j of clients that moved."""
    return _known(cosines[np.triu_indices(len(cosines), k=1)])


def _known(values: Any) -> list[float]:
    return [float(value) for value in np.asarray(values) if np.isfinite(value)]


def _titled(title: str, label: str) -> str:
    return f"{escape(label)} – {title[0].lower()}{title[1:]}" if label else title
