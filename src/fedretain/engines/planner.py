"""Which engine is fastest for this work on this machine: time a few real steps of each, and say why."""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import platform
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
import torch

from fedretain.data.cache import cache_folder
from fedretain.engines.engine import Engine, Uploads, World
from fedretain.engines.loop import LoopEngine, one_thread
from fedretain.engines.schedule import local_steps
from fedretain.engines.shared import travels
from fedretain.engines.stack import Work
from fedretain.errors import FedretainError
from fedretain.files import write_atomically
from fedretain.methods import Received
from fedretain.tensors import Tensors
from fedretain.version import __version__

if TYPE_CHECKING:
    from fedretain.config.settings import EngineSettings
    from fedretain.engines.workers import WorkerPool

SHORT, LONG = 2, 6
"""Local steps of the two trials; their difference is the time of a step, free of what a round costs once."""
REPEATS = 3
"""Runs of a trial; the first one records, and the quickest of the others counts."""
NOT_WORTH_PLANNING = 10.0
"""Seconds: a run that the loop engine ends sooner starts at once."""
WORTH_OTHER_BITS = 1.5
"""How many times faster an engine must be whose numbers agree with the loop engine's, but not to the last bit."""
START = {"loop": 0.0, "vectorised": 1.5, "workers": 3.0, "graphed": 5.0}
"""Seconds until an engine's first step, apart from its recordings: imports and processes."""


SAME_BITS = ("loop", "workers/loop")
"""Engines whose numbers are the loop engine's to the bit."""
Trial = Callable[[str, Callable[[World], Engine], np.ndarray, float], "Pace"]
"""The pace of an engine, under its name, on some clients; a step slower than the last argument ends the trial."""


class StackingEngine(Protocol):
    """An engine that trains several experiments at once."""

    def train_all(self, works: Sequence[Work]) -> Iterator[tuple[int, Uploads]]:
        """Train a round of each; yield which of them, and its uploads in the order of its cohort."""

    def close(self) -> None:
        """Give back what the engine holds outside this process."""


class Plan(NamedTuple):
    """An engine, and why it was chosen."""

    name: str
    inner: str
    workers: int
    why: str
    """Empty where there was nothing to choose."""
    seconds: float = math.nan
    """The expected time of a round; not known for an engine that was asked for."""

    @property
    def label(self) -> str:
        """The engine in words."""
        return f"workers ({self.workers} × {self.inner})" if self.name == "workers" else self.name


class Pace(NamedTuple):
    """What a round costs once, and what each local step costs, in seconds."""

    once: float
    step: float

    def round(self, steps: float) -> float:
        """The time of a round with so many steps."""
        return self.once + self.step * steps


def make_plan(world: World, settings: EngineSettings, cohort: int, rounds: int) -> Plan:
    """The engine that was asked for, or the one that ends the remaining rounds soonest."""
    workers = settings.workers or processors()
    if settings.name != "auto":
        return Plan(settings.name, settings.inner, workers, "")
    if not rounds:
        return Plan("loop", "loop", workers, "")
    key = _key(world, cohort, workers)
    paces = _remembered(key)
    known = dict(paces)
    clients = _typical_cohort(world, cohort)
    steps = np.array([local_steps(size, world.local) for size in world.federation.train.sizes[clients].tolist()])

    def pace(name: str, engine: Callable[[World], Engine], share: np.ndarray, too_slow: float) -> Pace:
        if name not in paces:
            paces[name] = _timed(world, engine, share, too_slow)
        return paces[name]

    try:
        alone = pace("loop", LoopEngine, clients[:1], math.inf)
    except (FedretainError, RuntimeError, ValueError, TypeError, KeyError, MemoryError):
        # Training will break down too, and the loop engine says best where and why.
        return Plan("loop", "loop", workers, "")
    seconds = {"loop": sum(alone.round(n) for n in steps.tolist())}
    if seconds["loop"] * rounds > NOT_WORTH_PLANNING:
        seconds |= _candidates(world, pace, clients, steps, workers)
        if paces != known:
            _remember(key, paces)
    best = _best(seconds, rounds)
    name, _, inner = best.partition("/")
    rest = ", ".join(f"{_label(other)} {value:.3g} s" for other, value in seconds.items() if other != best)
    why = f"about {seconds[best]:.3g} s a round ({rest})" if rest else ""
    return Plan(name, inner or "loop", workers, why, seconds[best])


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
    name, _, inner = best.partition("/")
    why = f"about {seconds[best]:.3g} s a round of all ({len(worlds)} × {alone.seconds:.3g} s one after the other)"
    return Plan(name, inner or "loop", workers, why, seconds[best])


