"""Where the parts meet: an experiment goes in, a run directory comes out. The round loop is in ``rounds.py``."""

from __future__ import annotations

import contextlib
import logging
import shutil
from collections.abc import Mapping, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedretain.centralised import check_centralised, train_centralised
from fedretain.components import find
from fedretain.config import Experiment, make_experiment, read_experiment
from fedretain.data import Dataset, load_dataset
from fedretain.data.federation import Parts, build_federation, split_examples
from fedretain.data.transforms import Normalise
from fedretain.engines import Engine, World
from fedretain.engines.engine import own_of
from fedretain.engines.planner import Plan, build_engine, make_plan, runs_on
from fedretain.engines.processes import can_copy_this_process
from fedretain.engines.schedule import local_steps
from fedretain.engines.trials import processors
from fedretain.engines.workers import WorkerPool, WorkersEngine
from fedretain.errors import ConfigError, RunError
from fedretain.files import in_words
from fedretain.keeping import Keeper, Watcher
from fedretain.losses import LOSSES
from fedretain.models import build_model
from fedretain.probes import check_measures
from fedretain.rounds import train_rounds
from fedretain.runs.clients import packed, worst_case_bytes
from fedretain.runs.directory import RunDirectory
from fedretain.runs.run import Run
from fedretain.runs.trackers import Tracker
from fedretain.runs.trackers.tracking import Tracking, build_trackers
from fedretain.tensors import size_in_bytes

LOG = logging.getLogger("fedretain")

Source = str | Path | Mapping[str, Any] | Experiment


def run(
    source: Source,
    *,
    out: str | Path | None = None,
    resume: bool = False,
    overrides: Sequence[str] = (),
    data: Dataset | None = None,
    watch: Watcher | None = None,
    trackers: Sequence[Tracker] = (),
    group: str | None = None,
) -> Run:
    """Run one experiment and return what it left behind.

    ``source`` is an experiment file, a mapping or an Experiment; ``overrides`` are ``key=value`` texts. Without ``out``
    a new directory below ``runs/`` is made. ``resume`` goes on where an earlier run of the same experiment stopped, to
    the same bits. ``data`` brings your own examples (``fedretain.from_arrays``) in place of ``data.name``.
    ``trackers`` follow the run besides those under ``track``; ``group`` is the comparison that it belongs to, for them.
    """
    experiment = make_experiment(read_experiment(source, overrides))
    path = Path(out) if out is not None else default_directory(experiment, resume)
    tracking = Tracking(build_trackers(experiment, trackers))
    with contextlib.ExitStack() as held:
        pool = None if finished(path) else _early_workers(experiment, held)
        world = build_world(experiment, data)
        if needs := plan_client_states(experiment, world, path):
            LOG.info(needs)
        directory = held.enter_context(RunDirectory.opened(path, experiment, resume=resume))
        keeper = Keeper(directory, experiment, world, tracking, watch=watch, group=group)
        _run_in(keeper, experiment, world, pool)
        return reported(path)


def reported(path: Path) -> Run:
    """A finished run, with its page where plotly is installed."""
    if find_spec("plotly") is not None:
        from fedretain.report import write_report

        write_report([path], path / "report.html")
    return Run(path)


def finished(path: Path) -> bool:
    """Whether a directory holds a run that is done; a path that cannot be is refused by whoever opens it."""
    try:
        return (path / "summary.json").exists()
    except OSError:
        return False


def default_directory(experiment: Experiment, resume: bool) -> Path:
    """``runs/NAME-KEY``, numbered when that exists; to resume, the newest one there is."""
    stem = Path("runs") / f"{experiment.name}-{experiment.key}"
    tries = [stem, *(stem.with_name(f"{stem.name}-{number}") for number in range(2, 10_000))]
    free = next(index for index, path in enumerate(tries) if not path.exists())
    return tries[free - 1] if resume and free else tries[free]


def build_world(
    experiment: Experiment,
    data: Dataset | None = None,
    beside: World | None = None,
    parts: tuple[Parts, Parts] | None = None,
) -> World:
    """Everything that stays the same from round to round; all that can be refused is refused here.

    A world made ``beside`` another one of the same data shares its examples. ``parts`` are the training and validation
    parts of its clients where they are known already.
    """
    device, dtype = find_device(experiment.device), _dtype(experiment)
    if experiment.precision == "bfloat16" and device.type == "cpu":
        raise ConfigError(
            "precision: bfloat16 is for accelerators (some CPUs cannot run it at all); use float32 on cpu"
        )
    method = experiment.build_method()
    local = method.local(experiment.local)
    check_measures(experiment.forgetting.measures, method)
    if experiment.training == "centralised":
        check_centralised(experiment)
    dataset = data if data is not None else load_data(experiment)
    train, validation = parts or split_examples(dataset, experiment.partition, experiment.seed)
    experiment.cohort_size(len(train))
    for size in np.unique(train.sizes[train.sizes > 0]).tolist():
        local_steps(size, local)
    settings = experiment.data
    normalise = Normalise.fit(dataset, settings.normalise, mean=settings.mean, std=settings.std)
    federation = build_federation(dataset, train, validation, normalise, device=device, dtype=dtype)
    if beside is not None:
        federation = federation.sharing(beside.federation)
    model = build_model(
        experiment.model.name,
        federation.shape,
        federation.classes,
        seed=experiment.seed,
        **experiment.model.parameters,
    )
    method.init_server({name: p.detach() for name, p in model.named_parameters()})  # refuses models it cannot train
    loss = partial(find("loss", LOSSES, experiment.loss.name), **experiment.loss.parameters)
    return World(
        model.to(device, dtype),
        loss,
        method,
        local,
        federation,
        experiment.seed,
        experiment.precision,
    )


