"""What one writes by hand: one client after another, an average of state dictionaries; PyTorch uses both cores."""

from __future__ import annotations

import copy

import torch

from benchmarks.peers.given import from_command_line, train_client


def main() -> None:
    """Train every variant."""
    given, watch = from_command_line()
    for variant in given.variants:
        watch.variant()
        model = given.model(variant["seed"])
        for number in range(1, given.rounds + 1):
            states = []
            for client in given.cohort(variant["seed"], number):
                local = copy.deepcopy(model)
                train_client(local, given, variant, number, client)
                states.append(local.state_dict())
            model.load_state_dict({name: torch.stack([s[name] for s in states]).mean(0) for name in states[0]})
            watch.round()
        watch.keep(model.state_dict())
    watch.report()


if __name__ == "__main__":
    main()
