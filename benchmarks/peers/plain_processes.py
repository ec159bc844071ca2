"""The hand-written loop in two processes of one thread each: half of the participants in each, two sums back."""

from __future__ import annotations

import copy
import multiprocessing
import sys
from typing import Any

import numpy as np
import torch

from benchmarks.peers.given import from_command_line, given_in, train_client

PROCESSES = 2


def train_share(
    variant: dict[str, Any], number: int, clients: list[int], weights: dict[str, np.ndarray]
) -> dict[str, np.ndarray]:
    """The sum of the parameters of these clients after local training."""
    given = given_in(sys.argv[1])
    model = given.model(variant["seed"])
    model.load_state_dict({name: torch.from_numpy(value) for name, value in weights.items()})
    total: dict[str, np.ndarray] = {}
    for client in clients:
        local = copy.deepcopy(model)
        train_client(local, given, variant, number, client)
        for name, value in local.state_dict().items():
            total[name] = total[name] + value.numpy() if name in total else value.numpy()
    return total


def main() -> None:
    """Train every variant."""
    given, watch = from_command_line()
    context = multiprocessing.get_context("fork")
    with context.Pool(PROCESSES, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        for variant in given.variants:
            watch.variant()
            weights = {name: value.numpy() for name, value in given.model(variant["seed"]).state_dict().items()}
            for number in range(1, given.rounds + 1):
                cohort = given.cohort(variant["seed"], number)
                shares = [(variant, number, cohort[start::PROCESSES], weights) for start in range(PROCESSES)]
                sums = pool.starmap(train_share, shares, chunksize=1)
                weights = {name: sum(part[name] for part in sums) / len(cohort) for name in weights}
                watch.round()
            watch.keep(weights)
    watch.report()


if __name__ == "__main__":
    main()
