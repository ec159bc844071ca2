"""Decoded images kept on disk, so that a dataset is decoded once per machine.

A cache file is a NumPy ``.npy`` file followed by the 32 bytes of its ``array_digest``. It appears under
its name only when it is complete (temporary file, fsync, rename), so readers and any number of writers
need no lock: two processes that decode at once write the same bytes, and the later rename wins. A file
that does not match its digest counts as absent and is replaced. Where the folder cannot be written,
everything works without the cache.
"""

from __future__ import annotations

import contextlib
import functools
import os
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

import numpy as np

from fedretain.data.dataset import Array, array_digest
from fedretain.files import write_atomically

# Raise it when the same source bytes decode to other arrays than before.
DECODER_VERSION = 1
_ABANDONED_AFTER_SECONDS = 24 * 3600


def cache_folder() -> Path:
    """``$FEDRETAIN_CACHE``, or ``~/.cache/fedretain``."""
    chosen = os.environ.get("FEDRETAIN_CACHE")
    return Path(chosen).expanduser() if chosen else Path.home() / ".cache" / "fedretain"


def cached_array(key: str, produce: Callable[[], Array]) -> tuple[Array, str]:
    """The array kept under ``key`` and its digest; produced and kept if it is absent or damaged.

    ``key`` must name everything the array depends on except the decoder's version.
    """
    try:
        path = cache_folder() / f"{key}-v{DECODER_VERSION}.npy"
    except RuntimeError as error:  # no home directory
        _warn_uncached("~/.cache/fedretain", str(error))
        array = produce()
        return array, array_digest(array)
    kept = _read(path)
    if kept is not None:
        return kept
    array = produce()
    digest = array_digest(array)
    try:
        _write(path, array, digest)
    except OSError as error:
        _warn_uncached(str(path.parent), error.strerror or str(error))
    return array, digest


def _read(path: Path) -> tuple[Array, str] | None:
    try:
        with path.open("rb") as file:
            array: Array = np.lib.format.read_array(file, allow_pickle=False)
            digest = file.read().hex()
    except Exception:
        # Damaged bytes make NumPy raise almost anything; whatever it is, the answer is to decode again.
        return None
    return (array, digest) if array_digest(array) == digest else None


def _write(path: Path, array: Array, digest: str) -> None:
    def write(file: BinaryIO) -> None:
        np.lib.format.write_array(file, array, allow_pickle=False)
        file.write(bytes.fromhex(digest))

    _remove_abandoned(path.parent)
    write_atomically(path, write)


def _remove_abandoned(folder: Path) -> None:
    """Removes what killed writers left behind; young files may belong to a writer at work."""
    for part in folder.glob(".*.npy.*.tmp"):
        with contextlib.suppress(OSError):  # another process was quicker, or another user owns it
            if time.time() - part.stat().st_mtime > _ABANDONED_AFTER_SECONDS:
                part.unlink()


@functools.cache
def _warn_uncached(folder: str, reason: str) -> None:
    """Warns once per folder and reason, however many files could not be kept."""
    warnings.warn(
        f"decoded images are not kept: cannot write to {folder} ({reason}); they will be decoded again next "
        "time. Set FEDRETAIN_CACHE to a writable folder with room for them.",
        stacklevel=2,
    )
