"""ResNet-9 without normalisation layers (Fixup)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from pydantic import PositiveInt
from torch import Tensor, nn

from fedretain.models.inputs import Shape, check_task

RESIDUAL_BLOCKS = 2
CONVOLUTIONS_PER_BRANCH = 2


def _scalar(value: float) -> nn.Parameter:
    return nn.Parameter(torch.full((1,), value))


def _plus(maps: Tensor, bias: Tensor) -> Tensor:
    """Feature maps with a scalar added; in half precision they stay there, where a sum of both would be float32."""
    return maps + bias.to(maps.dtype)


def _conv3x3(inputs: int, outputs: int) -> nn.Conv2d:
    """A 3×3 convolution without bias; weights ~ N(0, 2 / (9 · outputs)), for ReLU (He et al. 2015).

    By the outputs, as in Fixup's experiments. By the inputs the features of a 32 × 32 image of normal pixels would have
    a squared norm of 6,400 in place of 38, and training with a rate of 0.1 (FedReg's on CIFAR-10) diverged at once.
    """
    conv = nn.Conv2d(inputs, outputs, kernel_size=3, padding=1, bias=False)
    nn.init.kaiming_normal_(conv.weight, mode="fan_out", nonlinearity="relu")
    return conv


class PlainLayer(nn.Module):
    """y = max(0, conv(x + a) + b) with scalars a, b that start at 0 (Fixup rule 3)."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.before_conv = _scalar(0.0)
        self.conv = _conv3x3(inputs, outputs)
        self.before_relu = _scalar(0.0)

    def forward(self, maps: Tensor) -> Tensor:
        """Feature maps [B, outputs, H, W] of feature maps [B, inputs, H, W]."""
        return _plus(self.conv(_plus(maps, self.before_conv)), self.before_relu).relu()


class FixupBlock(nn.Module):
    """y = max(0, x + scale · conv₂(max(0, conv₁(x + a) + b) + c) + d): at the start the identity for x ≥ 0.

    conv₂ starts at 0, conv₁ at He's values times L^(−1/(2m−2)), L residual blocks of m convolutions each;
    scale starts at 1, a, b, c, d at 0.

    Zhang, Dauphin & Ma 2019, Fixup initialization, §3.
    """

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.before_conv1 = _scalar(0.0)
        self.conv1 = _conv3x3(channels, channels)
        self.before_relu1 = _scalar(0.0)
        self.before_conv2 = _scalar(0.0)
        self.conv2 = _conv3x3(channels, channels)
        self.scale = _scalar(1.0)
        self.before_relu2 = _scalar(0.0)
        with torch.no_grad():
            self.conv1.weight.mul_(RESIDUAL_BLOCKS ** (-1 / (2 * CONVOLUTIONS_PER_BRANCH - 2)))
            self.conv2.weight.zero_()

    def forward(self, maps: Tensor) -> Tensor:
        """Feature maps of the same shape [B, channels, H, W]."""
        branch = _plus(self.conv1(_plus(maps, self.before_conv1)), self.before_relu1).relu()
        branch = self.conv2(_plus(branch, self.before_conv2))
        branch = _plus(branch * self.scale.to(branch.dtype), self.before_relu2)
        return (maps + branch).relu()


class ResNet9(nn.Module):
    """ResNet-9 with Fixup initialisation: no normalisation layers, logits exactly 0 at the start.

    The DAWNBench ResNet-9: conv ``width``; conv 2·``width``, pool 2, residual block; conv 4·``width``,
    pool 2; conv 8·``width``, pool 2, residual block; max over all pixels; one fully connected layer. In
    place of batch norm, Fixup's three rules: (1) the classifier and the last convolution of each residual
    branch start at 0, (2) the other convolutions of a branch start at He's values times L^(−1/(2m−2)) =
    2^(−1/2), (3) a scalar bias before every convolution, linear layer and ReLU and a scalar multiplier in
    every branch. The ReLU stands after the addition: DAWNBench has it at the end of the branch, where a
    branch that starts at 0 has no gradient.

    As the classifier starts at 0, the first step moves only the classifier; the rest follows from the
    second step.

    Zhang, Dauphin & Ma 2019, Fixup initialization, §3; used by Xu et al. 2022 (FedReg) §4.1.
    """

    def __init__(self, shape: Shape, classes: int, *, width: PositiveInt = 64) -> None:
        super().__init__()
        check_task("resnet9", shape, classes, smallest=8)
        self.stem = PlainLayer(shape[0], width)
        self.layer1 = PlainLayer(width, 2 * width)
        self.block1 = FixupBlock(2 * width)
        self.layer2 = PlainLayer(2 * width, 4 * width)
        self.layer3 = PlainLayer(4 * width, 8 * width)
        self.block3 = FixupBlock(8 * width)
        self.before_classifier = _scalar(0.0)
        self.classifier = nn.Linear(8 * width, classes)
        nn.init.zeros_(self.classifier.weight)
        nn.init.zeros_(self.classifier.bias)

    def forward(self, images: Tensor) -> Tensor:
        """Logits [B, classes] of images [B, C, H, W]."""
        maps = self.stem(images)
        maps = self.block1(F.max_pool2d(self.layer1(maps), 2))
        maps = F.max_pool2d(self.layer2(maps), 2)
        maps = self.block3(F.max_pool2d(self.layer3(maps), 2))
        features = F.max_pool2d(maps, (maps.shape[2], maps.shape[3])).flatten(1)
        logits: Tensor = self.classifier(features + self.before_classifier)
        return logits
