"""DenseNet-121."""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from pydantic import PositiveInt
from torch import Tensor, nn

from fedretain.errors import ConfigError
from fedretain.models.inputs import Shape, check_task
from fedretain.models.norm import Norm, norm_layer

LAYERS_PER_BLOCK = (6, 12, 24, 16)
BOTTLENECK = 4


class DenseLayer(nn.Module):
    """Appends ``growth`` feature maps: y = [x, conv3×3(relu(norm(conv1×1(relu(norm(x))))))]."""

    def __init__(self, inputs: int, growth: int, *, norm: Norm, groups: int) -> None:
        super().__init__()
        self.norm1 = norm_layer(norm, inputs, groups)
        self.conv1 = nn.Conv2d(inputs, BOTTLENECK * growth, kernel_size=1, bias=False)
        self.norm2 = norm_layer(norm, BOTTLENECK * growth, groups)
        self.conv2 = nn.Conv2d(BOTTLENECK * growth, growth, kernel_size=3, padding=1, bias=False)

    def forward(self, maps: Tensor) -> Tensor:
        """Feature maps [B, inputs + growth, H, W] of feature maps [B, inputs, H, W]."""
        new = self.conv1(self.norm1(maps).relu())
        new = self.conv2(self.norm2(new).relu())
        return torch.cat((maps, new), dim=1)


class Transition(nn.Module):
    """Halves channels and resolution: y = avgpool2(conv1×1(relu(norm(x))))."""

    def __init__(self, inputs: int, *, norm: Norm, groups: int) -> None:
        super().__init__()
        self.norm = norm_layer(norm, inputs, groups)
        self.conv = nn.Conv2d(inputs, inputs // 2, kernel_size=1, bias=False)

    def forward(self, maps: Tensor) -> Tensor:
        """Feature maps [B, inputs/2, ⌊H/2⌋, ⌊W/2⌋] of feature maps [B, inputs, H, W]."""
        return F.avg_pool2d(self.conv(self.norm(maps).relu()), 2)


class DenseNet121(nn.Module):
    """DenseNet-121 (dense blocks of 6, 12, 24 and 16 layers) with batch or group norm.

    Stem with 2·``growth`` channels: conv 7×7 at stride 2, norm, ReLU and max-pool 3 at stride 2 for
    images of 64 pixels and more, conv 3×3 alone for smaller ones (the paper's ImageNet and CIFAR stems);
    four dense blocks with 1×1 bottlenecks of 4·``growth`` channels and halving transitions between them;
    norm, ReLU, global average pooling, one fully connected layer. Every normalised layer has a multiple
    of ``growth`` channels (2, 3, … growth, halved from 8, 16 and 32 to 4, 8 and 16 growth), so ``groups``
    must divide ``growth``.

    Huang et al. 2017, Densely connected convolutional networks, §3 and Table 1; group norm as in Xu et
    al. 2022 (FedReg) B.2, where local batches are too small for batch norm. He's initialisation, as in
    the paper.
    """

    def __init__(
        self,
        shape: Shape,
        classes: int,
        *,
        norm: Literal["batch", "group"] = "batch",
        groups: PositiveInt = 32,
        growth: PositiveInt = 32,
    ) -> None:
        super().__init__()
        check_task("densenet121", shape, classes, smallest=8)
        if norm == "group" and growth % groups:
            raise ConfigError(
                f"model 'densenet121': groups = {groups} is not allowed with growth = {growth}; "
                "every layer has a multiple of growth channels, so choose groups that divide growth"
            )
        channels = 2 * growth
        self.large = min(shape[1:]) >= 64
        if self.large:
            self.conv = nn.Conv2d(shape[0], channels, kernel_size=7, stride=2, padding=3, bias=False)
            self.stem_norm = norm_layer(norm, channels, groups)
        else:
            self.conv = nn.Conv2d(shape[0], channels, kernel_size=3, padding=1, bias=False)
        stages: list[nn.Module] = []
        for block, layers in enumerate(LAYERS_PER_BLOCK):
            if block > 0:
                stages.append(Transition(channels, norm=norm, groups=groups))
                channels //= 2
            stages.append(
                nn.Sequential(
                    *(
                        DenseLayer(channels + layer * growth, growth, norm=norm, groups=groups)
                        for layer in range(layers)
                    )
                )
            )
            channels += layers * growth
        self.stages = nn.Sequential(*stages)
        self.norm = norm_layer(norm, channels, groups)
        self.classifier = nn.Linear(channels, classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight)
        nn.init.zeros_(self.classifier.bias)

    def forward(self, images: Tensor) -> Tensor:
        """Logits [B, classes] of images [B, C, H, W]."""
        maps = self.conv(images)
        if self.large:
            maps = F.max_pool2d(self.stem_norm(maps).relu(), 3, stride=2, padding=1)
        maps = self.norm(self.stages(maps)).relu()
        logits: Tensor = self.classifier(maps.mean((2, 3)))
        return logits
