from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from fedretain.errors import ConfigError
from fedretain.models.vit import TransformerBlock, ViT
from fedretain.models.vit_checkpoint import ViTSizes

pytestmark = pytest.mark.usefixtures("seeded")


def test_parameter_count() -> None:
    """Defaults on 3×32×32: 8·8 = 64 patches of 4·4·3 = 48 numbers, dim 192, hidden 768.

    Patches 48·192 + 192 = 9,408; class token 192; positions 65·192 = 12,480.
    Block: norms 2·384, qkv 192·576 + 576, projection 192·192 + 192, MLP 192·768 + 768 + 768·192 + 192:
    444,864, times 6 = 2,669,184. Norm 384; classifier 192·10 + 10 = 1,930. Together 2,693,578.
    """
    with torch.device("meta"):
        model = ViT((3, 32, 32), 10)
    assert sum(p.numel() for p in model.parameters()) == 2_693_578


def test_parameter_count_of_vit_base() -> None:
    """ViT-B/16 on 224×224 with 1000 classes has 86,567,656 parameters (Dosovitskiy et al.: 86 M).

    Patches 768·768 + 768 = 590,592; class token 768; positions 197·768 = 151,296; 12 blocks of 7,087,872;
    norm 1,536; classifier 769,000.
    """
    with torch.device("meta"):
        model = ViT((3, 224, 224), 1000, patch=16, dim=768, depth=12, heads=12)
    assert sum(p.numel() for p in model.parameters()) == 86_567_656


def test_attention_equals_pytorchs() -> None:
    block = TransformerBlock(ViTSizes(3, 4, 12, 1, heads=3, hidden=24, eps=1e-6))
    reference = nn.MultiheadAttention(12, 3, batch_first=True)
    reference.in_proj_weight.data.copy_(block.qkv.weight.data)
    reference.in_proj_bias.data.copy_(block.qkv.bias.data)
    reference.out_proj.load_state_dict(block.project.state_dict())
    tokens = torch.randn(2, 5, 12, generator=torch.Generator().manual_seed(0))
    expected, _ = reference(tokens, tokens, tokens, need_weights=False)
    torch.testing.assert_close(block.attend(tokens), expected)


def test_patches_are_read_row_by_row() -> None:
    """With the blocks cut out and the class token's row replaced, token 1 + r·columns + c is patch (r, c)."""
    model = ViT((1, 8, 12), 2, patch=4, dim=6, heads=2, depth=1)
    model.blocks = nn.Sequential()
    tokens = []
    model.norm.register_forward_pre_hook(lambda module, inputs: tokens.append(inputs[0]))
    images = torch.randn(1, 1, 8, 12, generator=torch.Generator().manual_seed(0))
    model(images)
    patch = images[0, :, 4:8, 8:12].flatten()  # row 1, column 2 of a 2×3 grid: token 1 + 5
    expected = model.embed.weight.flatten(1) @ patch + model.embed.bias + model.positions[0, 6]
    assert tokens[0].shape == (1, 7, 6)
    torch.testing.assert_close(tokens[0][0, 6], expected)
    torch.testing.assert_close(tokens[0][0, 0], model.class_token[0, 0] + model.positions[0, 0])


def test_initial_values() -> None:
    """Weights, class token and positions have the standard deviation 0.02; biases are 0."""
    model = ViT((3, 32, 32), 10, depth=1)
    for name in ("blocks.0.qkv.weight", "embed.weight", "positions"):
        assert model.get_parameter(name).std().item() == pytest.approx(0.02, rel=0.05)
    assert not model.classifier.bias.any()


def bilinear(size: int, pixels: np.ndarray) -> np.ndarray:
    """Bilinear enlargement by definition: output pixel i looks at (i + 1/2)·n/size − 1/2, edges repeated."""
    n = len(pixels)
    at = np.clip((np.arange(size) + 0.5) * n / size - 0.5, 0, n - 1)
    low = np.minimum(at.astype(int), n - 2)
    weights = np.zeros((size, n))
    weights[np.arange(size), low] = 1 - (at - low)
    weights[np.arange(size), low + 1] += at - low
    return weights @ pixels @ weights.T


def test_inputs_are_resized_bilinearly() -> None:
    small, large = ViT((1, 6, 6), 2, dim=12, depth=1, resize=8), ViT((1, 8, 8), 2, dim=12, depth=1)
    large.load_state_dict(small.state_dict())
    images = torch.randn(1, 1, 6, 6, generator=torch.Generator().manual_seed(0))
    enlarged = torch.from_numpy(bilinear(8, images[0, 0].numpy())).float()[None, None]
    torch.testing.assert_close(small(images), large(enlarged))


def test_shrinking_sees_every_pixel() -> None:
    """Plain bilinear sampling from 16 to 4 pixels would read half of the columns; every pixel must count."""
    model = ViT((1, 16, 16), 2, dim=12, depth=1, resize=4).double()
    images = torch.randn(1, 1, 16, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    images.requires_grad_()
    model(images)[0, 0].backward()
    assert images.grad is not None
    assert (images.grad.abs() > 0).all()


@pytest.mark.parametrize(
    ("shape", "hyper", "message"),
    [
        ((3, 30, 32), {}, r"patch = 4 does not divide the image size \(30, 32\)"),
        ((3, 32, 32), {"resize": 30}, r"patch = 4 does not divide the image size \(30, 30\)"),
        ((3, 32, 32), {"heads": 5}, r"heads = 5 does not divide dim = 192"),
        ((3, 3, 3), {}, r"at least 4, got \(3, 3, 3\)"),
    ],
)
def test_sizes_that_do_not_fit(shape: tuple[int, int, int], hyper: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ViT(shape, 10, **hyper)  # type: ignore[arg-type]
