from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from fedretain.report import read_run
from fedretain.report.forgettable import ForgettableCounts, forgettable_counts, forgettable_table, rounds_to_count

MakeRun = Callable[..., Path]


def cells(table: str) -> list[list[str]]:
    return [re.findall(r"<t[hd][^>]*>([^<]*)<", line) for line in re.findall(r"<tr>.*?</tr>", table)]


def test_counts_come_from_the_log_by_client_number(make_run: MakeRun) -> None:
    counts = forgettable_counts(read_run(make_run()))
    assert counts.by_round == {2: {0: 4, 2: 2}, 4: {0: 8, 2: 4}}
    assert counts.examples == {0: 10, 2: 10}


def test_clients_are_rows_and_rounds_columns_with_a_dash_for_who_was_absent() -> None:
    counts = ForgettableCounts({10: {3: 7, 1: 5}, 20: {1: 2}}, {1: 100, 3: 80})
    assert cells(forgettable_table(counts, [10, 20, 30])) == [
        ["", "training examples", "round 10", "round 20", "round 30"],
        ["client 1", "100", "5", "2", "–"],
        ["client 3", "80", "7", "–", "–"],
        ["all participants", "–", "12", "2", "–"],
    ]


def test_ten_rounds_stand_for_many() -> None:
    """Settings measured in different rounds share their columns."""
    even = ForgettableCounts({round: {0: 1} for round in range(2, 200, 2)}, {})
    odd = ForgettableCounts({201: {0: 1}}, {})
    rounds = rounds_to_count([even, odd])
    assert len(rounds) == 10
    assert (rounds[0], rounds[-1]) == (2, 201)
    assert rounds_to_count([odd]) == [201]
    assert rounds_to_count([]) == []


def test_many_clients_are_cut_but_all_are_counted() -> None:
    """100 clients with one example each: 40 rows, and 100 in the sum."""
    table = forgettable_table(ForgettableCounts({1: dict.fromkeys(range(100), 1)}, {}), [1])
    lines = cells(table)
    assert len(lines) == 1 + 40 + 1
    assert lines[-2] == ["client 99", "–", "1"]
    assert lines[-1] == ["all participants", "–", "100"]
    assert "40 of 100 clients" in table
