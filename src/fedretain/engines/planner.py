"""Which engine is fastest for this work on this machine: time a few real steps of each, and say why."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from fedretain.engines.engine import Engine, World
from fedretain.engines.loop import LoopEngine, one_thread
from fedretain.engines.native import available, few_channels
from fedretain.engines.schedule import local_steps
from fedretain.engines.shared import travels
from fedretain.engines.trials import (
    PART_OF_RUN,
    TRIALS,
    Limits,
    Pace,
    StackingEngine,
    Trials,
    key_of,
    processors,
    remember,
    remembered,
    timed_all,
    typical_cohort,
)
from fedretain.errors import FedretainError

if TYPE_CHECKING:
    from fedretain.config.settings import EngineSettings
    from fedretain.engines.workers import WorkerPool

FEW = 2
"""Examples in a batch that shows what a step costs however few they are; batch norm cannot do with one."""
A_TENSOR = 2e-4
"""Seconds of Python and of starting operations in a step, for every parameter tensor: twice what is usual."""
NOT_WORTH_PLANNING = 2.0
"""Seconds: a run that the loop engine ends sooner starts at once."""
WORTH_OTHER_BITS, WORTH_SAVING = 1.25, 1.0
"""How many times faster, and by how many seconds, an engine must be whose numbers are not the same to the last bit."""
WORTH_STACKING = 1.5
"""How many times faster a stack could be at best, for it to be tried."""
START = {"loop": 0.0, "vectorised": 0.5, "workers": 1.0, "graphed": 5.0}
"""Seconds until an engine's first step: recordings and processes."""
SAME_BITS = ("loop", "workers/loop")
"""Engines whose numbers are the loop engine's to the bit."""


class Plan(NamedTuple):
    """An engine, and why it was chosen."""

    name: str
    inner: str
    workers: int
    why: str
    """Empty where there was nothing to choose."""
    seconds: float = math.nan
    """The expected time of a round; not known for an engine that was asked for."""
    rounds: int = 0
    """How many are left."""

    @property
    def key(self) -> str:
        """The engine as the planner's tables name it."""
        return f"workers/{self.inner}" if self.name == "workers" else self.name

    @property
    def label(self) -> str:
        """The engine in words."""
        return f"workers ({self.workers} × {self.inner})" if self.name == "workers" else self.name


def make_plan(world: World, settings: EngineSettings, cohort: int, rounds: int) -> Plan:
    """The engine that was asked for, or the one that ends the remaining rounds soonest."""
    workers = settings.workers or processors()
    if settings.name != "auto":
        return Plan(settings.name, settings.inner, workers, "")
    if not rounds:
        return Plan("loop", "loop", workers, "")
    key = key_of(world, cohort, workers)
    trials = Trials(world, remembered(key))
    known = dict(trials.paces)
    clients = typical_cohort(world, cohort)
    steps = np.array([local_steps(size, world.local) for size in world.federation.train.sizes[clients].tolist()])
    try:
        alone = trials.pace("loop", LoopEngine, clients[:1])
    except (FedretainError, RuntimeError, ValueError, TypeError, KeyError, MemoryError):
        # Training will break down too, and the loop engine says best where and why.
        return Plan("loop", "loop", workers, "")
    seconds = {"loop": sum(alone.round(n) for n in steps.tolist())}
    if seconds["loop"] * rounds > NOT_WORTH_PLANNING:
        trials.allowed = max(TRIALS, PART_OF_RUN * seconds["loop"] * rounds)
        seconds |= _candidates(trials, alone, clients, steps, workers)
        if trials.paces != known:
            remember(key, trials.paces)
    best = _best(seconds, rounds)
    name, _, inner = best.partition("/")
    rest = ", ".join(f"{_label(other)} {value:.3g} s" for other, value in seconds.items() if other != best)
    why = f"about {seconds[best]:.3g} s a round ({rest})" if rest else ""
    return Plan(name, inner or "loop", workers, why, seconds[best], rounds)


