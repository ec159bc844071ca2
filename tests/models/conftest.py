from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from fedretain.randomness import drawing_from


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Tiny tensors gain nothing from threads, and on a busy machine waiting for them costs ten times the work."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def seeded() -> Iterator[None]:
    """Modules that a test constructs directly draw from one fixed stream, not the global one."""
    with drawing_from(0, "tests of models"):
        yield
