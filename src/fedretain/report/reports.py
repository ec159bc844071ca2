"""The reports themselves: one run, a comparison of runs, a partition; each is words, numbers and sections."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

import numpy as np
import yaml

from fedretain.report import figures, further, heatmaps, words
from fedretain.report.comparison import COLUMNS, Group, comparison_rows, group_runs, plain_loss_first, spread
from fedretain.report.curves import CURVES, accuracy_by_traffic
from fedretain.report.forgettable import forgettable_counts, forgettable_table, rounds_to_count
from fedretain.report.page import Section, folded, numbers, paragraph, table, write_page
from fedretain.report.reading import RunData, finite
from fedretain.report.summaries import SUMMARIES, run_cost, summary_rows, training_pairs

Link = Callable[[RunData], str]
"""A run's own page as a piece of HTML: a link where there is one, else the name of its directory."""


class Report(NamedTuple):
    """What a page says and shows, before it is laid out."""

    title: str
    introduction: str
    sections: list[Section]


def write_report(runs: Sequence[str | Path], out: str | Path) -> Path:
    """Write one self-contained HTML page: the run's report for one run, a comparison for several."""
    out = Path(out)
    return write_page(out, *make_report(runs, lambda run: _link_beside(out, run)))


def make_report(runs: Sequence[str | Path | RunData], link: Link) -> Report:
    """The run's report for one run, a comparison for several."""
    groups = group_runs(runs)
    members = [run for group in groups for run in group.runs]
    return _report_run(groups[0]) if len(members) == 1 else _report_comparison(groups, link)


def write_partition_page(
    class_counts: Any,
    class_names: Sequence[str],
    out: str | Path,
    title: str = "Class mix in the training data",
) -> Path:
    """Write one self-contained HTML page with the stacked class bars of each client."""
    figure = figures.partition_figure(class_counts, class_names, title)
    text = paragraph(words.about_partition(np.asarray(class_counts, dtype=np.int64)), "lead")
    return write_page(out, title, text, [Section("Who holds what", (figure,), wide=True)])


def _report_run(alone: Group) -> Report:
    run = alone.runs[0]
    introduction = (
        paragraph(words.about_run(run), "lead") + paragraph(words.about_result(run)) + numbers(_run_numbers(run))
    )
    sections = [_learning(run), *_forgetting(run), *further.run_sections(run), *_forgettable([alone])]
    if run.class_counts is not None:
        bars = figures.partition_figure(run.class_counts, run.class_names)
        text = paragraph(words.about_partition(run.class_counts))
        sections.append(Section("Who holds what", (bars,), text, wide=True))
    if any(run.series(key)[0] for key in ("upload_bytes", "download_bytes")):
        drawn = [figures.traffic_figure(run)]
        if accuracy_by_traffic(alone):
            drawn.append(figures.communication_figure([alone]))
        sections.append(Section("Communication", tuple(drawn), wide=len(drawn) == 1))
    config = yaml.safe_dump(dict(run.config), sort_keys=False, allow_unicode=True)
    environment = json.dumps(run.environment, indent=2, ensure_ascii=False)
    details = folded("Configuration (config.yaml)", config)
    if run.environment:
        details += folded("Environment (environment.json)", environment)
    return Report(run.name, introduction, [*sections, Section("Settings", html=details)])


def _learning(run: RunData) -> Section:
    drawn: list[Any] = []
    if run.series("test_accuracy")[0]:
        drawn.append(figures.accuracy_figure(run))
    if any(run.series(key)[0] for key in ("test_loss", "train_loss")):
        drawn.append(figures.loss_figure(run))
    return Section("Learning", tuple(drawn), "" if drawn else paragraph("No round has been measured.", "note"))


