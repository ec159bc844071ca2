"""Forgettable examples of each client by round, as a table (Tables 2, 3 and 6–8 of the FedWAvg paper)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fedretain.report.figures import MOST_CLIENTS, evenly_spaced
from fedretain.report.page import paragraph, table
from fedretain.report.reading import RunData, client_values, finite

MOST_ROUNDS = 10


@dataclass(frozen=True)
class ForgettableCounts:
    """``by_round[t][k]``: how many training examples client k's local model of round t had right and the global model
    after that round has wrong (FedWAvg paper, §3); ``examples[k]``: how many it trains on. Only participants count.
    """

    by_round: dict[int, dict[int, int]]
    examples: dict[int, int]


def forgettable_counts(run: RunData) -> ForgettableCounts:
    """The counts in the run's log; a round without them, or with lists that do not fit together, was not measured."""
    by_round: dict[int, dict[int, int]] = {}
    examples: dict[int, int] = {}
    for row in run.metrics:
        counts = _by_client(row, "forgettable_examples")
        if counts:
            by_round[int(row["round"])] = counts
            examples |= _by_client(row, "examples")
    return ForgettableCounts(by_round, examples)


def rounds_to_count(counts: Sequence[ForgettableCounts]) -> list[int]:
    """The columns of the tables: at most ten of the measured rounds, evenly spaced, first and last among them."""
    measured = sorted({round for one in counts for round in one.by_round})
    return [measured[position] for position in evenly_spaced(len(measured), MOST_ROUNDS)]


def forgettable_table(counts: ForgettableCounts, rounds: Sequence[int]) -> str:
    """Clients as rows, rounds as columns, a dash where a client did not take part; the last row adds up all clients.

    More than 40 clients are shown by 40 of them, evenly spaced by number, and a note says so.
    """
    columns = [counts.by_round.get(round, {}) for round in rounds]
    clients = sorted(set().union(*columns))
    shown = [clients[position] for position in evenly_spaced(len(clients), MOST_CLIENTS)]
    lines = [
        _line(f"client {client}", [counts.examples.get(client), *(column.get(client) for column in columns)])
        for client in shown
    ]
    sums = [sum(column.values()) if column else None for column in columns]
    lines.append(_line("all participants", [None, *sums]))
    head = ["", "training examples", *(f"round {round}" for round in rounds)]
    note = ""
    if len(shown) < len(clients):
        text = f"Shown are {len(shown)} of {len(clients)} clients, evenly spaced by number; the last row counts all."
        note = paragraph(text, "note")
    return table(head, lines, "counts") + note


def _line(title: str, values: Sequence[int | None]) -> list[str]:
    return [f'<th scope="row">{title}</th>', *(f"<td>{'–' if value is None else value}</td>" for value in values)]


def _by_client(row: Any, key: str) -> dict[int, int]:
    """The values of one row by client number; empty unless there is one value for each participant."""
    clients = [finite(client) for client in client_values(row, "id")]
    values = [finite(value) for value in client_values(row, key)]
    if len(clients) != len(values):
        return {}
    pairs = zip(clients, values, strict=True)
    return {int(client): int(value) for client, value in pairs if client is not None and value is not None}
