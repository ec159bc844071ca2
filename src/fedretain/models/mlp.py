"""Multi-layer perceptron."""

from __future__ import annotations

from itertools import pairwise

from pydantic import PositiveInt
from torch import Tensor, nn

from fedretain.models.inputs import Shape, check_task


class MLP(nn.Module):
    """Fully connected layers with ReLU between them; takes images and feature vectors.

    h_0 = flatten(x), h_{i+1} = max(0, W_i h_i + b_i), logits = W h + b. An empty ``hidden`` is softmax
    regression.
    """

    def __init__(self, shape: Shape, classes: int, *, hidden: tuple[PositiveInt, ...] = (64,)) -> None:
        super().__init__()
        check_task("mlp", shape, classes)
        channels, height, width = shape
        widths = (channels * height * width, *hidden)
        self.hidden = nn.ModuleList(nn.Linear(inputs, outputs) for inputs, outputs in pairwise(widths))
        self.classifier = nn.Linear(widths[-1], classes)

    def forward(self, inputs: Tensor) -> Tensor:
        """Logits [B, classes] of inputs [B, C, H, W]."""
        features = inputs.flatten(1)
        for layer in self.hidden:
            features = layer(features).relu()
        logits: Tensor = self.classifier(features)
        return logits