def _forgetting(run: RunData) -> list[Section]:
    drawn: list[Any] = []
    if any(run.series(key)[0] for key in ("forgetting_by_model", "forgetting_by_data")):
        drawn.append(figures.client_forgetting_figure(run))
    if run.series("forgettable_examples")[0]:
        drawn.append(figures.forgettable_examples_figure(run))
    rounds = heatmaps.rounds_to_show([run])
    if not drawn and not rounds:
        text = "Forgetting was not measured so far; forgetting.every in the experiment says how often it is."
        return [Section("Forgetting", html=paragraph(text, "note"))]
    sections = [Section("Forgetting", tuple(drawn), paragraph(words.FORGETTING))] if drawn else []
    if rounds:
        matrices = heatmaps.read_rounds(run, rounds)
        pictures = (
            heatmaps.forgetting_heatmap(matrices, heatmaps.forgetting_limit(matrices)),
            heatmaps.accuracy_heatmap(matrices),
        )
        text = paragraph(words.HEATMAP) + _left_out([run], rounds)
        sections.append(Section("Which model forgets whose data", pictures, text))
    return sections


def _forgettable(groups: Sequence[Group]) -> list[Section]:
    """A table of each setting's first seed: clients of another seed hold other data, their counts have no mean."""
    counted = [(number, group, forgettable_counts(group.runs[0])) for number, group in enumerate(groups)]
    rounds = rounds_to_count([counts for _, _, counts in counted])
    if not rounds:
        return []
    measured = len({round for _, _, counts in counted for round in counts.by_round})
    text = words.FORGETTABLE
    if len(groups) > 1:
        text += " Shown is the first seed of each setting."
    if measured > len(rounds):
        text += f" Shown are {len(rounds)} of {measured} measured rounds, evenly spaced."
    parts = [paragraph(text)]
    for number, group, counts in counted:
        if len(groups) > 1:
            parts.append(f"<h3>{_swatch(number)}{figures.escape(group.label)}</h3>")
        parts.append(forgettable_table(counts, rounds) if counts.by_round else paragraph("Not measured.", "note"))
    return [Section("Forgettable examples of each client", html="".join(parts))]


def _left_out(runs: Sequence[RunData], rounds: Sequence[int]) -> str:
    """Says what the heatmaps do not show, where there is too much to show."""
    notes = []
    measured = len({round for run in runs for round in run.forgetting_files})
    if measured > len(rounds):
        notes.append(f"Shown are {len(rounds)} of {measured} measured rounds, evenly spaced.")
    if any(heatmaps.is_cut(run, rounds) for run in runs):
        notes.append(
            f"Shown are at most {heatmaps.MOST_MODELS} models and {heatmaps.MOST_DATA} data clients a round; "
            "forgetting/*.npz in the run directory holds all."
        )
    return paragraph(" ".join(notes), "note") if notes else ""


def _report_comparison(groups: Sequence[Group], link: Link) -> Report:
    members = [run for group in groups for run in group.runs]
    rows = comparison_rows(members)
    name = " and ".join(dict.fromkeys(run.name for run in members))
    title = f"Comparison: {name}" if len(name) <= 80 else f"Comparison of {len(members)} runs"
    introduction = paragraph(words.about_comparison(rows), "lead") + _comparison_table(rows)
    if any(len(row["seeds"]) > 1 for row in rows):
        introduction += paragraph("Mean ± sample standard deviation over seeds.", "note")
    sections = []
    curves = _comparison_curves(groups)
    if curves:
        band = "Lines are means over seeds, bands ± one standard deviation. "
        repeated = any(len(group.runs) > 1 for group in groups)
        text = paragraph(band + words.FORGETTING if repeated else words.FORGETTING)
        sections.append(Section("Learning and forgetting", tuple(curves), text + _legend(groups)))
    sections += [*_comparison_heatmaps(groups), *further.comparison_sections(groups, _legend(groups))]
    sections += _forgettable(groups)
    sections += [*_training(members), *_summaries(members)]
    sections.append(Section("What differs", html=_differences_table(groups)))
    sections.append(Section("Runs", html=_run_links(groups, link)))
    return Report(title, introduction, sections)


