"""What is installed and found: the first thing to look at when something does not work."""

from __future__ import annotations

import os
import platform
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import torch

from fedretain.data.cache import cache_folder
from fedretain.data.sources import DATASETS, locate
from fedretain.engines.native import available, compiler
from fedretain.runs.environment import package_versions
from fedretain.version import __version__

EXTRAS = {
    "hub": ("datasets", "huggingface_hub"),
    "figures": ("matplotlib",),
    "board": ("starlette", "uvicorn"),
    "track": ("tensorboard", "mlflow", "wandb"),
}


class Finding(NamedTuple):
    """One line of the doctor's report."""

    topic: str
    name: str
    good: bool
    detail: str


def doctor() -> list[Finding]:
    """Versions, devices, extras, data."""
    findings = [
        Finding("versions", "fedretain", True, __version__),
        Finding("versions", "python", True, platform.python_version()),
    ]
    for name, version in package_versions().items():
        findings.append(Finding("versions", name, version is not None, version or f"missing: pip install {name}"))
    findings.append(
        Finding("devices", "cpu", True, f"{os.cpu_count()} cores, {torch.get_num_threads()} PyTorch threads")
    )
    findings.append(Finding("devices", "c kernels", available(torch.float32), _kernels()))
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            memory = torch.cuda.get_device_properties(index).total_memory / 2**30
            detail = f"{torch.cuda.get_device_name(index)}, {memory:.0f} GiB"
            findings.append(Finding("devices", f"cuda:{index}", True, detail))
    else:
        findings.append(Finding("devices", "cuda", False, "not available: device auto uses the CPU"))
    for extra, modules in EXTRAS.items():
        missing = [module for module in modules if find_spec(module) is None]
        detail = f"missing: pip install 'fedretain[{extra}]'" if missing else "installed"
        findings.append(Finding("extras", extra, not missing, detail))
    for name, source in DATASETS.items():
        if source.hub is None and "root" not in source.options:
            continue
        place = locate(name)
        detail = str(place) if place else "not found: set FEDRETAIN_DATA or data.root"
        findings.append(Finding("data", name, place is not None, detail))
    findings.append(Finding("data", "cache", _writable(cache_folder()), str(cache_folder())))
    return findings


def _kernels() -> str:
    """What makes the kernels for the CPU, or why there are none."""
    command, without = compiler(), "the CPU trains without them, slower where a model has convolutions"
    if os.environ.get("FEDRETAIN_NATIVE") == "0":
        return f"kept out by FEDRETAIN_NATIVE=0: {without}"
    if command is None:
        return f"no C compiler (cc, gcc, clang or $CC): {without}"
    made_by = " ".join(command)
    return f"made by {made_by}" if available(torch.float32) else f"{made_by} cannot make them: {without}"


def _writable(folder: Path) -> bool:
    existing = next(place for place in (folder, *folder.parents) if place.exists())
    return os.access(existing, os.W_OK)
