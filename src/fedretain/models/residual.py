"""The residual block shared by the ResNets with normalisation layers."""

from __future__ import annotations

from torch import Tensor, nn

from fedretain.models.norm import Norm, norm_layer


class ResidualBlock(nn.Module):
    """Two 3×3 convolutions, each with a normalisation, around a shortcut.

    y = max(0, norm₂(conv₂(max(0, norm₁(conv₁(x))))) + s(x)); s is the identity, or a 1×1 convolution with a
    normalisation where the number of channels or the resolution changes.

    He et al. 2016, Deep residual learning for image recognition, §3.3 (option B).
    """

    def __init__(
        self,
        inputs: int,
        outputs: int,
        *,
        stride: int,
        first: Norm,
        second: Norm,
        groups: int,
        bias: bool = False,
    ) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, kernel_size=3, stride=stride, padding=1, bias=bias)
        self.norm1 = norm_layer(first, outputs, groups)
        self.conv2 = nn.Conv2d(outputs, outputs, kernel_size=3, padding=1, bias=bias)
        self.norm2 = norm_layer(second, outputs, groups)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(
                nn.Conv2d(inputs, outputs, kernel_size=1, stride=stride, bias=bias),
                norm_layer(second, outputs, groups),
            )

    def forward(self, maps: Tensor) -> Tensor:
        """Feature maps [B, outputs, ⌈H/stride⌉, ⌈W/stride⌉] of feature maps [B, inputs, H, W]."""
        branch = self.norm1(self.conv1(maps)).relu()
        branch = self.norm2(self.conv2(branch))
        output: Tensor = (branch + self.shortcut(maps)).relu()
        return output