def _comparison_curves(groups: Sequence[Group]) -> list[Any]:
    drawn = [
        figures.seeds_figure(groups, curve)
        for curve in CURVES
        if any(run.series(curve.key)[0] for group in groups for run in group.runs)
    ]
    if any(accuracy_by_traffic(group) for group in groups):
        drawn.append(figures.communication_figure(groups))
    return [figure.update_layout(showlegend=False) for figure in drawn]


def _comparison_heatmaps(groups: Sequence[Group]) -> list[Section]:
    firsts = [(group, group.runs[0]) for group in plain_loss_first(groups) if group.runs[0].forgetting_files]
    runs = [run for _, run in firsts]
    rounds = heatmaps.rounds_to_show(runs)
    if not rounds:
        return []
    matrices = [heatmaps.read_rounds(run, rounds) for run in runs]
    limit = heatmaps.forgetting_limit([matrix for one in matrices for matrix in one])
    pictures = []
    for (group, _), one in zip(firsts, matrices, strict=True):
        pictures += [
            heatmaps.forgetting_heatmap(one, limit, group.label),
            heatmaps.accuracy_heatmap(one, group.label),
        ]
    seeds = "All settings share one colour scale; shown is the first seed of each."
    text = paragraph(f"{words.HEATMAP} {seeds}") + _left_out(runs, rounds)
    return [Section("Which model forgets whose data", tuple(pictures), text)]


def _comparison_table(rows: Sequence[Mapping[str, Any]]) -> str:
    lines = []
    for number, row in enumerate(rows):
        label = _swatch(number) + figures.escape(row["label"])
        if row["unfinished"]:
            label += f' <span class="note">({row["unfinished"]} of {len(row["runs"])} unfinished)</span>'
        cells = [f'<th scope="row">{label}</th>', f"<td>{len(row['seeds'])}</td>"]
        for column in COLUMNS:
            text = column.text(row[column.key])
            best = column.key in row["best"]
            cells.append(f'<td class="best" title="best">★ {text}</td>' if best else f"<td>{text}</td>")
        lines.append(cells)
    legend = ""
    if any(row["best"] for row in rows):
        legend = paragraph("★ marks the best of the finished settings in each column.", "note")
    return table(["setting", "runs", *(column.title for column in COLUMNS)], lines) + legend


def _training(members: Sequence[RunData]) -> list[Section]:
    """Table 1 of the FedWAvg paper, for every setting that was trained both ways."""
    pairs = training_pairs(members)
    if not pairs:
        return []
    lines = [
        [f'<th scope="row">{figures.escape(pair.label)}</th>', *(f"<td>{text}</td>" for text in pair.texts)]
        for pair in pairs
    ]
    counted = table(["setting", "centralised", "federated", "federated forgets more by"], lines)
    return [Section("Forgetting events, centralised and federated", html=paragraph(words.TRAINING) + counted)]


def _summaries(members: Sequence[RunData]) -> list[Section]:
    """The accuracy summaries, both averages of client forgetting, and R_a of each setting."""
    rows = summary_rows(members)
    labels = [
        f'<th scope="row">{_swatch(number)}{figures.escape(row["label"])}</th>' for number, row in enumerate(rows)
    ]
    lines = [
        [label, *(f"<td>{column.text(row[column.key])}</td>" for column in SUMMARIES)]
        for label, row in zip(labels, rows, strict=True)
    ]
    html = paragraph(words.SUMMARIES) + table(["setting", *(column.title for column in SUMMARIES)], lines)
    targets = list(dict.fromkeys(share for row in rows for share in row["rounds_to"]))
    if targets:
        head = ["setting", *(f"rounds to a = {share:g}" for share in targets), "reference"]
        lines = []
        for label, row in zip(labels, rows, strict=True):
            cells = [reached.text for reached in row["rounds_to"].values()] or ["–"] * len(targets)
            lines.append([label, *(f"<td>{cell}</td>" for cell in (*cells, row["reference"]))])
        html += paragraph(words.ROUNDS_TO) + table(head, lines)
    return [Section("Every summary", html=html)]


