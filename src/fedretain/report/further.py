"""The sections of a report about ``forgetting.measures``; a measure that was not taken has none."""

from __future__ import annotations

from collections.abc import Sequence

from fedretain.report import figures, measures, words
from fedretain.report.comparison import Group, plain_loss_first
from fedretain.report.curves import MEASURE_CURVES
from fedretain.report.page import Section, paragraph
from fedretain.report.reading import RunData


def run_sections(run: RunData) -> list[Section]:
    """Classes, drift, loss increase and Fisher agreement of one run."""
    sections = []
    history = measures.class_history(run)
    if history is not None:
        maps = (measures.class_accuracy_figure(history), measures.class_presence_figure(history))
        text = paragraph(words.CLASSES) + paragraph(words.about_vanished(history.vanished, history.names))
        sections.append(Section("Which classes vanish, when, and who was absent", maps, text + _cut(history)))
        sections.append(
            Section("What local training costs by class", (measures.class_forgetting_figure(run),), wide=True)
        )
    if run.measure_files.get("drift"):
        drift = (measures.drift_norm_figure(run), measures.drift_cosine_figure(run))
        sections.append(Section("Client drift", drift, paragraph(words.DRIFT)))
        pairs = Section("Who pulls in the same direction", (measures.cosine_heatmap(run),), paragraph(words.COSINES))
        sections.append(pairs)
    kept = []
    if run.measure_files.get("loss_increase"):
        kept.append((measures.loss_increase_figure(run), words.LOSS_INCREASE))
    if run.measure_files.get("fisher"):
        kept.append((measures.fisher_figure(run), words.FISHER))
    if kept:
        text = "".join(paragraph(what) for _, what in kept)
        drawn = tuple(figure for figure, _ in kept)
        sections.append(Section("What becomes of earlier clients' data", drawn, text, wide=len(drawn) == 1))
    return sections


def comparison_sections(groups: Sequence[Group], legend: str) -> list[Section]:
    """The curves of every measure that any setting took, and the class maps of each setting's first seed."""
    drawn = [
        figures.seeds_figure(groups, curve).update_layout(showlegend=False)
        for curve in MEASURE_CURVES
        if any(run.series(curve.key)[0] for group in groups for run in group.runs)
    ]
    sections = [Section("Further measures", tuple(drawn), paragraph(words.FURTHER) + legend)] if drawn else []
    histories = [(group, measures.class_history(group.runs[0])) for group in plain_loss_first(groups)]
    known = [(group, history) for group, history in histories if history is not None]
    if known:
        maps = []
        for group, history in known:
            maps += [
                measures.class_accuracy_figure(history, group.label),
                measures.class_presence_figure(history, group.label),
            ]
        text = paragraph(f"{words.CLASSES} Shown is the first seed of each setting.")
        cut = next((note for _, history in known if (note := _cut(history))), "")
        sections.append(Section("Which classes vanish, when, and who was absent", tuple(maps), text + cut))
    return sections


def _cut(history: measures.ClassHistory) -> str:
    """Says what the class maps leave out, where there is too much to show."""
    shown = history.thinned()
    if len(shown.rounds) == len(history.rounds) and len(shown.names) == len(history.names):
        return ""
    text = (
        f"Shown are {len(shown.rounds)} of {len(history.rounds)} measured rounds and {len(shown.names)} of "
        f"{len(history.names)} classes, evenly spaced; classes/*.npz in the run directory holds all."
    )
    return paragraph(text, "note")