def plan_for_all(worlds: Sequence[World], settings: EngineSettings, cohorts: Sequence[int], rounds: int) -> Plan | None:
    """How to train several experiments together; None where one after the other ends sooner."""
    workers = settings.workers or processors()
    if settings.name != "auto":
        return None if settings.name == "loop" else Plan(settings.name, settings.inner, workers, "")
    alone = make_plan(worlds[0], settings, cohorts[0], rounds * len(worlds))
    one_by_one = len(worlds) * (START[alone.name] + rounds * alone.seconds)
    if one_by_one < NOT_WORTH_PLANNING:
        return None
    seconds = _together(worlds, cohorts, alone, workers)
    totals = {name: START[name.split("/")[0]] + rounds * value for name, value in seconds.items()}
    best = min(totals, key=totals.__getitem__, default=None)
    if best is None or totals[best] >= one_by_one:
        return None
    keeps_bits = best in SAME_BITS or alone.key not in SAME_BITS
    if not keeps_bits and not _well_worth(totals[best], one_by_one):
        return None
    name, _, inner = best.partition("/")
    why = f"about {seconds[best]:.3g} s a round of all ({len(worlds)} × {alone.seconds:.3g} s one after the other)"
    return Plan(name, inner or "loop", workers, why, seconds[best], rounds)


def build_engine_for_all(worlds: Sequence[World], plan: Plan) -> StackingEngine:
    """The engine of a plan for several experiments."""
    if plan.name == "workers":
        from fedretain.engines.workers import WorkersEngine

        return WorkersEngine(*worlds, workers=plan.workers, inner=plan.inner)
    if plan.name == "graphed":
        from fedretain.engines.graphed import GraphedEngine

        return GraphedEngine(*worlds, expected=plan.rounds * plan.seconds)
    from fedretain.engines.vectorised import VectorisedEngine

    return VectorisedEngine(*worlds)


def build_engine(world: World, plan: Plan, pool: WorkerPool | None = None) -> Engine:
    """The engine of a plan; ``pool`` are worker processes that were started before."""
    if plan.name == "workers":
        from fedretain.engines.workers import WorkersEngine

        return WorkersEngine(world, workers=plan.workers, inner=plan.inner, pool=pool)
    if plan.name == "vectorised":
        from fedretain.engines.vectorised import VectorisedEngine

        return VectorisedEngine(world)
    if plan.name == "graphed":
        from fedretain.engines.graphed import GraphedEngine

        return GraphedEngine(world, expected=plan.rounds * plan.seconds)
    return LoopEngine(world)


def runs_on(name: str, device: torch.device) -> bool:
    """Whether an engine can use a device."""
    only = {"graphed": "cuda", "workers": "cpu"}
    return only.get(name, device.type) == device.type


