"""Larger operations in place of several: pooling by slices to the bit, the loss and its gradient in one."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fedretain.engines.fusing import halve, halve_backward, log_sum_exp, log_sum_exp_and_softmax
from fedretain.engines.recording import Recording
from fedretain.losses import LOSSES
from fedretain.randomness import stream


def numbers(*shape: int, purpose: str = "fusing") -> Tensor:
    return torch.from_numpy(stream(0, purpose, *shape).normal(size=shape)).to(torch.float32)


@pytest.mark.parametrize("kind", ["normal", "ties", "all equal", "negative", "relu", "zeros"])
@pytest.mark.parametrize("shape", [(2, 3, 4, 6), (1, 1, 2, 2), (5, 2, 3, 8, 4)])
def test_halving_is_max_pooling(kind: str, shape: tuple[int, ...]) -> None:
    """Values and gradient to the bit; with ties the gradient goes to the first in reading order."""
    maps = numbers(*shape)
    maps = {
        "normal": maps,
        "ties": (maps * 1.5).round(),
        "all equal": torch.full_like(maps, -2.5),
        "negative": -maps.abs() - 1,
        "relu": maps.relu(),
        "zeros": torch.zeros_like(maps),
    }[kind]
    flat = maps.flatten(0, -4) if maps.dim() > 4 else maps
    flat = flat.clone().requires_grad_()
    pooled = F.max_pool2d(flat, 2)
    gradient = numbers(*pooled.shape, purpose="gradient")
    (expected,) = torch.autograd.grad(pooled, flat, gradient)
    values, rows = halve(maps)
    assert torch.equal(values.reshape(pooled.shape), pooled.detach())
    back = halve_backward(gradient.reshape(values.shape), maps, rows)
    assert torch.equal(back.reshape(expected.shape), expected)


def test_a_tie_by_hand() -> None:
    """[[1, 2], [2, 0]]: the first 2 in reading order is the upper right one, and gets the whole gradient of 5."""
    maps = torch.tensor([[[[1.0, 2.0], [2.0, 0.0]]]])
    values, rows = halve(maps)
    assert values.item() == 2
    assert halve_backward(torch.tensor([[[[5.0]]]]), maps, rows).tolist() == [[[[0, 5], [0, 0]]]]


def test_log_sum_exp_and_softmax() -> None:
    """Of logits up to ±200, whose exponentials alone would overflow; an absent class, −∞, has no share at all."""
    values = 100 * numbers(3, 4, 5)
    values[0, 1, 2] = -math.inf
    total, shares = log_sum_exp_and_softmax(values, [2])
    torch.testing.assert_close(total, values.double().logsumexp(2).float())
    torch.testing.assert_close(shares, values.double().softmax(2).float())
    assert shares[0, 1, 2] == 0
    assert torch.equal(log_sum_exp(values, [2]), total)
    assert torch.equal(log_sum_exp(values, [2], True), total.unsqueeze(2))
    assert log_sum_exp_and_softmax(values, [2], True)[0].shape == (3, 4, 1)


@pytest.mark.parametrize("loss", ["ce", "wsm", "tce"])
def test_the_gradient_of_a_loss_shares_its_exponentials(loss: str) -> None:
    """Logits as the carry, one step down the mean loss: values and gradient are those of automatic differentiation.

    The third class is absent for the first client: under tce its logits must stay exactly where they are.
    """
    logits, labels = 3 * numbers(2, 6, 4), torch.tensor([[0, 1, 3, 1, 0, 3], [2, 2, 0, 1, 3, 2]])
    counts = torch.tensor([[2, 2, 0, 2], [1, 1, 3, 1]])

    def mean(values: Tensor, labels: Tensor, counts: Tensor) -> Tensor:
        return LOSSES[loss](values, labels, counts).mean()

    def step(carry: dict[str, Tensor], rate: Tensor, fixed: Any) -> Any:
        gradient, told = torch.func.vmap(torch.func.grad_and_value(mean))(carry["z"], *fixed)
        return {"z": carry["z"] + -rate * gradient}, told

    rate = torch.tensor(0.5)
    recording = Recording(step, {"z": logits}, rate, (labels, counts), exact=False)
    called = [node.target for node in recording.module.graph.nodes if node.op == "call_function"]
    assert log_sum_exp_and_softmax in called
    expected, told = step({"z": logits.clone()}, rate, (labels, counts))
    (new,), result = recording.play([logits.clone()], [rate], [labels, counts])
    torch.testing.assert_close(new, expected["z"])
    torch.testing.assert_close(result, told)
    if loss == "tce":
        assert torch.equal(new[0, :, 2], logits[0, :, 2])
