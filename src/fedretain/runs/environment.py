"""What a run was made with: enough to explain a difference in numbers or speed, nothing about the user."""

from __future__ import annotations

import functools
import os
import platform
from importlib import metadata
from typing import Any

import torch

from fedretain.version import __version__

PACKAGES = ("torch", "numpy", "pyarrow", "pillow", "pydantic", "safetensors", "typer", "rich", "plotly")


@functools.cache
def package_versions(names: tuple[str, ...] = PACKAGES) -> dict[str, str | None]:
    """Installed versions; None for what is not there."""
    versions: dict[str, str | None] = {}
    for name in names:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = None
    return versions


def describe_environment(device: torch.device) -> dict[str, Any]:
    """Versions, platform and device."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or platform.machine()
    return {
        "fedretain": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": package_versions(),
        "device": str(device),
        "device_name": name,
        "cpus": os.cpu_count(),
        "threads": torch.get_num_threads(),
    }
