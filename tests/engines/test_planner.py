"""The planner: short runs start at once, timings are kept, and other last bits must be worth it."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.agreement.conftest import dataset, settings

from fedretain.config import make_experiment
from fedretain.config.settings import EngineSettings
from fedretain.engines import LoopEngine, World, planner
from fedretain.engines.planner import Pace, Plan, build_engine, build_engine_for_all, make_plan, plan_for_all
from fedretain.engines.vectorised import VectorisedEngine
from fedretain.engines.workers import WorkersEngine
from fedretain.errors import TrainingError
from fedretain.experiment import build_world
from fedretain.methods import FedProx, Method, chain

ROOT = Path(__file__).parents[2]


@pytest.fixture
def world() -> World:
    return build_world(make_experiment(settings()), dataset())


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FEDRETAIN_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "paces"


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Trials that take no time but tell which engines were tried: a second a step for each client, stacked a tenth."""
    tried: list[str] = []

    def trial(world: World, engine: Callable[[World], Any], clients: np.ndarray, too_slow: float) -> Pace:
        tried.append(engine.__name__)
        return Pace(0.0, 0.1 * len(clients) if engine is VectorisedEngine else 1.0)

    monkeypatch.setattr(planner, "_timed", trial)
    return tried


AUTO = EngineSettings(workers=2)


@pytest.mark.parametrize(
    ("asked", "plan"),
    [
        ({"name": "loop"}, ("loop", "loop", 5)),
        ({"name": "vectorised"}, ("vectorised", "loop", 5)),
        ({"name": "workers", "inner": "vectorised"}, ("workers", "vectorised", 5)),
    ],
)
def test_the_engine_that_was_asked_for(asked: dict[str, str], plan: tuple[str, str, int], world: World) -> None:
    found = make_plan(world, EngineSettings(workers=5, **asked), 5, 1000)
    assert found[:4] == (*plan, "")
    assert math.isnan(found.seconds)


def test_as_many_workers_as_processors(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planner, "processors", lambda: 7)
    assert make_plan(world, EngineSettings(name="workers"), 5, 1).workers == 7


def test_a_short_run_starts_at_once(world: World, cache: Path) -> None:
    """Two rounds of a tiny model: the loop engine is timed on one client, and nothing is kept or told."""
    plan = make_plan(world, AUTO, 5, 2)
    assert plan[:2] == ("loop", "loop")
    assert plan.why == ""
    assert plan.seconds > 0
    assert not cache.exists()


def test_nothing_left_to_do_is_not_timed(world: World, timed: list[str]) -> None:
    assert make_plan(world, AUTO, 5, 0).name == "loop"
    assert timed == []


def test_a_long_run_is_timed_once(world: World, cache: Path, timed: list[str]) -> None:
    """Sizes 6, 9, 16, 17, 19 and 23 in batches of 5, two epochs: five of them, evenly spaced, take 4, 4, 8, 8 and 10
    steps, 34 s on the loop engine; the two workers' share of three clients takes 0.3 s a step, 10 steps, 3 s.
    """
    first = make_plan(world, AUTO, 5, 100)
    assert timed == ["LoopEngine", "RecordedEngine", "VectorisedEngine"]
    assert (first.name, first.inner, first.workers) == ("workers", "vectorised", 2)
    assert first.seconds == pytest.approx(3.0)
    assert first.why == "about 3 s a round (loop 34 s, workers (loop inside) 17 s)"
    assert first.label == "workers (2 × vectorised)"
    (file,) = cache.iterdir()
    assert json.loads(file.read_text())["loop"] == [0.0, 1.0]
    assert make_plan(world, AUTO, 5, 100) == first
    assert len(timed) == 3


@pytest.mark.parametrize(
    "content", ["", "{", "[1, 2]", '{"loop": 3}', '{"loop": [1]}', '{"loop": ["x", 1]}', "\xff\xfe"]
)
def test_a_damaged_cache_is_measured_again(content: str, world: World, cache: Path, timed: list[str]) -> None:
    first = make_plan(world, AUTO, 5, 100)
    (file,) = cache.iterdir()
    file.write_bytes(content.encode("latin-1"))
    assert make_plan(world, AUTO, 5, 100) == first
    assert len(timed) == 6
    assert json.loads(file.read_text())["loop"] == [0.0, 1.0]


