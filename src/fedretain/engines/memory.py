"""What the C library does with memory that is freed."""

from __future__ import annotations

import ctypes
import sys

_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD = -1, -2, -3
_KEPT = 2**29


def keep_freed_memory() -> None:
    """Let this process keep memory that it frees, for its next use.

    By default glibc gives large blocks back to the system at once; fetching fresh pages for the activations of every
    step then costs more than some of the convolutions that fill them. Elsewhere nothing happens.
    """
    if not sys.platform.startswith("linux"):
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return
    for what, size in ((_MMAP_THRESHOLD, _KEPT), (_TRIM_THRESHOLD, _KEPT), (_TOP_PAD, 2**26)):
        mallopt(what, size)
