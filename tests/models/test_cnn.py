from __future__ import annotations

import pytest
import torch
from torch import nn

from fedretain.models.cnn import CNN

pytestmark = pytest.mark.usefixtures("seeded")


def test_parameter_count() -> None:
    """28 shrinks to 24, 20, 10 (pool), 6, 3 (pool): 64·3·3 = 576 features.

    conv 32·25 + 32 = 832; 32·32·25 + 32 = 25,632; 64·32·25 + 64 = 51,264; fc 576·256 + 256 = 147,712;
    256·10 + 10 = 2,570. Together 228,010.
    """
    assert sum(p.numel() for p in CNN((1, 28, 28), 10).parameters()) == 228_010


def test_layers_in_order() -> None:
    """conv 32@5, ReLU, conv 32@5, pool, ReLU, conv 64@5, pool, ReLU, fc 256, ReLU, fc 10."""
    model = CNN((1, 28, 28), 10)
    sequence = nn.Sequential(
        nn.Conv2d(1, 32, 5),
        nn.ReLU(),
        nn.Conv2d(32, 32, 5),
        nn.MaxPool2d(2),
        nn.ReLU(),
        nn.Conv2d(32, 64, 5),
        nn.MaxPool2d(2),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(576, 256),
        nn.ReLU(),
        nn.Linear(256, 10),
    )
    for ours, theirs in zip(model.parameters(), sequence.parameters(), strict=True):
        theirs.data.copy_(ours.data)
    images = torch.randn(2, 1, 28, 28, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(model(images), sequence(images))


def test_other_sizes() -> None:
    assert CNN((3, 32, 40), 10)(torch.zeros(2, 3, 32, 40)).shape == (2, 10)
