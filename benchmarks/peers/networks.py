"""The networks of the works, written out for runners that have no fedretain; same parameter names, same outputs."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch.nn.functional as F
from torch import Tensor, nn


class FedAvgCNN(nn.Module):
    """The 1,663,370 parameters of FedAvg's MNIST network."""

    def __init__(self, shape: Sequence[int], classes: int) -> None:
        super().__init__()
        channels, height, width = shape
        self.conv1 = nn.Conv2d(channels, 32, 5, padding=2)
        self.conv2 = nn.Conv2d(32, 64, 5, padding=2)
        self.fc = nn.Linear(64 * (height // 4) * (width // 4), 512)
        self.classifier = nn.Linear(512, classes)

    def forward(self, images: Tensor) -> Tensor:
        """Logits."""
        maps = F.max_pool2d(F.relu(self.conv1(images)), 2)
        maps = F.max_pool2d(F.relu(self.conv2(maps)), 2)
        return self.classifier(F.relu(self.fc(maps.flatten(1))))


class LeNet(nn.Module):
    """LeNet-5 for 32 × 32 images, with ReLU and max-pooling."""

    def __init__(self, shape: Sequence[int], classes: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(shape[0], 6, 5)
        self.conv2 = nn.Conv2d(6, 16, 5)
        self.fc1 = nn.Linear(16 * 5 * 5, 120)
        self.fc2 = nn.Linear(120, 84)
        self.classifier = nn.Linear(84, classes)

    def forward(self, images: Tensor) -> Tensor:
        """Logits."""
        maps = F.max_pool2d(F.relu(self.conv1(images)), 2)
        maps = F.max_pool2d(F.relu(self.conv2(maps)), 2)
        return self.classifier(F.relu(self.fc2(F.relu(self.fc1(maps.flatten(1))))))


class MLP(nn.Module):
    """64-64-10."""

    def __init__(self, shape: Sequence[int], classes: int) -> None:
        super().__init__()
        self.hidden = nn.ModuleList([nn.Linear(shape[0] * shape[1] * shape[2], 64)])
        self.classifier = nn.Linear(64, classes)

    def forward(self, inputs: Tensor) -> Tensor:
        """Logits."""
        return self.classifier(F.relu(self.hidden[0](inputs.flatten(1))))


NETWORKS: dict[str, Callable[[Sequence[int], int], nn.Module]] = {"fedavg_cnn": FedAvgCNN, "lenet": LeNet, "mlp": MLP}