def load_data(experiment: Experiment) -> Dataset:
    """The dataset that the experiment names."""
    settings = experiment.data
    return load_dataset(
        settings.name,
        root=settings.root,
        path=settings.path,
        image=settings.image,
        label=settings.label,
        size=settings.size,
        include_val=settings.include_val,
    )


def find_device(name: str) -> torch.device:
    """The device that was asked for, or the best there is."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    device = torch.device(name)
    found = ["cpu"]
    if torch.cuda.is_available():
        found += ["cuda", *(f"cuda:{index}" for index in range(torch.cuda.device_count()))]
    if torch.backends.mps.is_available():
        found.append("mps")
    if name not in found:
        raise ConfigError(f"device: there is no {name!r} here (found: {', '.join(found)}); use one of these or auto")
    return device


def _early_workers(experiment: Experiment, held: contextlib.ExitStack) -> WorkerPool | None:
    """Worker processes that were asked for import while this one reads the data, unless they are to be copies of it."""
    asked = experiment.engine.name == "workers" and experiment.training == "federated"
    if not asked or find_device(experiment.device).type != "cpu" or can_copy_this_process():
        return None
    return held.enter_context(contextlib.closing(WorkerPool(experiment.engine.workers or processors()).start()))


def _run_in(keeper: Keeper, experiment: Experiment, world: World, pool: WorkerPool | None) -> None:
    """Start or go on, keep every round, and finish with a summary whatever happens on the way."""
    with contextlib.ExitStack() as held:
        if experiment.training == "centralised":
            keeper.begin()
            rounds = train_centralised(experiment, world, keeper.last)
        else:
            engine = held.enter_context(contextlib.closing(planned_engine(keeper, experiment, world, pool)))
            if isinstance(engine, WorkersEngine) and keeper.last.state.round < experiment.rounds:
                engine.start()  # before trackers have threads, beside which this process could not be copied
            keeper.begin()
            rounds = train_rounds(experiment, world, engine, keeper.last, keeper.directory.store)
        with keeper.saving():
            for ended in rounds:
                keeper.keep(ended)
    keeper.finish()


def planned_engine(keeper: Keeper, experiment: Experiment, world: World, pool: WorkerPool | None) -> Engine:
    """The engine of the experiment; a run that goes on keeps the one it began with, and so its bits."""
    left = experiment.rounds - keeper.last.state.round
    began = keeper.last.facts.get("engine")
    if began is not None and experiment.engine.name == "auto" and runs_on(began["name"], world.federation.device):
        plan = Plan(began["name"], began["inner"], experiment.engine.workers or processors(), "")
    else:
        plan = make_plan(world, experiment.engine, experiment.cohort_size(world.federation.clients), left)
    keeper.note(engine={"name": plan.name, "inner": plan.inner})
    if plan.why:
        LOG.info("engine: %s, %s", plan.label, plan.why)
    return build_engine(world, plan, pool)


def plan_client_states(experiment: Experiment, world: World, path: Path) -> str:
    """How much disk the clients' states can take at worst, in words; a run that could not finish for it is refused."""
    if experiment.training == "centralised" or not world.method.uses("init_client"):
        return ""
    federation = world.federation
    largest = int(np.argmax(federation.train.sizes))
    params = {name: p.detach() for name, p in world.model.named_parameters()}
    half = experiment.engine.state_precision == "half"
    state = size_in_bytes(packed(world.method.init_client(params, own_of(world, largest, steps=0)), half))
    cohort = experiment.cohort_size(federation.clients)
    needed = worst_case_bytes(state, federation.clients, cohort, experiment.rounds)
    held = sum(file.stat().st_size for file in (path / "clients").glob("*"))
    there = next(place for place in (path.absolute(), *path.absolute().parents) if place.exists())
    free = shutil.disk_usage(there).free + held
    told = f"{world.method.name} keeps {in_words(state)} for each client seen: at worst {in_words(needed)} on disk"
    if needed > free:
        raise RunError(
            f"{path}: {told}, and {in_words(free)} are free; use fewer clients or rounds, "
            "engine.state_precision: half, or a larger disk (--out)"
        )
    return f"{told} ({in_words(free)} are free), at most {in_words(experiment.engine.state_memory)} in memory"


def _dtype(experiment: Experiment) -> torch.dtype:
    return torch.float64 if experiment.precision == "float64" else torch.float32
