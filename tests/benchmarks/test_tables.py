import io

from benchmarks.measuring import Measurement
from benchmarks.tables import ratios, table_of
from rich.console import Console


def measured(runner, seconds, work="W"):
    return Measurement(work, runner, seconds, 0.125, 2.0, 300.0)


def text(table):
    console = Console(width=200, file=io.StringIO())
    console.print(table)
    return console.file.getvalue()


def test_ratios_are_to_plain_and_to_the_best_peer_of_the_same_work():
    """Plain takes 6 s, fluke 4 s (the best peer), fedretain 2 s: fedretain 6/2 = 3 and 4/2 = 2, fluke 6/4 = 1.5 and 1.
    A fedretain engine is no peer, however fast, and another work's peers do not count."""
    found = ratios(
        [
            measured("fedretain-loop", 2.0),
            measured("fedretain-auto", 1.0),
            measured("plain-pytorch", 6.0),
            measured("fluke", 4.0),
            measured("fedlab", 0.001, work="other"),
        ]
    )
    assert found["W", "fedretain-loop"] == (3.0, 2.0)
    assert found["W", "fluke"] == (1.5, 1.0)
    assert found["other", "fedlab"] == (None, 1.0)


def test_nothing_to_compare_with():
    assert ratios([measured("fedretain-loop", 2.0)])["W", "fedretain-loop"] == (None, None)


def test_table_shows_failures_in_place_and_notes_beside_the_work():
    failures = {("W", "fluke"): "crashed", ("X", "fedlab"): "crashed"}
    shown = text(
        table_of([measured("plain-pytorch", 6.0), measured("fedretain-loop", 3.0)], failures, {"W": "1 round"})
    )
    rows = [line for line in shown.splitlines() if "│" in line]
    assert any("W (1 round)" in row and "fedretain-loop" in row and "3.000" in row and "2.00" in row for row in rows)
    assert any("W (1 round)" in row and "fluke" in row and "failed" in row for row in rows)
    assert any("X" in row and "fedlab" in row and "failed" in row for row in rows)
