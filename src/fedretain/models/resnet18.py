"""ResNet-18 for small images."""

from __future__ import annotations

from typing import Literal

import torch.nn.functional as F
from pydantic import PositiveInt
from torch import Tensor, nn

from fedretain.models.inputs import Shape, check_task
from fedretain.models.norm import Norm, norm_layer
from fedretain.models.residual import ResidualBlock


class ResNet18(nn.Module):
    """ResNet-18 with a 3×3 stem, for images of about 32×32 pixels.

    Stem conv 3×3 (stride 1, no pooling), four stages of two residual blocks with ``width`` · (1, 2, 4, 8)
    channels at strides 1, 2, 2, 2, average pooling, one fully connected layer. ``norm``:

    - ``batch``, ``group`` (``groups`` groups), ``layer`` (one group): the same layer everywhere, convolutions
      without bias, global average pooling (Legate, Caccia & Belilovsky 2023, weighted softmax, §4);
    - ``mixed``: Legate's thesis, Appendix B: batch norm after the stem and the first convolution of a
      block, group norm after the second and in the shortcut, convolutions with bias, and AvgPool2d(3,
      stride 2), which reads the first 3×3 pixels of the last 4×4 map. For inputs whose last map is not
      4×4 that window would either not fit or leave several pixels, so the whole map is averaged there.

    He et al. 2016, Deep residual learning for image recognition. PyTorch's default initialisation.
    """

    def __init__(
        self,
        shape: Shape,
        classes: int,
        *,
        norm: Literal["batch", "group", "layer", "mixed"] = "batch",
        width: PositiveInt = 64,
        groups: PositiveInt = 2,
    ) -> None:
        super().__init__()
        check_task("resnet18", shape, classes, smallest=8)
        mixed = norm == "mixed"
        first: Norm = "batch" if norm == "mixed" else norm
        second: Norm = "group" if norm == "mixed" else norm
        self.conv = nn.Conv2d(shape[0], width, kernel_size=3, padding=1, bias=mixed)
        self.norm = norm_layer(first, width, groups)
        blocks: list[nn.Module] = []
        inputs = width
        for outputs, stride in ((width, 1), (2 * width, 2), (4 * width, 2), (8 * width, 2)):
            for step, channels in ((stride, inputs), (1, outputs)):
                blocks.append(
                    ResidualBlock(channels, outputs, stride=step, first=first, second=second, groups=groups, bias=mixed)
                )
            inputs = outputs
        self.blocks = nn.Sequential(*blocks)
        self.classifier = nn.Linear(inputs, classes)
        self.corner_pool = mixed and all(-(-side // 8) == 4 for side in shape[1:])

    def forward(self, images: Tensor) -> Tensor:
        """Logits [B, classes] of images [B, C, H, W]."""
        maps = self.blocks(self.norm(self.conv(images)).relu())
        features = F.avg_pool2d(maps, 3, stride=2).flatten(1) if self.corner_pool else maps.mean((2, 3))
        logits: Tensor = self.classifier(features)
        return logits
