"""fluke: its FedAvg workflow (CentralizedFL), one client after another; clients forget their model between rounds.

fluke's loader shuffles at random; the loader here takes the given order, and its server the given participants.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from fluke import DDict, FlukeENV
from fluke.algorithms import CentralizedFL
from fluke.client import Client
from fluke.config import OptimizerConfigurator
from fluke.data import FastDataLoader
from fluke.server import Server

from benchmarks.peers.given import Given, Objective, Watch, from_command_line


class OrderedLoader(FastDataLoader):
    """fluke's loader, with the order of every epoch given instead of drawn."""

    def __init__(self, given: Given, client: int) -> None:
        self.stored = given.raw(client)
        self.epochs = iter(torch.empty(0))
        super().__init__(
            *self.stored,
            num_labels=given.classes,
            batch_size=given.batch_size,
            shuffle=False,
            transforms=given.scaled,
            skip_singleton=False,
        )

    def __iter__(self) -> OrderedLoader:
        order = next(self.epochs)
        self.tensors = [tensor[order] for tensor in self.stored]
        return super().__iter__()


class GivenCohort(Server):
    """fluke's server with the participants of the given schedule."""

    def __init__(
        self, given: Given, seed: int, watch: Watch, model: torch.nn.Module, clients: Sequence[Client]
    ) -> None:
        super().__init__(model=model, test_set=None, clients=clients, weighted=True)
        self.given, self.seed, self.watch = given, seed, watch
        self.number = 0

    def get_eligible_clients(self, eligible_perc: float) -> Sequence[Client]:
        """The round's participants, each with the order of its epochs."""
        self.number += 1
        cohort = self.given.cohort(self.seed, self.number)
        for client in cohort:
            self.clients[client].train_set.epochs = iter(self.given.order(self.seed, self.number, client))
        return [self.clients[client] for client in cohort]

    def aggregate(self, eligible: Sequence[Client], client_models: Iterable[torch.nn.Module]) -> None:
        """The last thing of a round."""
        super().aggregate(eligible, client_models)
        self.watch.round()


def train(given: Given, variant: dict[str, Any], watch: Watch) -> None:
    """One training."""
    optimizer = OptimizerConfigurator(DDict(name="SGD", lr=variant["lr"]))
    clients = [
        Client(
            index=client,
            train_set=OrderedLoader(given, client),
            test_set=None,
            optimizer_cfg=optimizer,
            loss_fn=Objective(variant["loss"], given.counts(client)),
            local_epochs=given.epochs,
            persistency=False,
        )
        for client in range(given.clients)
    ]
    server = GivenCohort(given, variant["seed"], watch, given.model(variant["seed"]), clients)
    algorithm = CentralizedFL(given.clients, None, DDict(), clients=clients, server=server)
    algorithm.run(n_rounds=given.rounds, eligible_perc=given.participants / given.clients)
    watch.keep(server.model.state_dict())


def main() -> None:
    """Train every variant."""
    given, watch = from_command_line()
    FlukeENV().set_eval_cfg(server=False)
    for variant in given.variants:
        watch.variant()
        train(given, variant, watch)
    watch.report()


if __name__ == "__main__":
    main()