def _swatch(number: int) -> str:
    """A piece of the n-th setting's line, for tables and legends."""
    colour, dash = figures.line_style(number)
    border = {"solid": "solid", "dash": "dashed", "dot": "dotted"}[dash]
    return f'<span class="swatch" style="border-top:4px {border} {colour}"></span>'


def _legend(groups: Sequence[Group]) -> str:
    """One legend for all curves, which wraps: long labels would crowd the curves out of a small figure."""
    entries = (f"<li>{_swatch(number)}{figures.escape(group.label)}</li>" for number, group in enumerate(groups))
    return f'<ul class="legend">{"".join(entries)}</ul>'


def _differences_table(groups: Sequence[Group]) -> str:
    keys = list(groups[0].settings)
    if not keys:
        return paragraph("The runs differ in nothing but their seeds (and names).", "note")
    lines = [
        [
            f'<th scope="row">{figures.escape(key)}</th>',
            *(f"<td>{figures.escape(group.settings[key])}</td>" for group in groups),
        ]
        for key in keys
    ]
    return table(["key", *(group.label for group in groups)], lines, "text")


def _run_links(groups: Sequence[Group], link: Link) -> str:
    lines = []
    for group in groups:
        for run in group.runs:
            cells = (figures.escape(group.label), str(run.seed), figures.escape(run.status), link(run))
            lines.append([f"<td>{cell}</td>" for cell in cells])
    return table(["setting", "seed", "status", "run directory and its report"], lines, "text")


def _link_beside(out: Path, run: RunData) -> str:
    """The run's own report, where there is one, as seen from the page ``out``."""
    page = run.path / "report.html"
    relative = Path(os.path.relpath(page.resolve(), out.resolve().parent)).as_posix()
    shown = figures.escape(Path(relative).parent.as_posix())
    if page.is_file() and page.resolve() != out.resolve():
        return f'<a href="{quote(f"./{relative}")}">{shown}</a>'
    return shown


def _run_numbers(run: RunData) -> list[tuple[str, str]]:
    headline = run.headline()
    summary = run.summary or {}
    entries = [
        (column.title, column.text(spread([headline[column.key]])))
        for column in COLUMNS
        if headline[column.key] is not None
    ]
    final = summary.get("final_accuracy")
    others = {"initial accuracy (%)": summary.get("initial_accuracy")}
    if isinstance(final, Mapping):
        others |= {
            "accuracy, mean of last 100 rounds (%)": final.get("mean_last_100"),
            "top accuracy (%)": final.get("top"),
            "average accuracy (%)": final.get("average"),
        }
    accuracies = [(name, value) for name, number in others.items() if (value := finite(number)) is not None]
    extra = [(name, f"{100 * value:.1f}") for name, value in accuracies]
    return [*entries[:1], *extra, *_targets(run), *entries[1:], *_cost(run)]


def _targets(run: RunData) -> list[tuple[str, str]]:
    """R_a of the run, and its client forgetting by data, as far as they are known."""
    (row,) = summary_rows([run])
    evaluate = run.config.get("evaluate")
    given = finite(evaluate.get("reference")) if isinstance(evaluate, Mapping) else None
    of_reference = "" if given is None else f" of {100 * given:.1f} %"
    entries = [
        (f"rounds to {100 * share:g} %{of_reference}", reached.text) for share, reached in row["rounds_to"].items()
    ]
    by_data = next(column for column in SUMMARIES if column.key == "by_data")
    return [*entries, (by_data.title, by_data.text(row["by_data"]))] if row["by_data"] is not None else entries


def _cost(run: RunData) -> list[tuple[str, str]]:
    """Testing and measuring in seconds, and as shares of the run's time."""
    spent = run_cost(run)
    if spent is None:
        return []
    whole = sum(spent.values()) or 1.0
    shares = {kind: f"{seconds:.1f} ({100 * seconds / whole:.1f} %)" for kind, seconds in spent.items()}
    return [(f"seconds {kind}", shares[kind]) for kind in ("evaluating", "measuring")]
