"""The five-layer network of FedReg's MNIST and EMNIST experiments."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from fedretain.models.inputs import Shape, check_task


class CNN(nn.Module):
    """FedReg's MNIST network: three 5×5 convolutions and two fully connected layers.

    conv 32@5×5, ReLU, conv 32@5×5, pool 2, ReLU, conv 64@5×5, pool 2, ReLU, fc 256, ReLU, fc classes. No
    padding is needed: 28×28 shrinks to 24, 20, 10 (pool), 6, 3 (pool), so that fc 256 reads 64·3·3 = 576
    features and both pools divide their maps evenly; "same" padding would give 64·7·7 and five times as
    many weights there.

    Xu et al. 2022, Acceleration of federated learning with alleviated forgetting in local training, §4.1.
    """

    def __init__(self, shape: Shape, classes: int) -> None:
        super().__init__()
        check_task("cnn", shape, classes, smallest=20)
        channels, height, width = shape
        self.conv1 = nn.Conv2d(channels, 32, kernel_size=5)
        self.conv2 = nn.Conv2d(32, 32, kernel_size=5)
        self.conv3 = nn.Conv2d(32, 64, kernel_size=5)
        rows, columns = (((side - 8) // 2 - 4) // 2 for side in (height, width))
        self.fc = nn.Linear(64 * rows * columns, 256)
        self.classifier = nn.Linear(256, classes)

    def forward(self, images: Tensor) -> Tensor:
        """Logits [B, classes] of images [B, C, H, W]."""
        maps = self.conv1(images).relu()
        maps = F.max_pool2d(self.conv2(maps), 2).relu()
        maps = F.max_pool2d(self.conv3(maps), 2).relu()
        features = self.fc(maps.flatten(1)).relu()
        logits: Tensor = self.classifier(features)
        return logits
