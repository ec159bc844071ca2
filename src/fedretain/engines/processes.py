"""How worker processes are started: copies of this one where that is safe, else new ones that import first."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import threading
import warnings
from collections.abc import Sequence
from typing import Protocol

import torch

from fedretain.engines.engine import World
from fedretain.engines.shared import SharedFile
from fedretain.engines.worker import copied_main


class Process(Protocol):
    """A process that this one started."""

    def wait(self, timeout: float | None = None) -> int:
        """Its exit status, minus the signal's number if one ended it; ``subprocess.TimeoutExpired`` while it runs."""

    def kill(self) -> None:
        """End it at once."""


class Copy:
    """A copy of this process."""

    def __init__(self, copied: multiprocessing.process.BaseProcess) -> None:
        self.copied = copied

    @property
    def pid(self) -> int | None:
        """Its number."""
        return self.copied.pid

    def wait(self, timeout: float | None = None) -> int:
        """As ``Process`` has it."""
        self.copied.join(timeout)
        if self.copied.exitcode is None:
            raise subprocess.TimeoutExpired("copy", timeout or 0)
        return self.copied.exitcode

    def kill(self) -> None:
        """As ``Process`` has it."""
        self.copied.kill()


def can_copy_this_process() -> bool:
    """Whether a copy of this process can train: on Linux, with no other Python thread that might hold a lock.

    Threads of PyTorch's own arithmetic do no harm to a copy that uses one thread, but those that it keeps for the
    gradients of an accelerator would.
    """
    return (
        sys.platform == "linux"
        and threading.active_count() == 1
        and not multiprocessing.current_process().daemon
        and not torch.accelerator.is_available()
    )


def new_process(
    world: SharedFile, line: int, broadcast: int, inboxes: list[int], outboxes: list[int]
) -> subprocess.Popen[bytes]:
    """A process that imports what it needs and finds the experiment in the file ``world``."""
    arguments = (line, world.number, broadcast, inboxes, outboxes)
    code = f"import sys; sys.path[:] = {sys.path!r}; import fedretain.engines.worker as w; w.main(*{arguments!r})"
    return subprocess.Popen(
        [sys.executable, "-c", code],
        pass_fds=(line, world.number, broadcast, *inboxes, *outboxes),
        env={**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"},
        stdin=subprocess.DEVNULL,
    )


def copy_of_this_process(
    worlds: Sequence[World], inner: str, line: int, broadcast: int, inboxes: list[int], outboxes: list[int]
) -> Copy:
    """A process that holds the experiment already."""
    arguments = (line, worlds, inner, broadcast, inboxes, outboxes)
    process = multiprocessing.get_context("fork").Process(target=copied_main, args=arguments, daemon=True)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*multi-threaded, use of fork", category=DeprecationWarning)
        process.start()
    return Copy(process)
