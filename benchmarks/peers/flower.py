"""Flower's simulation on Ray: FedAvg strategy, two actors of one CPU each, client code as in Flower's own examples.

Flower samples nodes at random; here each message names the client whose data it is for: the given clients train.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterable

import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MessageType, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation

from benchmarks.peers.given import Given, Watch, from_command_line, given_in, train_client

CPUS = 2


class GivenCohort(FedAvg):
    """FedAvg whose participants are those of the given schedule."""

    def __init__(self, given: Given, variant: int) -> None:
        super().__init__(fraction_evaluate=0.0, min_available_nodes=given.clients)
        self.given, self.variant = given, variant

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """One message for each participant, to as many nodes."""
        cohort = self.given.cohort(self.given.variants[self.variant]["seed"], server_round)
        for node, client in zip(sorted(grid.get_node_ids()), cohort, strict=False):
            told = ConfigRecord({"client": client, "round": server_round, "variant": self.variant})
            content = RecordDict({"arrays": arrays, "config": told})
            yield Message(content=content, message_type=MessageType.TRAIN, dst_node_id=node)


def server_app(given: Given, watch: Watch) -> ServerApp:
    """All variants one after another, in one simulation, so that Ray starts once."""
    app = ServerApp()

    @app.main()
    def serve(grid: Grid, context: Context) -> None:
        while len(list(grid.get_node_ids())) < given.clients:
            time.sleep(0.01)
        for number, variant in enumerate(given.variants):
            watch.variant()
            strategy = GivenCohort(given, number)
            result = strategy.start(
                grid=grid,
                initial_arrays=ArrayRecord(given.model(variant["seed"]).state_dict()),
                num_rounds=given.rounds,
                evaluate_fn=lambda finished, arrays: watch.round() if finished else None,
            )
            watch.keep(result.arrays.to_torch_state_dict())

    return app


def client_app(folder: str) -> ClientApp:
    """Local training; an actor reads the work once and keeps it."""
    app = ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        torch.set_num_threads(1)
        given, told = given_in(folder), message.content["config"]
        variant, client = given.variants[told["variant"]], told["client"]
        model = given.model(variant["seed"])
        model.load_state_dict(message.content["arrays"].to_torch_state_dict())
        train_client(model, given, variant, told["round"], client)
        size = MetricRecord({"num-examples": len(given.raw(client)[1])})
        return Message(
            content=RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": size}), reply_to=message
        )

    return app


def main() -> None:
    """Train every variant."""
    os.environ |= {"FLWR_TELEMETRY_ENABLED": "0", "RAY_USAGE_STATS_ENABLED": "0"}
    given, watch = from_command_line()
    run_simulation(
        server_app=server_app(given, watch),
        client_app=client_app(sys.argv[1]),
        num_supernodes=given.clients,
        backend_config={"init_args": {"num_cpus": CPUS}, "client_resources": {"num_cpus": 1, "num_gpus": 0.0}},
    )
    watch.report()


if __name__ == "__main__":
    main()
