"""One runner in one process: ``python -m benchmarks.runners RUNNER WORK ROUNDS`` prints a JSON line of measurements."""

from __future__ import annotations

import copy
import itertools
import json
import resource
import sys
import time
from collections.abc import Iterator

import torch

from benchmarks.works import WORKS, Work
from fedretain.config import make_experiment
from fedretain.engines import LoopEngine
from fedretain.engines.schedule import local_batches, sample_cohort
from fedretain.experiment import build_world
from fedretain.rounds import initial_state, train_rounds
from fedretain.runs.checkpoint import Checkpoint


def loop_engine(work: Work, rounds: int) -> Iterator[None]:
    """fedretain's loop engine."""
    experiment = make_experiment(work.experiment(rounds + 1))
    world = build_world(experiment, work.data())
    start = Checkpoint(initial_state(experiment, world), {}, {})
    for _ in train_rounds(experiment, world, LoopEngine(world), start):
        yield


def plain_pytorch(work: Work, rounds: int) -> Iterator[None]:
    """What one writes by hand: modules, torch.optim, an average of state dictionaries."""
    experiment = make_experiment(work.experiment(rounds))
    world = build_world(experiment, work.data())
    model, federation = copy.deepcopy(world.model), world.federation
    for number in range(1, rounds + 1):
        states = []
        for client in sample_cohort(0, number, work.clients, work.participants).tolist():
            local = copy.deepcopy(model).train()
            optimizer = torch.optim.SGD(local.parameters(), lr=work.lr)
            inputs, labels = federation.examples(federation.train[client])
            for at in local_batches(0, number, client, len(labels), experiment.local):
                chosen = torch.from_numpy(at)
                optimizer.zero_grad()
                torch.nn.functional.cross_entropy(local(inputs[chosen]), labels[chosen]).backward()
                optimizer.step()
            states.append(local.state_dict())
        model.load_state_dict({n: torch.stack([s[n] for s in states]).mean(0) for n in states[0]})
        yield


RUNNERS = {"fedretain-loop": loop_engine, "plain-pytorch": plain_pytorch}


def measure(runner: str, work: str, rounds: int) -> dict[str, object]:
    """Seconds of each round after the first, seconds to the first finished round, peak memory."""
    started = time.perf_counter()
    marks = []
    for _ in RUNNERS[runner](WORKS[work], rounds + 1):
        marks.append(time.perf_counter())
        if len(marks) > rounds:
            break
    seconds = [later - earlier for earlier, later in itertools.pairwise(marks)]
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return {"seconds": seconds, "startup_seconds": marks[0] - started, "peak_rss_mb": peak}


if __name__ == "__main__":
    print(json.dumps(measure(sys.argv[1], sys.argv[2], int(sys.argv[3]))))
