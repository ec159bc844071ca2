"""The kernels compiled for this machine: once, by the C compiler that is there, and kept for the next time.

Without a compiler, or where it fails, there are none, and PyTorch's own operations stay. ``FEDRETAIN_NATIVE=0`` keeps
them out.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from pathlib import Path

import torch

from fedretain.data.cache import cache_folder

LOG = logging.getLogger("fedretain")
SOURCES = ("kernels.c", "convolution.h", "pooling.h", "updating.h", "playing.h", "drawing.h")
FLAGS = ("-O3", "-march=native", "-fno-trapping-math", "-fPIC", "-shared")
DEFINED = {torch.float32: (), torch.float64: ("-DDOUBLE",)}
"""What the compiler is told for each type of numbers; there are kernels for no other."""
PARTS = {"single": (), "playing": ("-DPLAYING",), "drawing": ("-DDRAWING",)}
"""The same for each library: single operations, programs of them, random numbers."""
PATIENCE = 60.0
"""Seconds after which the compiler is given up."""


def compiler() -> list[str] | None:
    """The command of the C compiler: ``$CC``, or the first of cc, gcc and clang; None where there is none."""
    if os.environ.get("FEDRETAIN_NATIVE") == "0":
        return None
    given = shlex.split(os.environ.get("CC", ""))
    for command in (given,) if given else (["cc"], ["gcc"], ["clang"]):
        if shutil.which(command[0]):
            return command
    return None


@functools.cache
def library(dtype: torch.dtype, part: str = "single") -> ctypes.CDLL | None:
    """The kernels for one type of numbers, which takes a second the first time; None where they cannot be had."""
    command = compiler() if dtype in DEFINED else None
    if command is None:
        return None
    flags = [*FLAGS, *DEFINED[dtype], *PARTS[part]]
    try:
        path = _folder() / f"{_key(command, flags)}.so"
        if not path.exists():
            _compile([*command, *flags], path)
        try:
            return ctypes.CDLL(str(path))
        except OSError:
            path.unlink()  # damaged: it is made anew the next time
            raise
    except (OSError, RuntimeError, subprocess.SubprocessError) as error:
        LOG.info("no kernels of our own, PyTorch's are used: %s", error)
        return None


def _compile(command: list[str], path: Path) -> None:
    """The file appears under its name when it is complete: processes that compile at once do not meet."""
    source = str(Path(__file__).parent / SOURCES[0])
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        made = Path(folder) / path.name
        ended = subprocess.run(
            [*command, source, "-o", str(made)],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=PATIENCE,
        )
        if ended.returncode:
            raise OSError(f"{command[0]} failed: {ended.stderr.strip()[-500:]}")
        made.replace(path)


def _folder() -> Path:
    """Where libraries are kept; where nothing can be kept, a folder for this process alone."""
    try:
        folder = cache_folder() / "native"
        folder.mkdir(parents=True, exist_ok=True)
        if os.access(folder, os.W_OK):
            return folder
    except (OSError, RuntimeError):
        pass
    return Path(_own_folder().name)


@functools.cache
def _own_folder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="fedretain-native-")


def _key(command: list[str], flags: list[str]) -> str:
    """What the library depends on: sources, compiler, flags, and the processor that ``native`` stands for."""
    digest = hashlib.sha256()
    for name in SOURCES:
        digest.update((Path(__file__).parent / name).read_bytes())
    found = Path(shutil.which(command[0]) or command[0]).stat()
    facts = (command, flags, found.st_size, found.st_mtime_ns, platform.system(), platform.machine(), _processor())
    digest.update(repr(facts).encode())
    return digest.hexdigest()[:16]


def _processor() -> str:
    """The processor's model and abilities, as far as the system tells."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return platform.processor()
    first = text.partition("\n\n")[0].splitlines()
    return "\n".join(line for line in first if line.startswith(("model name", "flags", "CPU part", "Features")))