def _candidates(trials: Trials, alone: Pace, clients: np.ndarray, steps: np.ndarray, workers: int) -> dict[str, float]:
    """Seconds a round of every engine that can do this work; one that fails its trial is left out.

    ``alone`` is the loop engine's pace.
    """
    from fedretain.engines.recorded import recordable, sharing_recordings
    from fedretain.engines.vectorised import VectorisedEngine

    found: dict[str, float] = {}
    longest = float(steps.max())
    device = trials.world.federation.device

    @contextlib.contextmanager
    def attempt() -> Iterator[None]:
        failures = (FedretainError, RuntimeError, ValueError, TypeError, KeyError, MemoryError, TimeoutError)
        with contextlib.suppress(*failures):
            yield

    if device.type == "cuda":
        from fedretain.engines.graphed import GraphedEngine

        with attempt():
            found["graphed"] = trials.pace("graphed", GraphedEngine, clients).round(longest)
        return found
    if device.type != "cpu" or workers == 1 or not _can_travel(trials.world):
        if device.type != "cpu" or processors() > 1 or _stack_may_pay(trials, alone, clients):
            with attempt():
                found["vectorised"] = trials.pace("vectorised", VectorisedEngine, clients).round(longest)
        return found
    with one_thread(device):
        stack_may_pay = _stack_may_pay(trials, alone, clients)
        own_kernels = recordable(trials.world) and few_channels(trials.world.model) and _kernels_for(trials.world)
        if stack_may_pay or own_kernels:
            with attempt():
                alone = trials.pace("recorded", sharing_recordings(exact=True), clients[:1])
        found["workers/loop"] = _one_by_one(alone, steps, workers)
        if own_kernels:
            with attempt():
                native = trials.pace("native", sharing_recordings(exact=False), clients[:1])
                found["workers/native"] = _one_by_one(native, steps, workers)
        share = clients[: -(-len(clients) // workers)]
        if stack_may_pay and len(share) > 1:
            with attempt():
                limits = Limits(too_slow=1.5 * len(share) * alone.step)
                found["workers/vectorised"] = trials.pace("share", VectorisedEngine, share, limits).round(longest)
    return found


def _one_by_one(alone: Pace, steps: np.ndarray, workers: int) -> float:
    """Seconds of a round in which workers train one client after another."""
    whole = sum(alone.round(n) for n in steps.tolist())
    return max(whole / min(workers, len(steps)), alone.round(float(steps.max())))


def _kernels_for(world: World) -> bool:
    return available(next(world.model.parameters()).dtype)


def _stack_may_pay(trials: Trials, alone: Pace, clients: np.ndarray) -> bool:
    """Whether a stack could be well faster than client after client on one processor.

    It saves at most what a step costs apart from its arithmetic, a: t ÷ (t − a) reaches 1.5 only where a is a third of
    the step's t. a is below the time of a step on few examples, and below
    what the number of parameter tensors allows.
    """
    world, local = trials.world, trials.world.local
    third = (1 - 1 / WORTH_STACKING) * alone.step
    if A_TENSOR * len(list(world.model.parameters())) < third:
        return False
    if local.batch_size <= FEW:
        return True
    small = replace(world, local=local.model_copy(update={"batch_size": FEW}))
    try:
        least = trials.pace("loop, few examples", LoopEngine, clients[:1], Limits(fast_enough=third), small)
    except FedretainError:
        return True
    return least.step > third


def _best(seconds: Mapping[str, float], rounds: int) -> str:
    """The engine that ends soonest; one with other last bits only where that is well worth it."""
    totals = {name: START[name.split("/")[0]] + rounds * value for name, value in seconds.items()}
    same_bits = min((name for name in totals if name in SAME_BITS), key=totals.__getitem__)
    best = min(totals, key=totals.__getitem__)
    return best if best in SAME_BITS or _well_worth(totals[best], totals[same_bits]) else same_bits


def _well_worth(other: float, same_bits: float) -> bool:
    """Whether an engine with other last bits ends so much sooner that it may be taken."""
    return same_bits > WORTH_OTHER_BITS * other and same_bits - other > WORTH_SAVING


def _together(worlds: Sequence[World], cohorts: Sequence[int], alone: Plan, workers: int) -> dict[str, float]:
    """Seconds of a round of all experiments, for every way of training them together that works."""
    from fedretain.engines.vectorised import VectorisedEngine

    found: dict[str, float] = {}
    if alone.name == "workers" and alone.inner != "vectorised":
        # The same processes serve all: started once, and never waiting for the last client of one experiment.
        # A stack was slower for one experiment, so it is for all: its time grows with the clients.
        return {alone.key: len(worlds) * alone.seconds}
    clients = [typical_cohort(world, cohort) for world, cohort in zip(worlds, cohorts, strict=True)]
    longest = max(
        local_steps(int(size), world.local)
        for world, own in zip(worlds, clients, strict=True)
        for size in np.unique(world.federation.train.sizes[own])
    )

    limits = Limits(too_slow=1.5 * len(worlds) * alone.seconds / longest)

    def attempt(name: str, engine: Callable[..., StackingEngine], share: int) -> None:
        parts = [own[: -(-len(own) // share)] for own in clients]
        with contextlib.suppress(FedretainError, RuntimeError, ValueError, TypeError, KeyError, MemoryError):
            found[name] = timed_all(worlds, engine, parts, limits).round(longest)

    device = worlds[0].federation.device
    if device.type == "cuda":
        from fedretain.engines.graphed import GraphedEngine

        attempt("graphed", GraphedEngine, 1)
    elif workers > 1 and all(map(_can_travel, worlds)):
        with one_thread(device):
            attempt("workers/vectorised", VectorisedEngine, workers)
    else:
        attempt("vectorised", VectorisedEngine, 1)
    return found


def _can_travel(world: World) -> bool:
    """Whether other processes can build this experiment: nothing in it was defined in the script itself."""
    return travels((world.model, world.loss, world.method))


def _label(name: str) -> str:
    kind, _, inner = name.partition("/")
    return f"{kind} ({inner} inside)" if inner else kind
