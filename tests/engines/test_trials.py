"""Trials measure real steps, end as soon as they say enough, and are bounded in time."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from tests.agreement.conftest import dataset, settings

from fedretain.config import make_experiment
from fedretain.engines import LoopEngine, World, trials
from fedretain.engines.trials import NO_LIMITS, Limits, Pace, Trials, timed, typical_cohort
from fedretain.experiment import build_world

CPU = torch.device("cpu")


@pytest.fixture
def world() -> World:
    return build_world(make_experiment(settings()), dataset())


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """A clock that goes only when it is told to."""
    now = [0.0]
    monkeypatch.setattr(trials.time, "perf_counter", lambda: now[0])
    return now


def paced(
    clock: list[float], seconds: Callable[[int, int], float], limits: Limits = NO_LIMITS, **how: Any
) -> tuple[Pace, list[int]]:
    """The pace of an engine whose run number ``n`` of ``steps`` steps takes ``seconds(steps, n)``; its runs."""
    runs: list[int] = []

    def trial(steps: int) -> Callable[[], None]:
        count = [0]

        def run() -> None:
            clock[0] += seconds(steps, count[0])
            count[0] += 1
            runs.append(steps)

        return run

    return trials._paced(trial, CPU, limits, **how), runs


def test_once_and_step(clock: list[float]) -> None:
    """0.004 + 0.001·steps seconds: 0.006 for two, 0.010 for six. The slow first runs are not counted."""
    pace, runs = paced(clock, lambda steps, n: 0.004 + 0.001 * steps + (0.02 if n == 0 else 0))
    assert pace.once == pytest.approx(0.004)
    assert pace.step == pytest.approx(0.001)
    assert pace.round(10) == pytest.approx(0.014)
    assert runs == [2, 2, 2, 6, 6, 6]


def test_a_long_run_is_enough_where_nothing_is_recorded(clock: list[float]) -> None:
    """0.07 s a step: two of them take longer than a tenth of a second."""
    pace, runs = paced(clock, lambda steps, n: 0.07 * steps, records=False)
    assert pace == (0.0, pytest.approx(0.07))
    assert runs == [2]


def test_the_first_run_of_a_recording_engine_is_never_enough(clock: list[float]) -> None:
    """A second of recording, in the first run or the second; then 0.03 s a step, 0.12 s in two runs of two steps: more
    than a tenth of a second, and there is no longer trial.
    """
    for recording in (0, 1):
        pace, runs = paced(clock, lambda steps, n, at=recording: 0.03 * steps + (1.0 if n == at else 0))
        assert pace == (0.0, pytest.approx(0.03))
        assert runs == [2, 2, 2]


def test_a_hopeless_engine_ends_after_two_runs(clock: list[float]) -> None:
    pace, runs = paced(clock, lambda steps, n: 0.3 * steps, Limits(too_slow=0.2))
    assert pace == (0.0, pytest.approx(0.3))
    assert runs == [2, 2]


def test_fast_enough_is_known_after_the_first_such_run(clock: list[float]) -> None:
    """The first run was held up by something else."""
    pace, runs = paced(
        clock, lambda steps, n: 0.5 if n == 0 else 0.001 * steps, Limits(fast_enough=0.01), records=False
    )
    assert pace == (0.0, pytest.approx(0.001))
    assert runs == [2, 2]


def test_each_engine_is_timed_once(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(trials, "timed", lambda *given: asked.append(given) or Pace(0.0, 1.0))
    made = Trials(world, {"known": Pace(1.0, 2.0)})
    clients = np.array([0])
    assert made.pace("known", LoopEngine, clients) == (1.0, 2.0)
    assert made.pace("loop", LoopEngine, clients) == made.pace("loop", LoopEngine, clients) == (0.0, 1.0)
    assert asked == [(world, LoopEngine, clients, NO_LIMITS)]


def test_no_trial_once_the_time_is_spent(world: World, clock: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    """Each takes 0.6 s. The second begins after 0.6 of the second that is allowed, the third would after 1.2."""

    def trial(*_: Any) -> Pace:
        clock[0] += 0.6
        return Pace(0.0, 1.0)

    monkeypatch.setattr(trials, "timed", trial)
    made = Trials(world, {})
    for name in ("first", "second"):
        made.pace(name, LoopEngine, np.array([0]))
    with pytest.raises(TimeoutError):
        made.pace("third", LoopEngine, np.array([0]))
    assert made.pace("second", LoopEngine, np.array([0])) == (0.0, 1.0)
    made.allowed = 2.0
    assert made.pace("third", LoopEngine, np.array([0])) == (0.0, 1.0)


def test_a_trial_measures_real_steps(world: World) -> None:
    pace = timed(world, LoopEngine, np.array([0, 1]), NO_LIMITS)
    assert pace.step > 0
    assert pace.once >= 0
    assert math.isfinite(pace.round(10))


def test_the_typical_cohort_has_clients_of_all_sizes(world: World) -> None:
    """Six clients of 23, 9, 17, 6, 16 and 19 examples: the smallest, the largest and one between, which comes first."""
    chosen = typical_cohort(world, 3)
    sizes = world.federation.train.sizes[chosen].tolist()
    assert sorted(sizes) == [6, 16, 23]
    assert sizes[0] == 16
