"""FedLab: its standalone pipeline with the serial trainer, one client after another.

FedLab asks a dataset for a loader and goes through it once an epoch; the loader here gives the given order. FedLab's
built-in datasets import torchvision, which is not there; empty modules stand in for it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import benchmarks.peers.without_torchvision  # noqa: F401

# isort: split
from fedlab.contrib.algorithm.fedavg import FedAvgSerialClientTrainer, FedAvgServerHandler
from fedlab.core.standalone import StandalonePipeline
from torch import Tensor

from benchmarks.peers.given import Given, Objective, Watch, from_command_line


class OrderedLoader:
    """A client's batches; every pass is the next epoch."""

    def __init__(self, given: Given, seed: int, number: int, client: int) -> None:
        self.given = given
        self.data = given.examples(client)
        self.epochs = iter(given.order(seed, number, client))

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return self.given.batches(*self.data, next(self.epochs))


class Pipeline(StandalonePipeline):
    """Stands in for FedLab's dataset, and stops the time where FedLab evaluates."""

    def __init__(self, given: Given, variant: dict[str, Any], watch: Watch) -> None:
        self.given, self.variant, self.watch = given, variant, watch
        model = given.model(variant["seed"])
        trainer = FedAvgSerialClientTrainer(model, given.clients)
        trainer.setup_dataset(self)
        trainer.setup_optim(given.epochs, given.batch_size, variant["lr"])
        handler = FedAvgServerHandler(model, given.rounds, given.participants / given.clients)
        handler.sample_clients = lambda: given.cohort(variant["seed"], handler.round + 1)
        super().__init__(handler, trainer)

    def get_dataloader(self, client: int, batch_size: int) -> OrderedLoader:
        """Called before each client's training, so that this is where its loss is set."""
        self.trainer.criterion = Objective(self.variant["loss"], self.given.counts(client))
        return OrderedLoader(self.given, self.variant["seed"], self.handler.round + 1, client)

    def evaluate(self) -> None:
        """Called at the end of a round."""
        self.watch.round()


def main() -> None:
    """Train every variant."""
    given, watch = from_command_line()
    for variant in given.variants:
        watch.variant()
        pipeline = Pipeline(given, variant, watch)
        pipeline.main()
        watch.keep(pipeline.handler.model.state_dict())
    watch.report()


if __name__ == "__main__":
    main()
