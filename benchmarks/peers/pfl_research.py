"""pfl-research: FederatedAveraging on its SimulatedBackend, in two processes of one thread that all-reduce by gloo.

pfl goes through a user's data in the stored order in every epoch; the user dataset here hands out the given order.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from itertools import count
from typing import Any

import torch
from torch import Tensor

from benchmarks.peers.given import Given, Objective, Watch, from_command_line

PROCESSES = 2


def start_other_process() -> subprocess.Popen[bytes] | None:
    """The first process starts the second; both find each other by pfl's environment variables."""
    if "PFL_WORKER_RANK" in os.environ:
        return None
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    os.environ["PFL_WORKER_ADDRESSES"] = ",".join([address] * PROCESSES)
    command = [sys.executable, "-m", "benchmarks.peers.pfl_research", *sys.argv[1:]]
    other = subprocess.Popen(command, env={**os.environ, "PFL_WORKER_RANK": "1"}, stdout=subprocess.DEVNULL)
    os.environ["PFL_WORKER_RANK"] = "0"
    return other


def main() -> None:
    """Train every variant."""
    torch.set_num_threads(1)
    other = start_other_process()
    given, watch = from_command_line()
    for variant in given.variants:
        watch.variant()
        watch.keep(train(given, variant, watch))
    if other is None:
        return
    if other.wait():
        raise SystemExit(f"the second process failed with status {other.returncode}")
    watch.report()


def train(given: Given, variant: dict[str, Any], watch: Watch) -> dict[str, Tensor]:
    """One training. pfl opens its process group on import, so it is imported when both processes are there."""
    from pfl.aggregate.simulate import SimulatedBackend
    from pfl.algorithm.base import NNAlgorithmParams
    from pfl.algorithm.federated_averaging import FederatedAveraging
    from pfl.callback.base import TrainingProcessCallback
    from pfl.data.dataset import Dataset
    from pfl.data.federated_dataset import FederatedDataset
    from pfl.hyperparam.base import NNTrainHyperParams
    from pfl.metrics import Metrics, Weighted
    from pfl.model.pytorch import PyTorchModel

    class OrderedDataset(Dataset):
        """A user's data in the given order of each epoch."""

        def __init__(self, number: int, client: int) -> None:
            super().__init__(given.examples(client), user_id=str(client), train_kwargs={"counts": given.counts(client)})
            self.epochs = iter(given.order(variant["seed"], number, client))

        def iter(self, batch_size: int | None) -> Iterator[tuple[Tensor, Tensor]]:
            """The batches of the next epoch; the evaluation of pfl's first round asks for all examples at once."""
            if batch_size == given.batch_size:
                return given.batches(*self.raw_data, next(self.epochs))
            return iter([self.raw_data])

    class RoundEnds(TrainingProcessCallback[Any]):
        """Stops the time."""

        def after_central_iteration(self, aggregate_metrics: Any, model: Any, *, central_iteration: int) -> Any:
            """Called when the model has been updated."""
            watch.round()
            return False, Metrics()

    def loss(self: torch.nn.Module, inputs: Tensor, labels: Tensor, counts: Tensor) -> Tensor:
        return Objective(variant["loss"], counts)(self.train()(inputs), labels)

    def metrics(self: torch.nn.Module, inputs: Tensor, labels: Tensor) -> dict[str, Any]:
        """pfl evaluates in its first round; nothing is computed there."""
        return {"examples": Weighted(0, 1)}

    model = given.model(variant["seed"])
    model.__class__ = type("PflNetwork", (type(model),), {"loss": loss, "metrics": metrics})
    users = ((number, client) for number in count(1) for client in given.cohort(variant["seed"], number))
    population = FederatedDataset(lambda user: OrderedDataset(*user), lambda: next(users))
    FederatedAveraging().run(
        algorithm_params=NNAlgorithmParams(
            central_num_iterations=given.rounds,
            evaluation_frequency=given.rounds + 1,
            train_cohort_size=given.participants,
            val_cohort_size=None,
        ),
        backend=SimulatedBackend(training_data=population, val_data=population),
        model=PyTorchModel(model, torch.optim.SGD, torch.optim.SGD(model.parameters(), lr=1.0)),
        model_train_params=NNTrainHyperParams(
            local_num_epochs=given.epochs, local_learning_rate=variant["lr"], local_batch_size=given.batch_size
        ),
        callbacks=[RoundEnds()],
        send_metrics_to_platform=False,
    )
    return model.state_dict()


if __name__ == "__main__":
    main()
