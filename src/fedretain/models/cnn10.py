"""The ten-layer network of FedReg's CT experiments."""

from __future__ import annotations

import torch.nn.functional as F
from pydantic import PositiveInt
from torch import Tensor, nn

from fedretain.models.inputs import Shape, check_task
from fedretain.models.norm import norm_layer


class CNN10(nn.Module):
    """FedReg's network for CT images: nine 3×3 convolutions and one fully connected layer.

    Convolutions with ``width`` · (1, 2, 2, 4, 4, 4, 4, 4, 4) channels and padding 1, each followed by
    ReLU; layer norm before the ReLU of the sixth and the eighth; max-pooling 3 after the sixth; one fully
    connected layer on all pixels that remain. The paper says no more than "9 layers of CNNs and one layer
    of FC" that stand in for DenseNet-121 in gradient-inversion attacks; the layout follows the authors'
    released experiments, which take width 128 on 128×128 images. The default is narrower, so that 256×256
    images fit on a small machine.

    Xu et al. 2022, Acceleration of federated learning with alleviated forgetting in local training, §4.5
    and B.4.
    """

    def __init__(self, shape: Shape, classes: int, *, width: PositiveInt = 32) -> None:
        super().__init__()
        check_task("cnn10", shape, classes, smallest=3)
        inputs, height, columns = shape
        convolutions: list[nn.Module] = []
        for outputs in (width, 2 * width, 2 * width, *[4 * width] * 6):
            convolutions.append(nn.Conv2d(inputs, outputs, kernel_size=3, padding=1))
            inputs = outputs
        self.convs = nn.ModuleList(convolutions)
        self.norm6 = norm_layer("layer", 4 * width, groups=1)
        self.norm8 = norm_layer("layer", 4 * width, groups=1)
        self.classifier = nn.Linear(4 * width * (height // 3) * (columns // 3), classes)

    def forward(self, images: Tensor) -> Tensor:
        """Logits [B, classes] of images [B, C, H, W]."""
        maps = images
        for layer, conv in enumerate(self.convs, start=1):
            maps = conv(maps)
            if layer == 6:
                maps = F.max_pool2d(self.norm6(maps).relu(), 3)
            elif layer == 8:
                maps = self.norm8(maps).relu()
            else:
                maps = maps.relu()
        logits: Tensor = self.classifier(maps.flatten(1))
        return logits
