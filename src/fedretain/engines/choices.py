"""Which of several ways to the same result is the fastest on this GPU: timed once, kept for later runs.

Kept choices save the next run the timing, and a resumed run goes on with those of the first one.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedretain.data.cache import cache_folder
from fedretain.files import write_atomically
from fedretain.version import __version__


def fastest(key: Sequence[Any], ways: Sequence[Callable[[], Tensor]]) -> Tensor:
    """The result of the fastest of several ways; they are timed the first time that a key is seen on this machine."""
    if len(ways) == 1:
        return ways[0]()
    chosen, name = _kept(), str(key)
    if chosen.get(name, len(ways)) >= len(ways):
        if torch.cuda.is_current_stream_capturing():
            return ways[0]()
        times = [milliseconds(way) for way in ways]
        chosen[name] = times.index(min(times))
        _keep(name, chosen[name])
    return ways[chosen[name]]()


def milliseconds(way: Callable[[], Tensor], repeats: int = 5) -> float:
    """The best of three times ``repeats`` calls."""
    for _ in range(2):
        way()
    times = []
    for _ in range(3):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        for _ in range(repeats):
            way()
        end.record()
        end.synchronize()
        times.append(float(start.elapsed_time(end)))
    return min(times)


def _file() -> Path:
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    cudnn = torch.backends.cudnn.version()  # type: ignore[no-untyped-call]
    machine = f"{__version__} {torch.__version__} {cudnn} {device}"
    return cache_folder() / "kernels" / f"{hashlib.sha256(machine.encode()).hexdigest()[:16]}.json"


def _read() -> dict[str, int]:
    try:
        return {str(name): int(index) for name, index in json.loads(_file().read_text()).items() if index >= 0}
    except (OSError, ValueError, TypeError, AttributeError, RuntimeError):
        return {}


@functools.cache
def _kept() -> dict[str, int]:
    """The choices of earlier runs and of this one; none where they are missing or damaged."""
    return _read()


def _keep(name: str, index: int) -> None:
    """For later runs, beside what other processes have kept since; without a place for it they time again."""
    try:
        write_atomically(_file(), json.dumps({**_read(), name: index}).encode(), durable=False)
    except (OSError, RuntimeError):
        return
