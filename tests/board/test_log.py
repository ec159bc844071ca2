"""The log is read on where it was left, and from its end when it is finished."""

from __future__ import annotations

import io
import json
from typing import Any

import pytest

from fedretain.board import log
from fedretain.board.log import LogNumbers, read_end, read_on


def line(round: int, **numbers: Any) -> bytes:
    return json.dumps({"round": round, "seconds": 0.5, **numbers}).encode() + b"\n"


class Counted(io.BytesIO):
    """Counts the bytes that are read."""

    count = 0

    def read(self, size: int | None = -1, /) -> bytes:
        content = super().read(size)
        self.count += len(content)
        return content


def test_numbers_are_the_last_ones_measured_and_seconds_add_up() -> None:
    """Rounds 1 to 3 of half a second each; accuracy of round 3, forgetting of round 2."""
    content = line(1, test_accuracy=0.1) + line(2, forgetting_by_model=0.2) + line(3, test_accuracy=0.3)
    found = read_on(io.BytesIO(content), LogNumbers())
    assert (found.round, found.accuracy, found.forgetting, found.seconds) == (3, 0.3, 0.2, 1.5)
    assert (found.problem, found.cut_off, found.offset) == (None, False, len(content))


def test_reading_goes_on_where_it_ended() -> None:
    """Only the new line, and what is compared before it, is read the second time."""
    content = b"".join(line(round) for round in range(1, 101))
    known = read_on(io.BytesIO(content), LogNumbers())
    file = Counted(content + line(101, test_accuracy=0.9))
    found = read_on(file, known)
    assert (found.round, found.accuracy, found.seconds) == (101, 0.9, 50.5)
    assert file.count == len(known.before) + len(line(101, test_accuracy=0.9)) < 400


def test_a_half_written_line_waits_for_its_end() -> None:
    whole = line(1) + line(2, test_accuracy=0.7)
    found = read_on(io.BytesIO(whole[:-5]), LogNumbers())
    assert (found.round, found.cut_off, found.problem) == (1, True, None)
    found = read_on(io.BytesIO(whole), found)
    assert (found.round, found.accuracy, found.cut_off) == (2, 0.7, False)


def test_a_log_that_was_cut_back_and_written_anew_is_read_from_its_start() -> None:
    """A resume repeats rounds: the log is as long as before or longer, but other seconds stand in it."""
    known = read_on(io.BytesIO(line(1) + line(2)), LogNumbers())
    for rounds, seconds in ((1, 0.5), (2, 1.0), (3, 1.5)):
        anew = b"".join(line(round).replace(b"0.5", b"0.4") for round in range(1, rounds + 1))
        found = read_on(io.BytesIO(anew), known)
        assert (found.round, found.seconds) == (rounds, pytest.approx(0.8 * seconds))


@pytest.mark.parametrize("bad", [b"\x00\xff\x00\n", b"[1, 2]\n", b"{}\n", b"[" * 100_000 + b"\n", line(7)])
def test_a_damaged_line_is_named_and_what_stands_before_it_counts(bad: bytes) -> None:
    found = read_on(io.BytesIO(line(1, test_accuracy=0.4) + bad + line(3)), LogNumbers())
    assert (found.round, found.accuracy) == (1, 0.4)
    assert found.problem == "line 2 is not the log of round 2"


def test_garbage_without_lines_is_not_read_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log, "LONGEST_LINE", 2 << 20)
    file = Counted(b"x" * (8 << 20))
    assert read_on(file, LogNumbers()).problem == "line 1 does not end within 2 MiB"
    assert file.count == 3 << 20


def test_the_end_of_a_finished_log_is_enough() -> None:
    """2,000 rounds of about a kilobyte; forgetting stands 100 lines before the end, within the first piece read."""
    rows = [line(round, test_accuracy=round / 4000, padding="x" * 1000) for round in range(1, 2001)]
    rows[1899] = line(1900, test_accuracy=0.1, forgetting_by_model=0.25)
    content = b"".join(rows)
    file = Counted(content)
    found = read_end(file, len(content), forgetting=True)
    assert (found.round, found.accuracy, found.forgetting) == (2000, 0.5, 0.25)
    assert file.count == log.END


def test_the_end_is_searched_further_back_where_it_must(monkeypatch: pytest.MonkeyPatch) -> None:
    content = line(1, forgetting_by_model=0.5) + b"".join(line(r, test_accuracy=0.1) for r in range(2, 200))
    monkeypatch.setattr(log, "END", 128)
    assert read_end(io.BytesIO(content), len(content), forgetting=True).forgetting == 0.5
    assert read_end(io.BytesIO(content), len(content), forgetting=False).forgetting is None


def test_damage_near_the_end_is_named() -> None:
    content = line(1, test_accuracy=0.1) + b"\x00\n" + line(3)
    found = read_end(io.BytesIO(content), len(content), forgetting=False)
    assert (found.round, found.problem) == (3, "a line near the end is damaged")
