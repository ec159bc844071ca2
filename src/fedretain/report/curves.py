"""The numbers behind the curves over seeds, for the page and for the printed pictures alike."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from fedretain.report.comparison import Group, Spread, spread
from fedretain.report.reading import RunData, finite


@dataclass(frozen=True)
class Curve:
    """One measured number against rounds: its key in the log, its file name, what is seen, in which unit."""

    key: str
    name: str
    title: str
    unit: str
    scale: float = 1.0


ACCURACY = Curve(
    "test_accuracy", "accuracy", "Accuracy of the global model on the test data", "test accuracy (%)", 100.0
)
CURVES = (
    ACCURACY,
    Curve(
        "forgetting_by_model",
        "forgetting",
        "Client forgetting: accuracy that local training costs on other clients' data",
        "forgetting (percentage points)",
        100.0,
    ),
    Curve("test_loss", "loss", "Loss of the global model on the test data", "mean loss per example (nats)"),
    Curve(
        "forgettable_examples",
        "forgettable-examples",
        "Forgettable examples: right after local training, wrong again in the next global model",
        "training examples",
    ),
)
MEASURE_CURVES = (
    Curve(
        "class_forgetting_absent",
        "class-forgetting-absent",
        "Class forgetting: accuracy that local training costs on classes that the client does not hold",
        "forgetting (percentage points)",
        100.0,
    ),
    Curve(
        "class_forgetting_held",
        "class-forgetting-held",
        "Class forgetting: accuracy that local training costs on classes that the client holds",
        "forgetting (percentage points)",
        100.0,
    ),
    Curve(
        "vanished_classes",
        "vanished-classes",
        "Vanished classes: recognised before the round, not at all after it",
        "classes",
    ),
    Curve("drift_norm", "drift-norm", "Client drift: how far local training moves the model", "length of the change"),
    Curve(
        "drift_cosine",
        "drift-cosine",
        "Client drift: whether the clients move the model the same way",
        "cosine of two clients' changes",
    ),
    Curve(
        "loss_increase",
        "loss-increase",
        "Loss increase: what local training costs the previous round's clients",
        "mean loss per example (nats)",
    ),
    Curve(
        "fisher_agreement",
        "fisher-agreement",
        "Fisher agreement: whether pseudo data know which parameters earlier data need",
        "correlation",
    ),
)
"""What ``forgetting.measures`` adds to the log; drawn where it was measured."""
COMMUNICATION_TITLE = "Accuracy on the test data against the data sent between server and clients"
COMMUNICATION_UNIT = "sent so far, both ways (MB = 10⁶ bytes)"


class Point(NamedTuple):
    """One place of a curve: a round (or megabytes), and the number there over the seeds."""

    x: float
    y: Spread


def over_seeds(group: Group, curve: Curve) -> list[Point]:
    """The curve of one setting: for each round in which any seed measured it, mean and deviation over the seeds."""
    return _points([[(round, round, value) for round, value in _scaled(run, curve)] for run in group.runs])


def accuracy_by_traffic(group: Group) -> list[Point]:
    """Test accuracy against megabytes sent so far, both ways; at each evaluated round the means over the seeds.

    x_t = Σ_{s ≤ t} (upload_s + download_s) / 10⁶. The initial model, where its accuracy is known, stands at 0.
    """
    seeds = []
    for run in group.runs:
        sent = sent_megabytes(run)
        curve = [(round, sent[round], value) for round, value in _scaled(run, ACCURACY) if round in sent]
        initial = initial_accuracy(run)
        if curve and initial is not None and curve[0][0] > 0:
            curve.insert(0, (0, 0.0, ACCURACY.scale * initial))
        seeds.append(curve)
    return _points(seeds)


def sent_megabytes(run: RunData) -> dict[int, float]:
    """For each round of the log the megabytes sent so far, up and down; empty when no traffic was logged."""
    sent: dict[int, float] = {}
    total = 0.0
    for row in run.metrics:
        known = [value for key in ("upload_bytes", "download_bytes") if (value := finite(row.get(key))) is not None]
        total += sum(known)
        if known or sent:
            sent[int(row["round"])] = total / 1e6
    return sent


def initial_accuracy(run: RunData) -> float | None:
    """Test accuracy of the untrained model, where the summary tells it."""
    return finite((run.summary or {}).get("initial_accuracy"))


def _scaled(run: RunData, curve: Curve) -> list[tuple[int, float]]:
    return [(round, curve.scale * value) for round, value in zip(*run.series(curve.key), strict=True)]


def _points(seeds: Sequence[Sequence[tuple[int, float, float]]]) -> list[Point]:
    """Curves of (round, x, y), one a seed, as one curve: per round the mean x and the spread of y."""
    measured: dict[int, list[tuple[float, float]]] = {}
    for curve in seeds:
        for round, x, y in curve:
            measured.setdefault(round, []).append((x, y))
    points = []
    for round in sorted(measured):
        xs, ys = zip(*measured[round], strict=True)
        over = spread(ys)
        if over is not None:
            points.append(Point(xs[0] if len(set(xs)) == 1 else statistics.fmean(xs), over))
    return points
