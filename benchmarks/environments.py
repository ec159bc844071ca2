"""Virtual environments of the peers: made on first use, kept below ``benchmarks/.cache``, named by their pins."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
from pathlib import Path

CACHE = Path(__file__).parent / ".cache"
PINS = Path(__file__).parent / "peers"


def python_of(environment: str | None) -> Path:
    """The interpreter of a peer's environment, which is made if it is not there."""
    if environment is None:
        return Path(sys.executable)
    pins = PINS / f"{environment}.txt"
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    folder = CACHE / f"{environment}-py{version}-{hashlib.sha256(pins.read_bytes()).hexdigest()[:8]}"
    python = folder / "bin" / "python"
    if not (folder / "complete").exists():
        shutil.rmtree(folder, ignore_errors=True)
        _install(folder, python, pins)
        (folder / "complete").touch()
    return python


def _install(folder: Path, python: Path, pins: Path) -> None:
    """PyTorch goes first, with what it needs; then exactly the pinned packages, so that none brings another PyTorch."""
    _run([sys.executable, "-m", "venv", str(folder)])
    pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    torch = next(line for line in pins.read_text().splitlines() if line.startswith("torch=="))
    _run([*pip, "--constraint", str(pins), torch])
    _run([*pip, "--no-deps", "--requirement", str(pins)])


def _run(command: list[str]) -> None:
    """Raise with the last line of what went wrong."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        lines = (done.stderr or done.stdout).strip().splitlines() or ["no output"]
        raise RuntimeError(f"{' '.join(command[1:5])} ... failed: {lines[-1]}")
