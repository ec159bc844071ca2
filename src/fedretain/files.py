"""Writing files so that a crash leaves either the old file or the new one, never half of it."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO


def write_atomically(path: Path, content: bytes | Callable[[BinaryIO], None], *, durable: bool = True) -> None:
    """Write beside the target, flush to disk, then rename over it; ``content`` is bytes or a function that writes.

    ``durable=False`` leaves the flush to the caller: the file is whole or absent for other processes, but not yet safe
    from a power cut.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".tmp", dir=path.parent)
    try:
        with os.fdopen(descriptor, "wb") as file:
            if callable(content):
                content(file)
            else:
                file.write(content)
            file.flush()
            if durable:
                os.fsync(file.fileno())
        mask = os.umask(0)
        os.umask(mask)
        Path(name).chmod(0o666 & ~mask)
        Path(name).replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            Path(name).unlink()
        raise


def in_words(count: float) -> str:
    """A number of bytes for people: 3.18 TB."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 999.5:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:,.3g} TB" if count < 1000 else f"{count:,.0f} TB"
