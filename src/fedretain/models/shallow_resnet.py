"""The shallow ResNet of the FedWAvg experiments."""

from __future__ import annotations

from pydantic import PositiveInt
from torch import Tensor, nn

from fedretain.models.inputs import Shape, check_task
from fedretain.models.norm import norm_layer
from fedretain.models.residual import ResidualBlock


class ShallowResNet(nn.Module):
    """FedWAvg's network: four residual blocks with batch norm, average pooling, one fully connected layer.

    The paper gives neither widths nor a stem. Four blocks of which three have a 1×1 shortcut are ResNet's
    four stages with one block each, ``width`` · (1, 2, 4, 8) channels at strides 1, 2, 2, 2; the first
    block can only have an identity shortcut if its input already has ``width`` channels, hence the 3×3
    stem (ten weight layers on the longest path; "ResNet-10").

    Hong, Kang & Lee 2022, Weighted averaging federated learning based on example forgetting events, §3.3.
    PyTorch's default initialisation.
    """

    def __init__(self, shape: Shape, classes: int, *, width: PositiveInt = 64) -> None:
        super().__init__()
        check_task("shallow_resnet", shape, classes, smallest=8)
        self.conv = nn.Conv2d(shape[0], width, kernel_size=3, padding=1, bias=False)
        self.norm = norm_layer("batch", width, groups=1)
        stages = (
            (width, width, 1),
            (width, 2 * width, 2),
            (2 * width, 4 * width, 2),
            (4 * width, 8 * width, 2),
        )
        self.blocks = nn.Sequential(
            *(
                ResidualBlock(inputs, outputs, stride=stride, first="batch", second="batch", groups=1)
                for inputs, outputs, stride in stages
            )
        )
        self.classifier = nn.Linear(8 * width, classes)

    def forward(self, images: Tensor) -> Tensor:
        """Logits [B, classes] of images [B, C, H, W]."""
        maps = self.blocks(self.norm(self.conv(images)).relu())
        logits: Tensor = self.classifier(maps.mean((2, 3)))
        return logits