def test_no_place_to_keep_timings(
    world: World, timed: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("not a folder")
    monkeypatch.setenv("FEDRETAIN_CACHE", str(tmp_path / "file"))
    assert make_plan(world, AUTO, 5, 100).name == "workers"
    assert make_plan(world, AUTO, 5, 100).name == "workers"
    assert len(timed) == 6


def test_other_work_has_other_timings(world: World) -> None:
    other_local = world.local.model_copy(update={"batch_size": 7})
    keys = [
        planner._key(world, 5, 2),
        planner._key(world, 4, 2),
        planner._key(world, 5, 3),
        planner._key(replace(world, local=other_local), 5, 2),
        planner._key(replace(world, method=FedProx(0.1)), 5, 2),
        planner._key(replace(world, precision="float32"), 5, 2),
    ]
    assert len(set(keys)) == len(keys)
    assert planner._key(world, 5, 2) == keys[0]


def test_work_that_breaks_down_is_left_to_the_loop_engine(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> Pace:
        raise TrainingError("broken", round=1)

    monkeypatch.setattr(planner, "_timed", broken)
    assert make_plan(world, AUTO, 5, 10**6).name == "loop"


def test_an_engine_that_fails_its_trial_is_left_out(
    world: World, cache: Path, timed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    trial = planner._timed

    def no_stacks(world: World, engine: Any, clients: np.ndarray, too_slow: float) -> Pace:
        if engine is VectorisedEngine:
            raise TrainingError("a hook decides by a tensor", round=1)
        return trial(world, engine, clients, too_slow)

    monkeypatch.setattr(planner, "_timed", no_stacks)
    plan = make_plan(world, AUTO, 5, 100)
    assert (plan.name, plan.inner) == ("workers", "loop")


@pytest.mark.parametrize(
    ("seconds", "rounds", "best"),
    [
        ({"loop": 1.0}, 100, "loop"),
        # 100 s against 3 + 60 s, with the same bits
        ({"loop": 1.0, "workers/loop": 0.6}, 100, "workers/loop"),
        # 4 s against 3 + 2.4 s: starting the processes does not pay
        ({"loop": 1.0, "workers/loop": 0.6}, 4, "loop"),
        # 100 s against 1.5 + 70 s: 1.4 times faster is not worth other last bits
        ({"loop": 1.0, "vectorised": 0.7}, 100, "loop"),
        # 100 s against 1.5 + 50 s: 1.94 times
        ({"loop": 1.0, "vectorised": 0.5}, 100, "vectorised"),
        # 6 s against 1.5 + 0.6 s: faster by far, but 3.9 s are not worth it
        ({"loop": 1.0, "vectorised": 0.1}, 6, "loop"),
        # 63 s with the same bits against 41.5 s: 1.52 times
        ({"loop": 1.0, "workers/loop": 0.6, "vectorised": 0.4}, 100, "vectorised"),
        # 63 s against 43.5 s: 1.45 times
        ({"loop": 1.0, "workers/loop": 0.6, "vectorised": 0.42}, 100, "workers/loop"),
    ],
)
def test_the_best_engine(seconds: dict[str, float], rounds: int, best: str) -> None:
    """Starting takes 1.5 s for a stack and 3 s for processes."""
    assert planner._best(seconds, rounds) == best


@dataclass(frozen=True)
class Elsewhere(Method):
    """From a module that other processes can import."""


def _from_main() -> type[Method]:
    """A class as a script makes it."""
    made = dataclass(frozen=True)(type("Mine", (Method,), {"__module__": "__main__", "__qualname__": "Mine"}))
    sys.modules["__main__"].Mine = made  # type: ignore[attr-defined]
    return made


def _local() -> Method:
    class Inside(Method):
        """Defined within a function."""

    return Inside()


@pytest.mark.parametrize(
    ("method", "travels"),
    [
        (lambda: Elsewhere(), True),
        (lambda: _from_main()(), False),
        (lambda: chain(FedProx(0.1), _from_main()()), False),
        (_local, False),
    ],
    ids=["module", "script", "in a chain", "in a function"],
)
def test_what_other_processes_cannot_import_never_gets_workers(
    method: Callable[[], Method], travels: bool, world: World, cache: Path, timed: list[str]
) -> None:
    try:
        plan = make_plan(replace(world, method=method()), AUTO, 5, 100)
    finally:
        sys.modules["__main__"].__dict__.pop("Mine", None)
    assert plan.name == ("workers" if travels else "vectorised")


def test_a_model_or_loss_from_the_script_never_gets_workers(world: World, cache: Path, timed: list[str]) -> None:
    layer = type("Layer", (torch.nn.Linear,), {"__module__": "__main__"})(3, 3)
    for change in ({"model": torch.nn.Sequential(layer)}, {"loss": lambda logits, labels, counts: logits.sum(-1)}):
        assert make_plan(replace(world, **change), AUTO, 5, 100).name == "vectorised"


def test_together_only_where_that_is_faster(world: World, cache: Path, timed: list[str], monkeypatch: Any) -> None:
    """Three experiments, one after the other, take 3·(3 + 100·3) s = 909 s."""
    for step, together in ((0.5, True), (0.9, True), (0.95, False)):
        monkeypatch.setattr(planner, "_timed_all", lambda *_, step=step: Pace(0.0, step))
        plan = plan_for_all([world] * 3, AUTO, [5] * 3, 100)
        # 3 + 100 · 10 steps · step
        assert (plan is not None) is together, step
        if plan is not None:
            assert (plan.name, plan.inner) == ("workers", "vectorised")
    assert plan_for_all([world] * 3, EngineSettings(name="loop"), [5] * 3, 100) is None
    asked = plan_for_all([world] * 3, EngineSettings(name="vectorised"), [5] * 3, 100)
    assert asked is not None
    assert asked.name == "vectorised"


def test_engines_of_a_plan(world: World) -> None:
    kinds = {"loop": LoopEngine, "vectorised": VectorisedEngine}
    for name, kind in kinds.items():
        assert type(build_engine(world, Plan(name, "loop", 1, ""))) is kind
    assert type(build_engine_for_all([world, world], Plan("vectorised", "loop", 1, ""))) is VectorisedEngine
    engine = build_engine(world, Plan("workers", "vectorised", 1, ""))
    assert isinstance(engine, WorkersEngine)
    assert engine.inner == "vectorised"
    engine.close()


def test_a_trial_measures_real_steps(world: World) -> None:
    pace = planner._timed(world, LoopEngine, np.array([0, 1]), math.inf)
    assert pace.step > 0
    assert pace.once >= 0
    assert pace.round(10) == pytest.approx(pace.once + 10 * pace.step)


def test_the_typical_cohort_has_clients_of_all_sizes(world: World) -> None:
    """Six clients of 23, 9, 17, 6, 16 and 19 examples: the smallest, the largest and one between, which comes first."""
    chosen = planner._typical_cohort(world, 3)
    sizes = world.federation.train.sizes[chosen].tolist()
    assert sorted(sizes) == [6, 16, 23]
    assert sizes[0] == 16


def test_an_engine_that_the_device_cannot_run_is_planned_anew() -> None:
    """A run that began with CUDA graphs goes on without a GPU, and one that began with processes goes on with one."""
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    assert [planner.runs_on(name, cpu) for name in ("loop", "vectorised", "workers", "graphed")] == [True] * 3 + [False]
    assert [planner.runs_on(name, gpu) for name in ("loop", "vectorised", "workers", "graphed")] == [
        True,
        True,
        False,
        True,
    ]


KEY = """
import sys
from tests.agreement.conftest import dataset, settings
from fedretain.config import make_experiment
from fedretain.engines import planner
from fedretain.experiment import build_world
print(planner._key(build_world(make_experiment(settings(loss="wsm")), dataset()), 5, 2))
"""


def test_timings_are_found_again_by_another_process() -> None:
    """The key names the work and the machine, and nothing that only this process knows, such as an address."""
    keys = {
        subprocess.run([sys.executable, "-c", KEY], capture_output=True, text=True, check=True, cwd=ROOT).stdout
        for _ in range(2)
    }
    assert len(keys) == 1
