"""Local optimisers against torch.optim, step by step, in float64."""

from __future__ import annotations

import pytest
import torch

from fedretain.optimizers import SGD, Adam, LocalOptimizer

CASES = [
    (SGD(), torch.optim.SGD, {}),
    (SGD(weight_decay=0.01), torch.optim.SGD, {"weight_decay": 0.01}),
    (SGD(momentum=0.9, weight_decay=0.01), torch.optim.SGD, {"momentum": 0.9, "weight_decay": 0.01}),
    (SGD(momentum=0.9, nesterov=True), torch.optim.SGD, {"momentum": 0.9, "nesterov": True}),
    (Adam(), torch.optim.Adam, {}),
    (Adam(weight_decay=0.1), torch.optim.Adam, {"weight_decay": 0.1}),
    (Adam(weight_decay=0.1, decoupled=True), torch.optim.AdamW, {"weight_decay": 0.1}),
]


@pytest.mark.parametrize(("ours", "theirs", "options"), CASES)
def test_same_trajectory_as_torch(ours: LocalOptimizer, theirs, options) -> None:
    generator = torch.Generator().manual_seed(1)
    start = {name: torch.randn(3, 2, generator=generator, dtype=torch.float64) for name in ("a", "b")}
    leaves = {name: value.clone().requires_grad_() for name, value in start.items()}
    reference = theirs(leaves.values(), lr=0.05, **options)
    params, state = start, ours.init(start)
    for step in range(6):
        gradient = {name: torch.randn(3, 2, generator=generator, dtype=torch.float64) for name in start}
        params, state = ours.update(params, gradient, state, 0.05, step)
        for name, leaf in leaves.items():
            leaf.grad = gradient[name].clone()
        reference.step()
        for name, leaf in leaves.items():
            torch.testing.assert_close(params[name], leaf.detach(), rtol=1e-12, atol=1e-14)


def test_inputs_are_left_alone() -> None:
    params = {"w": torch.ones(2)}
    state = SGD(momentum=0.5).init(params)
    SGD(momentum=0.5).update(params, {"w": torch.ones(2)}, state, 0.1, 0)
    assert params["w"].tolist() == [1, 1]
    assert state["w"].tolist() == [0, 0]
