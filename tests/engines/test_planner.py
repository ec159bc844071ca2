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
from fedretain.engines import LoopEngine, World, planner, trials
from fedretain.engines.planner import Plan, build_engine, build_engine_for_all, make_plan, plan_for_all
from fedretain.engines.trials import Limits, Pace, key_of
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
    """Trials that take no time but tell which engines were tried: a second a step for each client, stacked a tenth.

    Two examples take half as long as a batch, and starting operations may take any time.
    """
    tried: list[str] = []

    def trial(world: World, engine: Callable[[World], Any], clients: np.ndarray, limits: Limits) -> Pace:
        few = world.local.batch_size == planner.FEW
        tried.append(engine.__name__ + (", few" if few else ""))
        return Pace(0.0, 0.1 * len(clients) if engine is VectorisedEngine else 0.5 if few else 1.0)

    monkeypatch.setattr(trials, "timed", trial)
    monkeypatch.setattr(planner, "A_TENSOR", math.inf)
    return tried


AUTO = EngineSettings(workers=2)


@pytest.mark.parametrize(
    ("asked", "plan"),
    [
        ({"name": "loop"}, ("loop", "loop", 5)),
        ({"name": "vectorised"}, ("vectorised", "loop", 5)),
        ({"name": "workers", "inner": "vectorised"}, ("workers", "vectorised", 5)),
        ({"name": "workers", "inner": "native"}, ("workers", "native", 5)),
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
    assert timed == ["LoopEngine", "LoopEngine, few", "recorded", "VectorisedEngine"]
    assert (first.name, first.inner, first.workers) == ("workers", "vectorised", 2)
    assert first.seconds == pytest.approx(3.0)
    assert first.why == "about 3 s a round (loop 34 s, workers (loop inside) 17 s)"
    assert first.label == "workers (2 × vectorised)"
    (file,) = cache.iterdir()
    assert json.loads(file.read_text())["loop"] == [0.0, 1.0]
    assert make_plan(world, AUTO, 5, 100) == first
    assert len(timed) == 4


@pytest.mark.parametrize(
    "content", ["", "{", "[1, 2]", '{"loop": 3}', '{"loop": [1]}', '{"loop": ["x", 1]}', "\xff\xfe"]
)
def test_a_damaged_cache_is_measured_again(content: str, world: World, cache: Path, timed: list[str]) -> None:
    first = make_plan(world, AUTO, 5, 100)
    (file,) = cache.iterdir()
    file.write_bytes(content.encode("latin-1"))
    assert make_plan(world, AUTO, 5, 100) == first
    assert len(timed) == 8
    assert json.loads(file.read_text())["loop"] == [0.0, 1.0]


def test_no_place_to_keep_timings(
    world: World, timed: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("not a folder")
    monkeypatch.setenv("FEDRETAIN_CACHE", str(tmp_path / "file"))
    assert make_plan(world, AUTO, 5, 100).name == "workers"
    assert make_plan(world, AUTO, 5, 100).name == "workers"
    assert len(timed) == 8


def test_other_work_has_other_timings(world: World) -> None:
    other_local = world.local.model_copy(update={"batch_size": 7})
    keys = [
        key_of(world, 5, 2),
        key_of(world, 4, 2),
        key_of(world, 5, 3),
        key_of(replace(world, local=other_local), 5, 2),
        key_of(replace(world, method=FedProx(0.1)), 5, 2),
        key_of(replace(world, precision="float32"), 5, 2),
    ]
    assert len(set(keys)) == len(keys)
    assert key_of(world, 5, 2) == keys[0]


def test_work_that_breaks_down_is_left_to_the_loop_engine(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> Pace:
        raise TrainingError("broken", round=1)

    monkeypatch.setattr(trials, "timed", broken)
    assert make_plan(world, AUTO, 5, 10**6).name == "loop"


def test_an_engine_that_fails_its_trial_is_left_out(
    world: World, cache: Path, timed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    trial = trials.timed

    def no_stacks(world: World, engine: Any, clients: np.ndarray, limits: Limits) -> Pace:
        if engine is VectorisedEngine:
            raise TrainingError("a hook decides by a tensor", round=1)
        return trial(world, engine, clients, limits)

    monkeypatch.setattr(trials, "timed", no_stacks)
    plan = make_plan(world, AUTO, 5, 100)
    assert (plan.name, plan.inner) == ("workers", "loop")


@pytest.mark.parametrize(
    ("seconds", "rounds", "best"),
    [
        ({"loop": 1.0}, 100, "loop"),
        # 100 s against 1 + 60 s, with the same bits
        ({"loop": 1.0, "workers/loop": 0.6}, 100, "workers/loop"),
        # 2 s against 1 + 1.2 s: starting the processes does not pay
        ({"loop": 1.0, "workers/loop": 0.6}, 2, "loop"),
        # 100 s against 0.5 + 80 s: 1.24 times faster is not worth other last bits
        ({"loop": 1.0, "vectorised": 0.8}, 100, "loop"),
        # 100 s against 0.5 + 79 s: 1.26 times
        ({"loop": 1.0, "vectorised": 0.79}, 100, "vectorised"),
        # 2 s against 0.5 + 0.6 s: 1.8 times, but 0.9 s are not worth it
        ({"loop": 1.0, "vectorised": 0.3}, 2, "loop"),
        # 61 s with the same bits against 48.5 s: 1.26 times
        ({"loop": 1.0, "workers/loop": 0.6, "vectorised": 0.48}, 100, "vectorised"),
        # 61 s against 49.5 s: 1.23 times
        ({"loop": 1.0, "workers/loop": 0.6, "vectorised": 0.49}, 100, "workers/loop"),
        # 61 s against 1 + 45 s: 1.33 times
        ({"loop": 1.0, "workers/loop": 0.6, "workers/native": 0.45}, 100, "workers/native"),
    ],
)
def test_the_best_engine(seconds: dict[str, float], rounds: int, best: str) -> None:
    """Starting takes 0.5 s for a stack and 1 s for processes."""
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
    """Three experiments, one after the other as stacks, take 3·(1 + 100·3) s = 903 s."""
    for step, together in ((0.5, True), (0.9, True), (0.903, False)):
        monkeypatch.setattr(planner, "timed_all", lambda *_, step=step: Pace(0.0, step))
        plan = plan_for_all([world] * 3, AUTO, [5] * 3, 100)
        # 1 + 100 · 10 steps · step
        assert (plan is not None) is together, step
        if plan is not None:
            assert (plan.name, plan.inner) == ("workers", "vectorised")
    assert plan_for_all([world] * 3, EngineSettings(name="loop"), [5] * 3, 100) is None
    asked = plan_for_all([world] * 3, EngineSettings(name="vectorised"), [5] * 3, 100)
    assert asked is not None
    assert asked.name == "vectorised"


@pytest.mark.parametrize(("alone", "together"), [(1.0, True), (0.28, False)])
def test_together_with_other_bits_only_where_that_is_well_worth_it(
    alone: float, together: bool, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three experiments of 100 rounds as one stack: 1 + 100 · 10 steps · 0.07 s = 71 s.

    With the loop engine's bits, one after the other, they take 300 s or 84 s: 4.2 times that, or 1.18 times.
    """
    monkeypatch.setattr(planner, "make_plan", lambda *_: Plan("loop", "loop", 2, "", alone))
    monkeypatch.setattr(planner, "timed_all", lambda *_: Pace(0.0, 0.07))
    assert (plan_for_all([world] * 3, AUTO, [5] * 3, 100) is not None) is together


def test_long_steps_are_not_stacked_for_a_trial(world: World, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step of a second, and few tensors: starting operations is a small part of it, and a stack saves little.

    34 steps of the loop engine, half of them for each of two processes.
    """
    tried: list[str] = []

    def trial(world: World, engine: Callable[[World], Any], clients: np.ndarray, limits: Limits) -> Pace:
        tried.append(engine.__name__)
        return Pace(0.0, 1.0)

    monkeypatch.setattr(trials, "timed", trial)
    plan = make_plan(world, AUTO, 5, 100)
    assert tried == ["LoopEngine"]
    assert (plan.name, plan.inner) == ("workers", "loop")
    assert plan.seconds == pytest.approx(17.0)


@pytest.mark.parametrize(
    ("kernels", "native", "chosen"),
    [(True, 0.5, "workers/native"), (True, 0.9, "workers/loop"), (False, 0.5, "workers/loop")],
)
def test_own_kernels_are_tried_where_they_help(
    kernels: bool, native: float, chosen: str, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """LeNet; a step takes a second, with kernels of our own half of it or nine tenths.

    Without them nothing is recorded for a trial.
    """
    world = build_world(make_experiment(settings(model="lenet")), dataset(96, (1, 16, 16)))
    tried: list[str] = []

    def trial(world: World, engine: Callable[[World], Any], clients: np.ndarray, limits: Limits) -> Pace:
        exact = getattr(engine(world), "exact", None)
        tried.append(f"{engine.__name__} {exact}")
        return Pace(0.0, native if exact is False else 1.0)

    monkeypatch.setattr(trials, "timed", trial)
    monkeypatch.setattr(planner, "available", lambda dtype: kernels)
    plan = make_plan(world, AUTO, 5, 100)
    assert tried == ["LoopEngine None", *(["recorded True", "recorded False"] if kernels else [])]
    assert plan.key == chosen
    together = plan_for_all([world] * 3, AUTO, [5] * 3, 100)
    assert together is not None
    assert together.key == plan.key


def test_few_examples_tell_whether_a_stack_may_pay(world: World, cache: Path, timed: list[str]) -> None:
    """The loop engine takes 1 s a step, and on two examples 0.5 s: more than the third from which on stacks can pay.

    With a step of 1.6 s it would be less.
    """
    clients = np.array([0])
    made = trials.Trials(world, {})
    assert planner._stack_may_pay(made, Pace(0.0, 1.0), clients)
    assert not planner._stack_may_pay(made, Pace(0.0, 1.6), clients)
    assert timed == ["LoopEngine, few"]


def test_trials_take_a_bounded_part_of_the_run(
    world: World, cache: Path, timed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each trial takes 3 s on this clock. 100 rounds of 34 s allow 340 s; one round allows 3.4 s: after two trials
    there is no time for the next.
    """
    now = [0.0]
    monkeypatch.setattr(trials.time, "perf_counter", lambda: now[0])
    slow = trials.timed

    def trial(*given: Any) -> Pace:
        now[0] += 3.0
        return slow(*given)

    monkeypatch.setattr(trials, "timed", trial)
    assert make_plan(world, AUTO, 5, 1).key == "workers/loop"
    assert timed == ["LoopEngine", "LoopEngine, few"]
    timed.clear()
    assert make_plan(world, AUTO, 5, 100).key == "workers/vectorised"
    assert timed == ["recorded", "VectorisedEngine"]


def test_engines_of_a_plan(world: World) -> None:
    kinds = {"loop": LoopEngine, "vectorised": VectorisedEngine}
    for name, kind in kinds.items():
        assert type(build_engine(world, Plan(name, "loop", 1, ""))) is kind
    assert type(build_engine_for_all([world, world], Plan("vectorised", "loop", 1, ""))) is VectorisedEngine
    engine = build_engine(world, Plan("workers", "vectorised", 1, ""))
    assert isinstance(engine, WorkersEngine)
    assert engine.inner == "vectorised"
    engine.close()


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
from fedretain.engines.trials import key_of
from fedretain.experiment import build_world
print(key_of(build_world(make_experiment(settings(loss="wsm")), dataset()), 5, 2))
"""


def test_timings_are_found_again_by_another_process() -> None:
    """The key names the work and the machine, and nothing that only this process knows, such as an address."""
    keys = {
        subprocess.run([sys.executable, "-c", KEY], capture_output=True, text=True, check=True, cwd=ROOT).stdout
        for _ in range(2)
    }
    assert len(keys) == 1


def test_a_graphed_engine_is_told_how_long_the_run_will_be(monkeypatch: pytest.MonkeyPatch, world: World) -> None:
    """Without the compiler, so that it can decide on compiling at once; an engine that was asked for knows nothing."""
    monkeypatch.setattr("fedretain.engines.graphed.GraphedEngine", lambda *worlds, expected: expected)
    planned = Plan("graphed", "loop", 1, "", 0.5, 40)
    assert build_engine(world, planned) == build_engine_for_all([world, world], planned) == 20
    assert math.isnan(build_engine(world, Plan("graphed", "loop", 1, "")))
