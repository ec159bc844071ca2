from __future__ import annotations

import pytest
import torch
from torch import nn

from fedretain.models.fedavg_cnn import FedAvgCNN

pytestmark = pytest.mark.usefixtures("seeded")


def test_parameter_count_of_the_paper() -> None:
    """McMahan et al. 2017 give 1,663,370.

    conv 32·25 + 32 = 832; 64·32·25 + 64 = 51,264; fc 64·7·7·512 + 512 = 1,606,144; 512·10 + 10 = 5,130.
    """
    assert sum(p.numel() for p in FedAvgCNN((1, 28, 28), 10).parameters()) == 1_663_370


def test_layers_in_order() -> None:
    model = FedAvgCNN((3, 10, 9), 10)
    sequence = nn.Sequential(
        nn.Conv2d(3, 32, 5, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 5, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(64 * 2 * 2, 512),
        nn.ReLU(),
        nn.Linear(512, 10),
    )
    for ours, theirs in zip(model.parameters(), sequence.parameters(), strict=True):
        theirs.data.copy_(ours.data)
    images = torch.randn(2, 3, 10, 9, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(model(images), sequence(images))
