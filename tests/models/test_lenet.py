from __future__ import annotations

import pytest
import torch
from torch import nn

from fedretain.models.lenet import LeNet

pytestmark = pytest.mark.usefixtures("seeded")


@pytest.mark.parametrize(("shape", "count"), [((3, 32, 32), 62_006), ((1, 28, 28), 61_706)])
def test_parameter_count(shape: tuple[int, int, int], count: int) -> None:
    """Both shapes shrink to 28, 14 (pool), 10, 5 (pool): 16·5·5 = 400 features.

    conv1 6·25·C + 6 (456 for C = 3, 156 for C = 1); conv2 16·6·25 + 16 = 2,416; fc 400·120 + 120 = 48,120;
    120·84 + 84 = 10,164; 84·10 + 10 = 850. Together 62,006 and 61,706.
    """
    assert sum(p.numel() for p in LeNet(shape, 10).parameters()) == count


@pytest.mark.parametrize("side", [28, 32])
def test_layers_in_order(side: int) -> None:
    model = LeNet((1, side, side), 10)
    sequence = nn.Sequential(
        nn.ZeroPad2d((32 - side) // 2),  # LeCun's 28×28 digits stand in the middle of a 32×32 field
        nn.Conv2d(1, 6, 5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(6, 16, 5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(400, 120),
        nn.ReLU(),
        nn.Linear(120, 84),
        nn.ReLU(),
        nn.Linear(84, 10),
    )
    for ours, theirs in zip(model.parameters(), sequence.parameters(), strict=True):
        theirs.data.copy_(ours.data)
    images = torch.randn(2, 1, side, side, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(model(images), sequence(images))
