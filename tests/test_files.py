"""Atomic files, and sizes in words."""

from __future__ import annotations

from pathlib import Path

import pytest

from fedretain.files import in_words, write_atomically


@pytest.mark.parametrize(
    ("count", "words"),
    [(0, "0 B"), (999, "999 B"), (4840, "4.84 kB"), (999_600, "1 MB"), (3.18e12, "3.18 TB"), (2e15, "2,000 TB")],
)
def test_sizes_in_words(count: float, words: str) -> None:
    assert in_words(count) == words


def test_a_writer_that_fails_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    target = tmp_path / "file"
    write_atomically(target, b"old")

    def breaks(file) -> None:
        file.write(b"half of the n")
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        write_atomically(target, breaks)
    assert target.read_bytes() == b"old"
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
