from __future__ import annotations

import pytest
import torch
from torch import nn

from fedretain.models.shallow_resnet import ShallowResNet

pytestmark = pytest.mark.usefixtures("seeded")


def test_parameter_count() -> None:
    """Widths 64, 128, 256, 512; convolutions without bias, 2 parameters per normalised channel.

    stem 9·3·64 + 128 = 1,856.
    Block 1: 2·9·64·64 + 2·128 = 73,984.
    Block 2: 9·64·128 + 9·128·128 + 2·256 = 221,696; shortcut 64·128 + 256 = 8,448.
    Block 3: 9·128·256 + 9·256·256 + 2·512 = 885,760; shortcut 128·256 + 512 = 33,280.
    Block 4: 9·256·512 + 9·512·512 + 2·1,024 = 3,540,992; shortcut 256·512 + 1,024 = 132,096.
    fc 5,130. Together 4,903,242.
    """
    with torch.device("meta"):
        model = ShallowResNet((3, 32, 32), 10)
    assert sum(p.numel() for p in model.parameters()) == 4_903_242


def test_four_blocks_of_two_3x3_convolutions_three_with_1x1_shortcuts() -> None:
    model = ShallowResNet((3, 32, 32), 10, width=2)
    assert len(model.blocks) == 4
    assert [isinstance(block.shortcut, nn.Identity) for block in model.blocks] == [True, False, False, False]
    kernels = [m.kernel_size for m in model.modules() if isinstance(m, nn.Conv2d)]
    assert (kernels.count((3, 3)), kernels.count((1, 1))) == (1 + 4 * 2, 3)
    assert sum(isinstance(m, nn.BatchNorm2d) for m in model.modules()) == len(kernels)
    assert model.blocks(torch.zeros(2, 2, 32, 32)).shape == (2, 16, 4, 4)
