"""The loss family against direct float64 evaluations of the papers' formulas, and METHODS.md's identities."""

from __future__ import annotations

import math
from functools import partial

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.func import grad, vmap

from fedretain.errors import DataError
from fedretain.losses import LOSSES, cross_entropy, floored_cross_entropy, truncated_softmax, weighted_softmax


def example(classes: int = 6, batch: int = 5, seed: int = 0) -> tuple[Tensor, Tensor]:
    rng = np.random.default_rng(seed)
    logits = torch.from_numpy(rng.normal(size=(batch, classes)) * 3)
    return logits, torch.from_numpy(rng.integers(0, classes, batch))


def gradient(loss, logits: Tensor, labels: Tensor, counts: Tensor) -> Tensor:
    leaf = logits.clone().requires_grad_()
    (g,) = torch.autograd.grad(loss(leaf, labels, counts).sum(), leaf)
    return g


def test_by_hand() -> None:
    """Logits (ln 1, ln 2, ln 3), label 1, counts (3, 1, 0), so β = (3/4, 1/4, 0).

    CE  = −ln 2 + ln(1 + 2 + 3) = ln 3.
    TCE = −ln 2 + ln(1 + 2) = ln 3/2.
    WSM = −ln 2 + ln(3/4·1 + 1/4·2) = ln 5/8.
    """
    logits = torch.tensor([[1.0, 2.0, 3.0]], dtype=torch.float64).log()
    labels, counts = torch.tensor([1]), torch.tensor([3, 1, 0])
    assert cross_entropy(logits, labels, counts).item() == pytest.approx(math.log(3), abs=1e-14)
    assert truncated_softmax(logits, labels, counts).item() == pytest.approx(math.log(3 / 2), abs=1e-14)
    assert weighted_softmax(logits, labels, counts).item() == pytest.approx(math.log(5 / 8), abs=1e-14)


def test_floor_by_hand() -> None:
    """p = (1/6, 1/3, 1/2), label 1, floor 1/6: −ln(1/3 + 1/6) = ln 2; the slope is (1/3) ÷ (1/2) of p − (0, 1, 0).

    Soft labels (1/2, 0, 1/2): −½ ln(1/6 + 1/6) − ½ ln(1/2 + 1/6) = ½ ln 9/2.
    """
    logits = torch.tensor([[1.0, 2.0, 3.0]], dtype=torch.float64).log()
    labels, counts = torch.tensor([1]), torch.tensor([1, 1, 1])
    floored = partial(floored_cross_entropy, floor=1 / 6)
    assert floored(logits, labels, counts).item() == pytest.approx(math.log(2), abs=1e-14)
    slope = 2 / 3 * torch.tensor([[1 / 6, -2 / 3, 1 / 2]], dtype=torch.float64)
    torch.testing.assert_close(gradient(floored, logits, labels, counts), slope)
    soft = torch.tensor([[0.5, 0.0, 0.5]], dtype=torch.float64)
    assert floored(logits, soft, counts).item() == pytest.approx(math.log(9 / 2) / 2, abs=1e-14)


def test_floor_of_an_example_that_is_surely_wrong() -> None:
    """No more than −log floor, and nothing pulls, however large the logits are; without a floor the slope is 1."""
    logits, labels = torch.tensor([[0.0, 1e4], [0.0, 1e30]]), torch.tensor([0, 0])
    floored = floored_cross_entropy
    counts = torch.tensor([1, 1])
    torch.testing.assert_close(floored(logits, labels, counts), torch.full((2,), 12 * math.log(10)))
    assert not gradient(floored, logits, labels, counts).any()
    assert gradient(cross_entropy, logits, labels, counts).tolist() == [[-1.0, 1.0], [-1.0, 1.0]]


@pytest.mark.parametrize(
    "counts", [[5, 1, 0, 2, 9, 0], [1, 0, 0, 0, 0, 0], [3, 3, 3, 3, 3, 3], [1000000, 1, 0, 0, 0, 1]]
)
def test_wsm_is_equation_4_in_value_and_gradient(counts: list[int]) -> None:
    """L = −f_y + log Σ β_c e^{f_c};  ∂L/∂f_c = β_c e^{f_c} / Σ β e^f − [c = y] (the numerator carries no β)."""
    logits, labels = example()
    f, y = logits.numpy(), labels.numpy()
    beta = np.array(counts) / np.sum(counts)
    weighted = beta * np.exp(f)
    value = -f[np.arange(len(y)), y] + np.log(weighted.sum(1))
    slope = weighted / weighted.sum(1, keepdims=True) - np.eye(6)[y]
    tensor = torch.tensor(counts)
    np.testing.assert_allclose(weighted_softmax(logits, labels, tensor).numpy(), value, rtol=1e-13, atol=1e-13)
    np.testing.assert_allclose(
        gradient(weighted_softmax, logits, labels, tensor).numpy(), slope, rtol=1e-12, atol=1e-14
    )


