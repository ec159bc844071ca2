"""When a captured step is compiled."""

from __future__ import annotations

import math
from typing import Any

import pytest

from fedretain.engines.graphed import COMPILE_AFTER, COMPILE_AGAIN_AFTER, WORTH, Compiling


class Step:
    """Looks like a step that an earlier run has compiled, or not."""

    def __init__(self, before: bool) -> None:
        self.before, self.asked = before, 0

    def compiled_before(self, leaves: Any) -> bool:
        self.asked += 1
        return self.before


def due(compiling: Compiling, step: Any) -> bool:
    return compiling.due(step, list)


@pytest.mark.parametrize(("before", "cost"), [(False, COMPILE_AFTER), (True, COMPILE_AGAIN_AFTER)])
def test_after_so_many_seconds_of_replays(before: bool, cost: float) -> None:
    """Once, and sooner where the compiler only has to look it up."""
    compiling, step = Compiling(COMPILE_AFTER, math.nan), Step(before)
    assert not due(compiling, step)
    compiling.seconds = cost - 0.1
    assert not due(compiling, step)
    compiling.seconds = cost
    assert due(compiling, step)
    assert not due(compiling, step)


@pytest.mark.parametrize(("before", "cost"), [(False, COMPILE_AFTER), (True, COMPILE_AGAIN_AFTER)])
def test_at_once_where_the_run_will_be_long(before: bool, cost: float) -> None:
    assert due(Compiling(COMPILE_AFTER, WORTH * cost), Step(before))
    assert not due(Compiling(COMPILE_AFTER, WORTH * cost - 0.1), Step(before))


def test_nobody_looks_before_it_matters() -> None:
    """And only once: looking means to hash the step."""
    compiling, step = Compiling(COMPILE_AFTER, 0.0), Step(False)
    for _ in range(3):
        due(compiling, step)
    assert step.asked == 0
    compiling.seconds = COMPILE_AGAIN_AFTER
    for _ in range(3):
        due(compiling, step)
    assert step.asked == 1


def test_never() -> None:
    compiling = Compiling(math.inf, 1e9)
    compiling.seconds = 1e9
    assert not due(compiling, Step(True))


def test_always() -> None:
    assert due(Compiling(0.0, math.nan), Step(False))
