"""The metrics file: whole rows only, in order, kept byte for byte."""

from __future__ import annotations

from pathlib import Path

import pytest

from fedretain.runs.metrics import Metrics, keep_rows, read_rows


@pytest.mark.parametrize(
    ("content", "rounds"),
    [
        (b"", []),
        (b'{"round": 1}\n{"round": 2}\n', [1, 2]),
        (b'{"round": 1}\n{"round": 2}', [1]),  # no line end: half-written
        (b'{"round": 1}\n{"rou', [1]),
        (b'{"round": 1}\n\x00\xff\n{"round": 3}\n', [1]),
        (b'{"round": 1}\n{"round": 3}\n', [1]),
        (b'{"round": 1}\n[2]\n', [1]),
        (b'{"round": 2}\n', []),
    ],
)
def test_rows_up_to_the_first_damage(content: bytes, rounds: list[int], tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(content)
    assert [row["round"] for row in read_rows(path)] == rounds
    keep_rows(path, len(rounds))
    assert path.read_bytes() == b"".join(b'{"round": %d}\n' % n for n in rounds)


def test_a_missing_file_has_no_rows(tmp_path: Path) -> None:
    assert read_rows(tmp_path / "metrics.jsonl") == []
    keep_rows(tmp_path / "metrics.jsonl", 0)
    assert (tmp_path / "metrics.jsonl").read_bytes() == b""


def test_columns() -> None:
    table = Metrics([{"round": 1, "a": 2.0, "clients": {}}, {"round": 2, "b": 3.0}])
    assert table.columns == ["round", "a", "b"]
    assert table["a"] == [2.0, None]
    assert list(table[1:]) == [{"round": 2, "b": 3.0}]
    assert repr(table) == "Metrics(2 rounds: round, a, b)"
    assert Metrics([])["anything"] == []
    with pytest.raises(KeyError, match="columns: round, a, b"):
        table["c"]
