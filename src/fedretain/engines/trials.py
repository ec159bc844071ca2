"""Trials: what a round and a step of an engine cost on this machine, from a few real steps; kept for the next time."""

from __future__ import annotations

import hashlib
import json
import math
import os
import platform
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

from fedretain.data.cache import cache_folder
from fedretain.engines.engine import Engine, Uploads, World
from fedretain.engines.loop import LoopEngine
from fedretain.engines.stack import Work
from fedretain.files import write_atomically
from fedretain.methods import Received
from fedretain.tensors import Tensors
from fedretain.version import __version__

SHORT, LONG = 2, 6
"""Local steps of the two trials; their difference is the time of a step, free of what a round costs once."""
REPEATS = 3
"""Runs of a trial; the first one records, and the quickest of the others counts."""
ENOUGH = 0.1
"""Seconds after which a trial on a CPU is over: long steps need no repetition."""
TRIALS, PART_OF_RUN = 1.0, 0.1
"""All trials together may take this many seconds, or this part of the run where that is more."""


class StackingEngine(Protocol):
    """An engine that trains several experiments at once."""

    def train_all(self, works: Sequence[Work]) -> Iterator[tuple[int, Uploads]]:
        """Train a round of each; yield which of them, and its uploads in the order of its cohort."""

    def close(self) -> None:
        """Give back what the engine holds outside this process."""


class Pace(NamedTuple):
    """What a round costs once, and what each local step costs, in seconds."""

    once: float
    step: float

    def round(self, steps: float) -> float:
        """The time of a round with so many steps."""
        return self.once + self.step * steps


class Limits(NamedTuple):
    """Seconds of a step that say enough: slower than the one or faster than the other, and the trial is over."""

    too_slow: float = math.inf
    fast_enough: float = 0.0


NO_LIMITS = Limits()


class Trials:
    """Times engines on real clients: each once, and no more of them than the time allows."""

    def __init__(self, world: World, paces: dict[str, Pace]) -> None:
        self.world, self.paces = world, paces
        self.allowed, self.spent = TRIALS, 0.0

    def pace(
        self,
        name: str,
        engine: Callable[[World], Engine],
        clients: np.ndarray,
        limits: Limits = NO_LIMITS,
        world: World | None = None,
    ) -> Pace:
        """The pace of an engine, under its name; ``TimeoutError`` where there is no time left for it."""
        if name not in self.paces:
            if self.spent > self.allowed:
                raise TimeoutError
            started = time.perf_counter()
            self.paces[name] = timed(world or self.world, engine, clients, limits)
            self.spent += time.perf_counter() - started
        return self.paces[name]


def processors() -> int:
    """How many processors this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def timed_all(
    worlds: Sequence[World], engine: Callable[..., StackingEngine], clients: Sequence[np.ndarray], limits: Limits
) -> Pace:
    """The pace of an engine that trains several experiments together."""

    def trial(steps: int) -> Callable[[], None]:
        short = [_with_steps(world, steps) for world in worlds]
        together = engine(*short)
        works = [Work(_first(world), own, _nothing, False) for world, own in zip(short, clients, strict=True)]
        return lambda: _exhaust(together.train_all(works))

    return _paced(trial, worlds[0].federation.device, limits)


def timed(world: World, engine: Callable[[World], Engine], clients: np.ndarray, limits: Limits) -> Pace:
    """The pace of an engine on real clients."""

    def trial(steps: int) -> Callable[[], None]:
        alone = engine(_with_steps(world, steps))
        received = _first(world)
        return lambda: _exhaust(alone.train(received, clients, _nothing, local_models=False))

    return _paced(trial, world.federation.device, limits, records=engine is not LoopEngine)


def _paced(
    trial: Callable[[int], Callable[[], None]], device: torch.device, limits: Limits, *, records: bool = True
) -> Pace:
    """Two trials of different lengths; the first run of each is slow and not counted.

    A step beyond the limits is enough, and so is a long run. One run of an engine that ``records`` does that, and says
    nothing of the others.
    """
    in_full = records or device.type == "cuda" or limits.fast_enough > 0
    seconds: dict[int, float] = {}
    for steps in (SHORT, LONG):
        run = trial(steps)
        times: list[float] = []
        spent = 0.0
        while len(times) < REPEATS and (in_full or not times or spent < ENOUGH):
            started = time.perf_counter()
            run()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            times.append(time.perf_counter() - started)
            spent = sum(times) - (max(times) if records else 0.0)
            if times[-1] / steps < limits.fast_enough:
                return Pace(0.0, times[-1] / steps)
            if len(times) > 1 and times[-1] / steps > limits.too_slow:
                break
        seconds[steps] = min(times[1:] or times)
        long_enough = spent > ENOUGH and steps == SHORT and device.type != "cuda"
        if seconds[steps] / steps > limits.too_slow or long_enough:
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


def typical_cohort(world: World, cohort: int) -> np.ndarray:
    """Clients of all sizes: evenly spaced in the order of their size, a middling one first."""
    order = np.argsort(world.federation.train.sizes, kind="stable")
    chosen = order[np.linspace(0, len(order) - 1, cohort).astype(np.int64)]
    return np.roll(chosen, -(len(chosen) // 2))


def key_of(world: World, cohort: int, workers: int) -> str:
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


def remembered(key: str) -> dict[str, Pace]:
    """The paces that were kept for this work; none where they are missing or damaged."""
    try:
        kept: Mapping[str, list[float]] = json.loads((cache_folder() / "paces" / f"{key}.json").read_text())
        return {name: Pace(*map(float, pace)) for name, pace in kept.items()}
    except (OSError, ValueError, TypeError, AttributeError, RuntimeError):
        return {}


def remember(key: str, paces: Mapping[str, Pace]) -> None:
    """For the next run of the same work; without a place to keep it, that one measures again."""
    try:
        folder = cache_folder() / "paces"
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(folder / f"{key}.json", json.dumps(paces).encode())
    except (OSError, RuntimeError):
        return
