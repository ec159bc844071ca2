"""LeNet-5."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from fedretain.models.inputs import Shape, check_task


class LeNet(nn.Module):
    """LeNet-5 with ReLU and max-pooling, as used in federated CIFAR work.

    conv 6@5×5, pool 2, conv 16@5×5, pool 2, fc 120, fc 84, fc classes. Images below 32 pixels are padded
    by 2 in the first convolution: LeCun et al. centred the 28×28 digits in a 32×32 field, which is the
    same map.

    LeCun et al. 1998, Gradient-based learning applied to document recognition, §II.B;
    ReLU and max-pooling in place of the original squashing and subsampling.
    """

    def __init__(self, shape: Shape, classes: int) -> None:
        super().__init__()
        check_task("lenet", shape, classes, smallest=12)
        channels, height, width = shape
        padding = 2 if min(height, width) < 32 else 0
        self.conv1 = nn.Conv2d(channels, 6, kernel_size=5, padding=padding)
        self.conv2 = nn.Conv2d(6, 16, kernel_size=5)
        rows, columns = (((side + 2 * padding - 4) // 2 - 4) // 2 for side in (height, width))
        self.fc1 = nn.Linear(16 * rows * columns, 120)
        self.fc2 = nn.Linear(120, 84)
        self.classifier = nn.Linear(84, classes)

    def forward(self, images: Tensor) -> Tensor:
        """Logits [B, classes] of images [B, C, H, W]."""
        # ReLU and maximum commute, and after pooling there is a quarter of it to do.
        maps = F.max_pool2d(self.conv1(images), 2).relu()
        maps = F.max_pool2d(self.conv2(maps), 2).relu()
        features = self.fc1(maps.flatten(1)).relu()
        features = self.fc2(features).relu()
        logits: Tensor = self.classifier(features)
        return logits
