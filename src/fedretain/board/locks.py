"""Which run directories are being written to, found without touching their locks."""

from __future__ import annotations

from pathlib import Path

LOCKS = Path("/proc/locks")


def locked_inodes(listed: Path = LOCKS) -> frozenset[int]:
    """The inodes of all files that a process of this machine holds an exclusive ``flock`` on, as Linux lists them.

    Trying the lock would tell it too, but would hold it for an instant, in which a run that starts would be refused.
    Devices are not compared: on some file systems the list names another one than ``stat`` does. Elsewhere than on
    Linux nothing is known, and the set is empty.
    """
    try:
        lines = listed.read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return frozenset()
    # 1: FLOCK  ADVISORY  WRITE 24087 fe:00:2146442 0 EOF
    words = (line.split() for line in lines)
    held = (word[5].rpartition(":")[2] for word in words if len(word) > 5 and (word[1], word[3]) == ("FLOCK", "WRITE"))
    return frozenset(int(inode) for inode in held if inode.isdigit())