def test_uniform_counts_make_wsm_cross_entropy_minus_log_c() -> None:
    logits, labels = example()
    counts = torch.full((6,), 7)
    difference = cross_entropy(logits, labels, counts) - weighted_softmax(logits, labels, counts)
    torch.testing.assert_close(difference, torch.full_like(difference, math.log(6)), rtol=1e-13, atol=1e-13)
    torch.testing.assert_close(
        gradient(weighted_softmax, logits, labels, counts),
        gradient(cross_entropy, logits, labels, counts),
        rtol=1e-13,
        atol=1e-14,
    )


def test_tce_with_all_classes_present_is_cross_entropy() -> None:
    logits, labels = example()
    counts = torch.tensor([1, 9, 4, 2, 300, 1])
    assert torch.equal(truncated_softmax(logits, labels, counts), cross_entropy(logits, labels, counts))


@pytest.mark.parametrize("loss", [weighted_softmax, truncated_softmax])
def test_absent_classes_get_exactly_zero_gradient_even_at_extreme_logits(loss) -> None:
    logits = torch.tensor([[3.0, 1e4, -1e4, 0.5], [0.1, -80.0, 90.0, 0.0]])
    labels, counts = torch.tensor([0, 3]), torch.tensor([2, 0, 0, 5])
    g = gradient(loss, logits, labels, counts)
    assert torch.equal(g[:, 1:3], torch.zeros(2, 2))
    assert g.isfinite().all()
    assert loss(logits, labels, counts).isfinite().all()


def test_label_that_the_client_does_not_hold_has_a_finite_wsm_loss() -> None:
    """β_y = 0: the first term has no β, so L = −f_y + log Σ_{c≠y} β_c e^{f_c}; its gradient at y is −1."""
    logits, labels, counts = torch.tensor([[1.0, 2.0]]), torch.tensor([1]), torch.tensor([4, 0])
    assert weighted_softmax(logits, labels, counts).item() == pytest.approx(-1.0)
    assert gradient(weighted_softmax, logits, labels, counts).tolist() == [[1.0, -1.0]]


@pytest.mark.parametrize("loss", [weighted_softmax, truncated_softmax])
def test_all_zero_counts_are_an_error(loss) -> None:
    logits, labels = example()
    with pytest.raises(DataError, match="all class counts are zero"):
        loss(logits, labels, torch.zeros(6, dtype=torch.int64))


@pytest.mark.parametrize("name", sorted(LOSSES))
def test_gradient_matches_finite_differences(name: str) -> None:
    logits, labels = example(batch=3)
    counts = torch.tensor([5, 1, 0, 2, 9, 1])
    assert torch.autograd.gradcheck(lambda x: LOSSES[name](x, labels, counts), (logits.requires_grad_(),))


@pytest.mark.parametrize("name", sorted(LOSSES))
def test_one_hot_soft_labels_are_class_numbers(name: str) -> None:
    logits, labels = example()
    counts = torch.tensor([5, 1, 2, 2, 9, 1])
    soft = torch.nn.functional.one_hot(labels, 6).double()
    torch.testing.assert_close(
        LOSSES[name](logits, soft, counts), LOSSES[name](logits, labels, counts), rtol=0, atol=1e-13
    )


@pytest.mark.parametrize("name", sorted(LOSSES))
def test_clients_can_be_stacked(name: str) -> None:
    """vmap over a client axis gives each client's own numbers (the vectorised engine relies on it)."""
    logits = torch.stack([example(seed=s)[0] for s in range(3)])
    labels = torch.stack([example(seed=s)[1] for s in range(3)])
    counts = torch.tensor([[5, 1, 0, 2, 9, 1], [1, 1, 1, 1, 1, 1], [0, 0, 3, 0, 0, 0]])
    loss = LOSSES[name]
    stacked = vmap(grad(lambda f, y, n: loss(f, y, n).sum()))(logits, labels, counts)
    single = torch.stack([gradient(loss, f, y, n) for f, y, n in zip(logits, labels, counts, strict=True)])
    torch.testing.assert_close(stacked, single, rtol=1e-13, atol=1e-14)
