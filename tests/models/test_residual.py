from __future__ import annotations

import pytest
import torch
from torch import nn

from fedretain.models.residual import ResidualBlock

pytestmark = pytest.mark.usefixtures("seeded")


def block(inputs: int, outputs: int, stride: int) -> ResidualBlock:
    return ResidualBlock(inputs, outputs, stride=stride, first="batch", second="group", groups=2)


def test_identity_shortcut_passes_the_input_through() -> None:
    """With a zero gain after the second convolution the branch is 0, and y = max(0, x)."""
    same = block(4, 4, stride=1)
    nn.init.zeros_(same.get_parameter("norm2.weight"))
    maps = torch.randn(2, 4, 5, 5, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(same(maps), maps.relu())


def test_a_projection_stands_where_channels_or_resolution_change() -> None:
    assert isinstance(block(4, 4, stride=1).shortcut, nn.Identity)
    for changed in (block(4, 6, stride=1), block(4, 4, stride=2)):
        assert [type(layer) for layer in changed.shortcut.children()] == [nn.Conv2d, nn.GroupNorm]
    assert block(4, 6, stride=2)(torch.zeros(2, 4, 7, 5)).shape == (2, 6, 4, 3)