def build_engine_for_all(worlds: Sequence[World], plan: Plan) -> StackingEngine:
    """The engine of a plan for several experiments."""
    if plan.name == "workers":
        from fedretain.engines.workers import WorkersEngine

        return WorkersEngine(*worlds, workers=plan.workers, inner=plan.inner)
    if plan.name == "graphed":
        from fedretain.engines.graphed import GraphedEngine

        return GraphedEngine(*worlds)
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

        return GraphedEngine(world)
    return LoopEngine(world)


def runs_on(name: str, device: torch.device) -> bool:
    """Whether an engine can use a device."""
    only = {"graphed": "cuda", "workers": "cpu"}
    return only.get(name, device.type) == device.type


def processors() -> int:
    """How many processors this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _candidates(world: World, pace: Trial, clients: np.ndarray, steps: np.ndarray, workers: int) -> dict[str, float]:
    """Seconds a round of every engine that can do this work; one that fails its trial is left out."""
    from fedretain.engines.recorded import RecordedEngine
    from fedretain.engines.vectorised import VectorisedEngine

    found: dict[str, float] = {}
    longest = float(steps.max())
    device = world.federation.device

    @contextlib.contextmanager
    def attempt() -> Iterator[None]:
        with contextlib.suppress(FedretainError, RuntimeError, ValueError, TypeError, KeyError, MemoryError):
            yield

    if device.type == "cuda":
        from fedretain.engines.graphed import GraphedEngine

        with attempt():
            found["graphed"] = pace("graphed", GraphedEngine, clients, math.inf).round(longest)
        return found
    if device.type != "cpu" or workers == 1 or not _can_travel(world):
        with attempt():
            found["vectorised"] = pace("vectorised", VectorisedEngine, clients, math.inf).round(longest)
        return found
    with one_thread(device), attempt():
        alone = pace("recorded", RecordedEngine, clients[:1], math.inf)
        whole = sum(alone.round(n) for n in steps.tolist())
        found["workers/loop"] = max(whole / min(workers, len(clients)), alone.round(longest))
        share = clients[: -(-len(clients) // workers)]
        if len(share) > 1:
            too_slow = 1.5 * len(share) * alone.step
            found["workers/vectorised"] = pace("share", VectorisedEngine, share, too_slow).round(longest)
    return found


def _best(seconds: Mapping[str, float], rounds: int) -> str:
    """The engine that ends soonest; one with other last bits only where that is well worth it."""
    totals = {name: START[name.split("/")[0]] + rounds * value for name, value in seconds.items()}
    same_bits = min((name for name in totals if name in SAME_BITS), key=totals.__getitem__)
    best = min(totals, key=totals.__getitem__)
    saved = totals[same_bits] - totals[best]
    well_worth = totals[same_bits] > WORTH_OTHER_BITS * totals[best] and saved > NOT_WORTH_PLANNING / 2
    return best if best in SAME_BITS or well_worth else same_bits


def _together(worlds: Sequence[World], cohorts: Sequence[int], alone: Plan, workers: int) -> dict[str, float]:
    """Seconds of a round of all experiments, for every way of training them together that works."""
    from fedretain.engines.vectorised import VectorisedEngine

    found: dict[str, float] = {}
    if alone.name == "workers" and alone.inner == "loop":
        # The same processes serve all: started once, and never waiting for the last client of one experiment.
        # A stack was slower for one experiment, so it is for all: its time grows with the clients.
        return {"workers/loop": len(worlds) * alone.seconds}
    clients = [_typical_cohort(world, cohort) for world, cohort in zip(worlds, cohorts, strict=True)]
    longest = max(
        local_steps(int(size), world.local)
        for world, own in zip(worlds, clients, strict=True)
        for size in np.unique(world.federation.train.sizes[own])
    )

    too_slow = 1.5 * len(worlds) * alone.seconds / longest

    def attempt(name: str, engine: Callable[..., StackingEngine], share: int) -> None:
        parts = [own[: -(-len(own) // share)] for own in clients]
        with contextlib.suppress(FedretainError, RuntimeError, ValueError, TypeError, KeyError, MemoryError):
            found[name] = _timed_all(worlds, engine, parts, too_slow).round(longest)

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


def _timed_all(
    worlds: Sequence[World], engine: Callable[..., StackingEngine], clients: Sequence[np.ndarray], too_slow: float
) -> Pace:
    """The pace of an engine that trains several experiments together."""

    def trial(steps: int) -> Callable[[], None]:
        short = [_with_steps(world, steps) for world in worlds]
        together = engine(*short)
        works = [Work(_first(world), own, _nothing, False) for world, own in zip(short, clients, strict=True)]
        return lambda: _exhaust(together.train_all(works))

    return _paced(trial, worlds[0].federation.device, too_slow)


def _timed(world: World, engine: Callable[[World], Engine], clients: np.ndarray, too_slow: float) -> Pace:
    """The pace of an engine on real clients."""

    def trial(steps: int) -> Callable[[], None]:
        alone = engine(_with_steps(world, steps))
        received = _first(world)
        return lambda: _exhaust(alone.train(received, clients, _nothing, local_models=False))

    return _paced(trial, world.federation.device, too_slow)


def _paced(trial: Callable[[int], Callable[[], None]], device: torch.device, too_slow: float) -> Pace:
    """Two trials of different lengths; their first, slow runs are not counted. One ``too_slow`` a step is enough."""
    seconds = {}
    for steps in (SHORT, LONG):
        run = trial(steps)
        times = []
        for _ in range(REPEATS):
            started = time.perf_counter()
            run()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            times.append(time.perf_counter() - started)
        seconds[steps] = min(times[1:])
        if seconds[steps] / steps > too_slow:
            return Pace(0.0, seconds[steps] / steps)
    step = max((seconds[LONG] - seconds[SHORT]) / (LONG - SHORT), seconds[LONG] / LONG / 10)
    return Pace(max(seconds[SHORT] - SHORT * step, 0.0), step)


def _with_steps(world: World, steps: int) -> World:
    return replace(world, local=world.local.model_copy(update={"epochs": None, "steps": steps}))


def _first(world: World) -> Received:
    """What the server broadcasts in the first round."""
    params = {name: p.detach() for name, p in world.model.named_parameters()}
    buffers = {name: b.detach() for name, b in world.model.named_buffers()}
    return Received(params, buffers, world.method.broadcast(world.method.init_server(params)), 1)


def _nothing(client: int) -> Tensors | None:
    """No client has taken part yet."""
    return None


def _exhaust(chunks: Iterable[object]) -> None:
    for _ in chunks:
        pass


def _typical_cohort(world: World, cohort: int) -> np.ndarray:
    """Clients of all sizes: evenly spaced in the order of their size, a middling one first."""
    order = np.argsort(world.federation.train.sizes, kind="stable")
    chosen = order[np.linspace(0, len(order) - 1, cohort).astype(np.int64)]
    return np.roll(chosen, -(len(chosen) // 2))


def _can_travel(world: World) -> bool:
    """Whether other processes can build this experiment: nothing in it was defined in the script itself."""
    return travels((world.model, world.loss, world.method))


def _label(name: str) -> str:
    kind, _, inner = name.partition("/")
    return f"{kind} ({inner} inside)" if inner else kind


def _key(world: World, cohort: int, workers: int) -> str:
    """The work and the machine, in short."""
    sizes = world.federation.train.sizes
    device = world.federation.device
    processor = platform.processor() or platform.machine()
    machine = torch.cuda.get_device_name(device) if device.type == "cuda" else processor
    facts = [
        __version__,
        torch.__version__,
        machine,
        processors(),
        workers,
        cohort,
        [int(sizes.min()), int(np.median(sizes)), int(sizes.max())],
        world.federation.shape,
        [(name, list(p.shape)) for name, p in world.model.named_parameters()],
        repr(world.method),
        _name_of(world.loss),
        world.local.model_dump_json(),
        world.precision,
    ]
    return hashlib.sha256(json.dumps(facts, default=str).encode()).hexdigest()[:16]


def _name_of(loss: Any) -> str:
    """A loss by its name and parameters; what Python prints for a function is different in every process."""
    function = getattr(loss, "func", loss)
    return f"{function.__module__}.{function.__qualname__} {getattr(loss, 'keywords', {})}"


def _remembered(key: str) -> dict[str, Pace]:
    try:
        kept: Mapping[str, list[float]] = json.loads((cache_folder() / "paces" / f"{key}.json").read_text())
        return {name: Pace(*map(float, pace)) for name, pace in kept.items()}
    except (OSError, ValueError, TypeError, AttributeError, RuntimeError):
        return {}


def _remember(key: str, paces: Mapping[str, Pace]) -> None:
    """For the next run of the same work; without a place to keep it, that one measures again."""
    try:
        folder = cache_folder() / "paces"
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(folder / f"{key}.json", json.dumps(paces).encode())
    except (OSError, RuntimeError):
        return
