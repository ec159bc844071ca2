"""Vision transformer."""

from __future__ import annotations

from math import sqrt

import torch
import torch.nn.functional as F
from pydantic import PositiveFloat, PositiveInt
from torch import Tensor, nn

from fedretain.errors import ConfigError
from fedretain.models.inputs import Shape, check_task
from fedretain.models.vit_checkpoint import ViTSizes, read_checkpoint


class TransformerBlock(nn.Module):
    """Pre-norm encoder block: z ← z + attention(LN(z)); z ← z + W₂ gelu(W₁ LN(z)).

    Attention of head h is softmax(q_h k_hᵀ / √d) v_h, d = dim / heads. It is written out because
    PyTorch's fused kernels have no second derivative, which gradient-inversion attacks need.

    Dosovitskiy et al. 2021, An image is worth 16×16 words, §3.1 and Appendix A.
    """

    def __init__(self, sizes: ViTSizes) -> None:
        super().__init__()
        self.heads = sizes.heads
        self.norm_attention = nn.LayerNorm(sizes.dim, eps=sizes.eps)
        self.qkv = nn.Linear(sizes.dim, 3 * sizes.dim)
        self.project = nn.Linear(sizes.dim, sizes.dim)
        self.norm_mlp = nn.LayerNorm(sizes.dim, eps=sizes.eps)
        self.expand = nn.Linear(sizes.dim, sizes.hidden)
        self.contract = nn.Linear(sizes.hidden, sizes.dim)

    def attend(self, tokens: Tensor) -> Tensor:
        """Multi-head self-attention of tokens [B, T, dim]."""
        batch, length, dim = tokens.shape
        qkv = self.qkv(tokens).reshape(batch, length, 3, self.heads, dim // self.heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        attention = (query @ key.transpose(-2, -1) / sqrt(dim // self.heads)).softmax(-1)
        heads = (attention @ value).transpose(1, 2).reshape(batch, length, dim)
        output: Tensor = self.project(heads)
        return output

    def forward(self, tokens: Tensor) -> Tensor:
        """Tokens [B, T, dim] of tokens [B, T, dim]."""
        tokens = tokens + self.attend(self.norm_attention(tokens))
        output: Tensor = tokens + self.contract(F.gelu(self.expand(self.norm_mlp(tokens))))
        return output


class ViT(nn.Module):
    """Vision transformer with a class token, small enough to train from scratch, or pretrained.

    z = [class, E·patch₁, …, E·patch_N] + positions; ``depth`` pre-norm blocks; logits = W LN(z)₀ + b.
    Learned positions, GELU, no dropout. ``resize`` scales the inputs to that height and width (bilinear)
    before they are cut into patches.

    ``pretrained`` is a folder or ``.safetensors`` file with ``config.json`` beside it, or an id on the
    Hugging Face hub such as ``google/vit-base-patch16-224-in21k``. All sizes (``patch``, ``dim``,
    ``depth``, ``heads``, ``mlp_ratio``) then come from the checkpoint, inputs are resized to its image
    size (or ``resize``, with the position embeddings interpolated to the new grid), grey images are
    repeated over its colour channels, and the classifier starts fresh. Normalise the data as the
    checkpoint expects it, commonly (x − 0.5) / 0.5.

    Dosovitskiy et al. 2021, An image is worth 16×16 words, §3; fine-tuned by Xu et al. 2022 (FedReg) §4.1.
    """

    def __init__(
        self,
        shape: Shape,
        classes: int,
        *,
        patch: PositiveInt = 4,
        dim: PositiveInt = 192,
        depth: PositiveInt = 6,
        heads: PositiveInt = 3,
        mlp_ratio: PositiveFloat = 4.0,
        resize: PositiveInt | None = None,
        pretrained: str | None = None,
    ) -> None:
        super().__init__()
        checkpoint = None if pretrained is None else read_checkpoint(pretrained)
        if checkpoint is None:
            sizes = ViTSizes(shape[0], patch, dim, depth, heads, hidden=round(dim * mlp_ratio), eps=1e-6)
        else:
            sizes = checkpoint.sizes
            resize = resize or checkpoint.image_size
        check_task("vit", shape, classes, smallest=2 if resize else sizes.patch)
        self.image_size = (resize, resize) if resize else (shape[1], shape[2])
        self._check_sizes(sizes, shape)
        self.channels = sizes.channels
        # Plain bilinear sampling skips pixels when it shrinks an image; enlarging needs no such filter.
        self.antialias = self.image_size[0] < shape[1] or self.image_size[1] < shape[2]
        rows, columns = (side // sizes.patch for side in self.image_size)
        self.embed = nn.Conv2d(sizes.channels, sizes.dim, kernel_size=sizes.patch, stride=sizes.patch)
        self.class_token = nn.Parameter(torch.zeros(1, 1, sizes.dim))
        self.positions = nn.Parameter(torch.zeros(1, 1 + rows * columns, sizes.dim))
        self.blocks = nn.Sequential(*(TransformerBlock(sizes) for _ in range(sizes.depth)))
        self.norm = nn.LayerNorm(sizes.dim, eps=sizes.eps)
        self.classifier = nn.Linear(sizes.dim, classes)
        self._initialise()
        if checkpoint is not None:
            checkpoint.load_into(self, rows, columns)

    def _check_sizes(self, sizes: ViTSizes, shape: Shape) -> None:
        if any(side % sizes.patch for side in self.image_size):
            raise ConfigError(
                f"model 'vit': patch = {sizes.patch} does not divide the image size {self.image_size}; "
                f"choose a patch that does, or resize to a multiple of {sizes.patch}"
            )
        if sizes.dim % sizes.heads:
            raise ConfigError(
                f"model 'vit': heads = {sizes.heads} does not divide dim = {sizes.dim}; choose a divisor of dim"
            )
        if shape[0] not in (1, sizes.channels):
            raise ConfigError(
                f"model 'vit': the pretrained weights take {sizes.channels} channels, the data has "
                f"{shape[0]}; use images with {sizes.channels} channels or grey ones"
            )

    def _initialise(self) -> None:
        """Weights, class token and positions ~ N(0, 0.02²) cut at ±2, biases 0."""
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Conv2d):
                nn.init.trunc_normal_(module.weight, std=0.02)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
        nn.init.trunc_normal_(self.class_token, std=0.02)
        nn.init.trunc_normal_(self.positions, std=0.02)

    def forward(self, images: Tensor) -> Tensor:
        """Logits [B, classes] of images [B, C, H, W]."""
        images = images.expand(-1, self.channels, -1, -1)
        if images.shape[-2:] != self.image_size:
            images = F.interpolate(
                images, size=self.image_size, mode="bilinear", align_corners=False, antialias=self.antialias
            )
        patches = self.embed(images).flatten(2).transpose(1, 2)
        class_tokens = self.class_token.expand(patches.shape[0], -1, -1)
        tokens = torch.cat((class_tokens, patches), dim=1) + self.positions
        features = self.norm(self.blocks(tokens))[:, 0]
        logits: Tensor = self.classifier(features)
        return logits
