"""What the command line prints of finished runs besides the main table: further summaries, R_a, cost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from rich.box import SIMPLE
from rich.markup import escape
from rich.table import Table

from fedretain.compare import Comparison
from fedretain.runs.run import Run

if TYPE_CHECKING:
    from fedretain.report import TrainingPair

_SUMMARY_TITLES = {
    "mean_last_100": "last 100\nmean %",
    "top": "top\n%",
    "average": "average\n%",
    "by_data": "forgets\nby data",
}


def summaries_table(comparison: Comparison) -> Table:
    """The other summaries of accuracy and forgetting, and the rounds to each target."""
    from fedretain.report import SUMMARIES

    rows = comparison.summaries
    shown = [column for column in SUMMARIES if column.key in _SUMMARY_TITLES]
    targets = list(dict.fromkeys(share for row in rows for share in row["rounds_to"]))
    references = " or ".join(dict.fromkeys(row["reference"] for row in rows if row["rounds_to"]))
    caption = f"R(a): the first round with a × the reference accuracy; reference: {references}" if targets else None
    table = Table(box=SIMPLE, padding=(0, 1, 0, 0), caption=caption, caption_justify="left")
    table.add_column("", overflow="fold")
    for column in shown:
        table.add_column(_SUMMARY_TITLES[column.key], justify="right", no_wrap=True)
    for share in targets:
        table.add_column(f"R({share:g})\nrounds", justify="right")
    for row in rows:
        cells = [column.text(row[column.key]).replace(" ± ", "±") for column in shown]
        cells += [row["rounds_to"][a].text.replace(" ± ", "±") if a in row["rounds_to"] else "–" for a in targets]
        table.add_row(escape(row["label"]), *cells)
    return table


def training_table(pairs: Sequence[TrainingPair]) -> Table:
    """Forgetting events of the settings that were trained both ways (Table 1 of the FedWAvg paper)."""
    table = Table("forgetting events", "centralised", "federated", "more by", box=SIMPLE, padding=(0, 1, 0, 0))
    for pair in pairs:
        table.add_row(escape(pair.label), *pair.texts)
    return table


def rounds_to_words(done: Run) -> str:
    """R_a of one run, for example: rounds to accuracy: 50 % in round 3, 90 % not within 60."""
    settings, summary = done.experiment.evaluate, done.summary
    of_reference = "" if settings.reference is None else f" of {100 * settings.reference:g} %"
    reached = {
        share: f"not within {summary['rounds']}" if round is None else f"in round {round}"
        for share, round in summary["rounds_to_accuracy"].items()
    }
    told = ", ".join(f"{100 * float(share):g} %{of_reference} {when}" for share, when in reached.items())
    return f"rounds to accuracy: {told or 'no evaluate.targets given'}"


def cost_words(cost: Mapping[str, float]) -> str:
    """Where the time of a run went: seconds and shares of training, evaluating, measuring."""
    kinds = ("training", "evaluating", "measuring")
    whole = sum(cost[f"{kind}_seconds"] for kind in kinds) or 1.0
    spent = [f"{cost[f'{kind}_seconds']:.1f} s {kind} ({cost[f'{kind}_seconds'] / whole:.1%})" for kind in kinds]
    return f"time: {', '.join(spent)}"
