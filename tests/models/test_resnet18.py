from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedretain.errors import ConfigError
from fedretain.models.resnet18 import ResNet18

pytestmark = pytest.mark.usefixtures("seeded")


def count(**hyper: object) -> int:
    with torch.device("meta"):
        return sum(p.numel() for p in ResNet18((3, 32, 32), 10, **hyper).parameters())  # type: ignore[arg-type]


@pytest.mark.parametrize("norm", ["batch", "group", "layer"])
def test_parameter_count(norm: str) -> None:
    """Width 64, convolutions without bias, 2 parameters per normalised channel.

    stem 9·3·64 + 128 = 1,856.
    Stage 1: 4 convs 9·64·64 = 36,864 and 4 norms of 128: 147,968.
    Stage 2: 9·64·128 + 3·9·128·128 = 516,096; 4 norms of 256; shortcut 64·128 + 256: 525,568.
    Stage 3: 9·128·256 + 3·9·256·256 = 2,064,384; 4 norms of 512; shortcut 128·256 + 512: 2,099,712.
    Stage 4: 9·256·512 + 3·9·512·512 = 8,257,536; 4 norms of 1,024; shortcut 256·512 + 1,024: 8,393,728.
    fc 512·10 + 10 = 5,130. Together 11,173,962.
    """
    assert count(norm=norm) == 11_173_962


def test_parameter_count_of_the_thesis() -> None:
    """As above plus one bias per convolution channel, all convolutions having one.

    stem 64; stage 1: 4·64 = 256; stages 2, 3, 4 with their shortcut: 5·128 + 5·256 + 5·512 = 4,480.
    Together 4,800, and 11,173,962 + 4,800 = 11,178,762.
    """
    assert count(norm="mixed") == 11_178_762


def test_mixed_norms_stand_as_in_appendix_b() -> None:
    """Batch norm after the stem and first in a block; GroupNorm(2, ·) second and in the shortcut; biases."""
    model = ResNet18((3, 32, 32), 10, norm="mixed", width=4)
    assert isinstance(model.norm, nn.BatchNorm2d)
    widths = [4, 4, 8, 8, 16, 16, 32, 32]
    for index, (block, width) in enumerate(zip(model.blocks, widths, strict=True)):
        assert isinstance(block.norm1, nn.BatchNorm2d)
        norms = [block.norm2]
        if index in (2, 4, 6):
            assert block.conv1.stride == (2, 2)
            norms.append(block.shortcut[1])
        else:
            assert isinstance(block.shortcut, nn.Identity)
        assert [(type(n), n.num_groups, n.num_channels) for n in norms] == [(nn.GroupNorm, 2, width)] * len(norms)
    assert all(m.bias is not None for m in model.modules() if isinstance(m, nn.Conv2d))


@pytest.mark.parametrize(("norm", "groups"), [("group", 2), ("layer", 1)])
def test_group_and_layer_norm_are_everywhere(norm: str, groups: int) -> None:
    """1 stem + 2 in each of 8 blocks + 3 shortcuts = 20 norms; no running statistics."""
    model = ResNet18((3, 32, 32), 10, norm=norm, width=4)  # type: ignore[arg-type]
    norms = [m for m in model.modules() if isinstance(m, nn.GroupNorm)]
    assert [n.num_groups for n in norms] == [groups] * 20
    assert list(model.buffers()) == []


def last_maps(model: ResNet18, images: Tensor) -> Tensor:
    return model.blocks(model.norm(model.conv(images)).relu())  # type: ignore[no-any-return]


@pytest.mark.parametrize("side", [28, 32])
def test_the_thesis_pools_the_first_3x3_of_the_last_4x4_map(side: int) -> None:
    """AvgPool2d(3, stride 2) fits once into 4×4, at the top left."""
    model = ResNet18((3, side, side), 10, norm="mixed", width=4).eval()
    images = torch.randn(2, 3, side, side, generator=torch.Generator().manual_seed(0))
    maps = last_maps(model, images)
    assert maps.shape[2:] == (4, 4)
    expected = F.linear(maps[:, :, :3, :3].mean((2, 3)), model.classifier.weight, model.classifier.bias)
    torch.testing.assert_close(model(images), expected)


@pytest.mark.parametrize(("norm", "side"), [("mixed", 8), ("mixed", 48), ("batch", 32)])
def test_elsewhere_the_whole_map_is_averaged(norm: str, side: int) -> None:
    model = ResNet18((3, side, side), 10, norm=norm, width=4).eval()  # type: ignore[arg-type]
    images = torch.randn(2, 3, side, side, generator=torch.Generator().manual_seed(0))
    expected = F.linear(last_maps(model, images).mean((2, 3)), model.classifier.weight, model.classifier.bias)
    torch.testing.assert_close(model(images), expected)


def test_groups_must_divide_the_width() -> None:
    with pytest.raises(ConfigError, match="groups = 3 is not allowed: a layer has 64 channels"):
        ResNet18((3, 32, 32), 10, norm="group", groups=3)
