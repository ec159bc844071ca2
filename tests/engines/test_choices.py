"""The fastest way is found once and kept for later processes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from fedretain.engines import choices
from fedretain.engines.choices import fastest, milliseconds


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder of its own for what is kept, and nothing in mind."""
    monkeypatch.setenv("FEDRETAIN_CACHE", str(tmp_path))
    choices._kept.cache_clear()
    yield tmp_path
    choices._kept.cache_clear()


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """What each way said that it takes, in the order in which they were timed."""
    asked: list[float] = []

    def instead(way: Callable[[], Tensor]) -> float:
        asked.append(float(way()))
        return asked[-1]

    monkeypatch.setattr(choices, "milliseconds", instead)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    return asked


def ways(*times: float) -> list[Callable[[], Tensor]]:
    """Each returns how long it takes."""
    return [lambda time=time: torch.tensor(time) for time in times]  # type: ignore[misc]


def test_the_fastest_is_taken_and_timed_once(timed: list[float]) -> None:
    for _ in range(3):
        assert fastest(("a", 1), ways(3.0, 1.0, 2.0)) == 1.0
    assert timed == [3.0, 1.0, 2.0]
    assert fastest(("a", 2), ways(1.0, 2.0)) == 1.0
    assert timed == [3.0, 1.0, 2.0, 1.0, 2.0]


def test_one_way_is_not_timed(timed: list[float], cache: Path) -> None:
    assert fastest(("a",), ways(5.0)) == 5.0
    assert not timed
    assert not list(cache.iterdir())


def test_a_later_process_times_nothing(timed: list[float]) -> None:
    """It takes the kept way even where that would no longer win."""
    fastest(("a",), ways(3.0, 1.0))
    choices._kept.cache_clear()
    assert fastest(("a",), ways(1.0, 3.0)) == 3.0
    assert timed == [3.0, 1.0]


def test_what_another_process_kept_meanwhile_stays(timed: list[float]) -> None:
    fastest(("a",), ways(3.0, 1.0))
    choices._keep("('b',)", 1)
    fastest(("c",), ways(3.0, 1.0))
    assert choices._read() == {"('a',)": 1, "('b',)": 1, "('c',)": 1}


@pytest.mark.parametrize("content", ["{", "[1]", '{"(\'a\',)": "x"}', "{\"('a',)\": 7}", "{\"('a',)\": -1}"])
def test_a_damaged_file_counts_as_none(content: str, timed: list[float], cache: Path) -> None:
    """Also a choice that there is no longer."""
    fastest(("a",), ways(3.0, 1.0))
    (file,) = (cache / "kernels").iterdir()
    file.write_text(content)
    choices._kept.cache_clear()
    assert fastest(("a",), ways(1.0, 3.0)) == 1.0
    assert choices._read() == {"('a',)": 0}


def test_without_a_place_for_it_every_process_times(
    timed: list[float], cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = cache / "a file"
    file.touch()
    monkeypatch.setenv("FEDRETAIN_CACHE", str(file))
    assert fastest(("a",), ways(3.0, 1.0)) == 1.0
    assert fastest(("a",), ways(3.0, 1.0)) == 1.0
    assert timed == [3.0, 1.0]


def test_while_a_graph_is_captured_nothing_is_timed(timed: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert fastest(("a",), ways(3.0, 1.0)) == 3.0
    assert not timed
    assert not choices._read()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_milliseconds_of_a_gpu() -> None:
    """A pass over 256 MiB takes longer than one over 32 bytes."""
    small, large = torch.zeros(8, device="cuda"), torch.zeros(2**26, device="cuda")
    assert milliseconds(small.exp) < milliseconds(large.exp)
