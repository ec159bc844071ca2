"""FedRS, FedLC and balanced softmax against their formulas, and where they become CE, TCE or WSM."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from fedretain.config import make_experiment
from fedretain.errors import ConfigError, DataError
from fedretain.losses import (
    balanced_softmax,
    calibrated_softmax,
    cross_entropy,
    restricted_softmax,
    truncated_softmax,
    weighted_softmax,
)

COUNTS = torch.tensor([5, 1, 0, 2, 16, 0])
EVERYTHING = torch.tensor([5, 1, 7, 2, 16, 3])


def example(labels: list[int] | None = None) -> tuple[Tensor, Tensor]:
    rng = np.random.default_rng(4)
    logits = torch.from_numpy(rng.normal(size=(5, 6)) * 3)
    return logits, torch.tensor(labels or [0, 1, 3, 4, 4])


def gradient(loss, logits: Tensor, labels: Tensor, counts: Tensor, **keys: float) -> Tensor:
    leaf = logits.clone().requires_grad_()
    (g,) = torch.autograd.grad(loss(leaf, labels, counts, **keys).sum(), leaf)
    return g


def test_by_hand() -> None:
    """Logits (ln 1, ln 4, ln 9), label 1, counts (16, 1, 0).

    FedRS, α = ½: the absent class has ½·ln 9 = ln 3: L = −ln 4 + ln(1 + 4 + 3) = ln 2.
    FedLC, τ = 2 ln 2: n^(−1/4) = ½ and 1, so the logits are −ln 2 and ln 4 − 2 ln 2 = 0; class 2 drops out:
    L = −0 + ln(1/2 + 1) = ln 3/2.
    Balanced: logits ln 16 and ln 4: L = −ln 4 + ln(16 + 4) = ln 5.
    """
    logits = torch.tensor([[1.0, 4.0, 9.0]], dtype=torch.float64).log()
    labels, counts = torch.tensor([1]), torch.tensor([16, 1, 0])
    assert restricted_softmax(logits, labels, counts, alpha=0.5).item() == pytest.approx(math.log(2), abs=1e-14)
    found = calibrated_softmax(logits, labels, counts, tau=2 * math.log(2)).item()
    assert found == pytest.approx(math.log(3 / 2), abs=1e-14)
    assert balanced_softmax(logits, labels, counts).item() == pytest.approx(math.log(5), abs=1e-14)


@pytest.mark.parametrize("alpha", [0.0, 0.3, 0.9])
def test_fedrs_is_cross_entropy_on_scaled_logits(alpha: float) -> None:
    """α_c = 1 for present classes, α for absent ones; the label 2 is absent, and is scaled as well."""
    logits, labels = example([0, 1, 2, 3, 4])
    scaled = logits * torch.tensor([1, 1, alpha, 1, 1, alpha], dtype=torch.float64)
    expected = torch.nn.functional.cross_entropy(scaled, labels, reduction="none")
    torch.testing.assert_close(
        restricted_softmax(logits, labels, COUNTS, alpha=alpha), expected, rtol=1e-13, atol=1e-14
    )


def test_fedrs_with_alpha_1_or_with_every_class_is_cross_entropy() -> None:
    logits, labels = example()
    assert torch.equal(restricted_softmax(logits, labels, COUNTS, alpha=1.0), cross_entropy(logits, labels, COUNTS))
    whole = restricted_softmax(logits, labels, EVERYTHING, alpha=0.2)
    assert torch.equal(whole, cross_entropy(logits, labels, EVERYTHING))


@pytest.mark.parametrize("tau", [0.0, 0.5, 3.0])
def test_fedlc_is_cross_entropy_on_shifted_logits_of_the_present_classes(tau: float) -> None:
    """Numerator and denominator are both shifted by −τ·n_c^(−1/4)."""
    logits, labels = example()
    present = [0, 1, 3, 4]
    shifted = logits.numpy()[:, present] - tau * np.array([5, 1, 2, 16]) ** -0.25
    at = np.array([0, 1, 2, 3, 3])
    expected = np.log(np.exp(shifted).sum(1)) - shifted[np.arange(5), at]
    np.testing.assert_allclose(calibrated_softmax(logits, labels, COUNTS, tau=tau), expected, rtol=1e-12, atol=1e-14)


def test_fedlc_with_tau_0_is_tce_and_cross_entropy_when_every_class_is_present() -> None:
    logits, labels = example()
    assert torch.equal(calibrated_softmax(logits, labels, COUNTS, tau=0.0), truncated_softmax(logits, labels, COUNTS))
    whole = calibrated_softmax(logits, labels, EVERYTHING, tau=0.0)
    assert torch.equal(whole, cross_entropy(logits, labels, EVERYTHING))
    assert not torch.allclose(calibrated_softmax(logits, labels, EVERYTHING, tau=1.0), whole, rtol=1e-3)


def test_fedlc_with_equal_counts_is_cross_entropy_for_every_tau() -> None:
    """A shift that is the same for every class cancels."""
    logits, labels = example()
    counts = torch.full((6,), 81)
    expected = cross_entropy(logits, labels, counts)
    torch.testing.assert_close(calibrated_softmax(logits, labels, counts, tau=2.0), expected, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("counts", [COUNTS, EVERYTHING, torch.tensor([1, 0, 0, 0, 1000000, 0])])
def test_balanced_softmax_has_the_gradient_of_wsm(counts: Tensor) -> None:
    """balanced − WSM = log Σ_c n_c − log n_y: a constant for each label, so the same gradient."""
    logits, labels = example([0, 4, 4, 0, 4])
    torch.testing.assert_close(
        gradient(balanced_softmax, logits, labels, counts),
        gradient(weighted_softmax, logits, labels, counts),
        rtol=1e-12,
        atol=1e-15,
    )
    difference = balanced_softmax(logits, labels, counts) - weighted_softmax(logits, labels, counts)
    expected = (counts.sum().double() / counts[labels]).log()
    torch.testing.assert_close(difference, expected, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("loss", [calibrated_softmax, balanced_softmax])
def test_absent_classes_get_exactly_zero_gradient_even_at_extreme_logits(loss) -> None:
    logits = torch.tensor([[3.0, 1e4, -1e4, 0.5], [0.1, -80.0, 90.0, 0.0]])
    labels, counts = torch.tensor([0, 3]), torch.tensor([2, 0, 0, 5])
    g = gradient(loss, logits, labels, counts)
    assert torch.equal(g[:, 1:3], torch.zeros(2, 2))
    assert g.isfinite().all()
    assert loss(logits, labels, counts).isfinite().all()


@pytest.mark.parametrize("loss", [restricted_softmax, calibrated_softmax, balanced_softmax])
def test_a_label_that_the_client_does_not_hold_has_a_finite_loss_and_gradient(loss) -> None:
    logits, labels = example([2, 5, 2, 5, 2])
    assert loss(logits, labels, COUNTS).isfinite().all()
    assert gradient(loss, logits, labels, COUNTS).isfinite().all()


@pytest.mark.parametrize("loss", [restricted_softmax, calibrated_softmax, balanced_softmax])
def test_all_zero_counts_are_an_error(loss) -> None:
    logits, labels = example()
    with pytest.raises(DataError, match="all class counts are zero"):
        loss(logits, labels, torch.zeros(6, dtype=torch.int64))


@pytest.mark.parametrize(
    ("loss", "key"),
    [
        ({"name": "fedrs", "alpha": 1.1}, r"loss\.alpha"),
        ({"name": "fedrs", "alpha": -0.1}, r"loss\.alpha"),
        ({"name": "fedlc", "tau": -1}, r"loss\.tau"),
        ({"name": "fedlc", "tau": float("nan")}, r"loss\.tau"),
        ({"name": "balanced", "tau": 1}, "balanced|loss"),
    ],
)
def test_hyper_parameters_out_of_range_are_refused(loss: dict, key: str) -> None:
    with pytest.raises(ConfigError, match=key):
        make_experiment({"loss": loss})
