"""Shared fixtures: the real datasets when they are there, and a small experiment that runs in a blink."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

KIT_BESIDE_THE_CHECKOUT = Path(__file__).parents[2] / "shared" / "data"


@pytest.fixture(scope="session", autouse=True)
def _few_threads() -> None:
    torch.set_num_threads(1)


@pytest.fixture
def without_tf32(monkeypatch: pytest.MonkeyPatch) -> None:
    """Convolutions on a GPU without TF32, whose three digits would hide a wrong one."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)


@pytest.fixture(scope="session", autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Tests never touch the user's cache of decoded images."""
    before = os.environ.get("FEDRETAIN_CACHE")
    os.environ["FEDRETAIN_CACHE"] = str(tmp_path_factory.getbasetemp().parent / "fedretain-cache")
    yield
    if before is None:
        del os.environ["FEDRETAIN_CACHE"]
    else:
        os.environ["FEDRETAIN_CACHE"] = before


@pytest.fixture(scope="session")
def kit() -> Path:
    """The folder of the real datasets: $FEDRETAIN_DATA, or shared/data beside the checkout."""
    root = Path(os.environ.get("FEDRETAIN_DATA") or KIT_BESIDE_THE_CHECKOUT)
    if not (root / "mnist" / "train.parquet").exists():
        pytest.skip("needs the real datasets: set FEDRETAIN_DATA to the folder with mnist/train.parquet (docs/data.md)")
    return root


@pytest.fixture
def small() -> dict[str, Any]:
    """Ten clients, four of them a round, five rounds; half a second."""
    return {
        "name": "small",
        "rounds": 5,
        "participation": 4,
        "data": {"name": "digits"},
        "partition": {"kind": "dirichlet", "clients": 10, "alpha": 0.3},
        "model": {"name": "mlp", "hidden": [16]},
        "loss": "wsm",
        "local": {"lr": 0.1, "epochs": 1, "batch_size": 32},
        "forgetting": {"every": 2},
    }
