"""Kernels need a C compiler; without one their tests are skipped."""

from __future__ import annotations

import pytest
import torch

from fedretain.engines.native import available


@pytest.fixture(params=[torch.float32, torch.float64], ids=["float32", "float64"])
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    """A type of numbers that there are kernels for."""
    found: torch.dtype = request.param
    if not available(found):
        pytest.skip("no kernels: no C compiler on this machine (cc, gcc or clang)")
    return found
