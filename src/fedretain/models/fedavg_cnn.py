"""The MNIST network of the FedAvg paper."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from fedretain.models.inputs import Shape, check_task


class FedAvgCNN(nn.Module):
    """FedAvg's MNIST network: two 5×5 convolutions and two fully connected layers.

    conv 32@5×5, ReLU, pool 2, conv 64@5×5, ReLU, pool 2, fc 512, ReLU, fc classes, with padding 2 so that
    only the pools shrink the maps (28 → 14 → 7); this gives the paper's 1,663,370 parameters.

    McMahan et al. 2017, Communication-efficient learning of deep networks from decentralized data, §3.
    """

    def __init__(self, shape: Shape, classes: int) -> None:
        super().__init__()
        check_task("fedavg_cnn", shape, classes, smallest=4)
        channels, height, width = shape
        self.conv1 = nn.Conv2d(channels, 32, kernel_size=5, padding=2)
        self.conv2 = nn.Conv2d(32, 64, kernel_size=5, padding=2)
        self.fc = nn.Linear(64 * (height // 4) * (width // 4), 512)
        self.classifier = nn.Linear(512, classes)

    def forward(self, images: Tensor) -> Tensor:
        """Logits [B, classes] of images [B, C, H, W]."""
        # ReLU and maximum commute, and after pooling there is a quarter of it to do.
        maps = F.max_pool2d(self.conv1(images), 2).relu()
        maps = F.max_pool2d(self.conv2(maps), 2).relu()
        features = self.fc(maps.flatten(1)).relu()
        logits: Tensor = self.classifier(features)
        return logits
