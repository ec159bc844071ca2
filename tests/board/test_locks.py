"""Locks are seen, and not touched."""

from __future__ import annotations

import fcntl
import sys
from pathlib import Path

import pytest

from fedretain.board.locks import locked_inodes


@pytest.mark.skipif(not Path("/proc/locks").exists(), reason="only Linux lists its locks")
def test_a_held_lock_is_seen_while_it_is_held(tmp_path: Path) -> None:
    file = tmp_path / ".lock"
    with file.open("wb") as lock:
        inode = file.stat().st_ino
        assert inode not in locked_inodes()
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        assert inode in locked_inodes()
    assert inode not in locked_inodes()


def test_the_list_is_read_as_linux_writes_it(tmp_path: Path) -> None:
    """Only exclusive flocks count: no shared one, no POSIX one, no line of a waiting process, no nonsense."""
    listed = tmp_path / "locks"
    listed.write_text(
        "1: FLOCK  ADVISORY  WRITE 24087 fe:00:11 0 EOF\n"
        "2: FLOCK  ADVISORY  READ 24087 fe:00:12 0 EOF\n"
        "3: POSIX  ADVISORY  WRITE 24087 fe:00:13 0 EOF\n"
        "3: -> FLOCK  ADVISORY  WRITE 24088 fe:00:14 0 EOF\n"
        "nonsense\n"
    )
    assert locked_inodes(listed) == {11}


def test_without_such_a_list_nothing_is_known(tmp_path: Path) -> None:
    assert locked_inodes(tmp_path / "nothing") == frozenset()
    assert sys.platform == "linux" or locked_inodes() == frozenset()
