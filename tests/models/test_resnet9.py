from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedretain.models import build_model
from fedretain.models.resnet9 import FixupBlock, ResNet9

pytestmark = pytest.mark.usefixtures("seeded")


@pytest.fixture
def images() -> Tensor:
    return torch.randn(8, 3, 16, 16, generator=torch.Generator().manual_seed(0))


def test_parameter_count() -> None:
    """Width 64; kernels: 9 · (3·64 + 64·128 + 2·128² + 128·256 + 256·512 + 2·512²) = 6,563,520.

    Scalars: 2 in each of 4 plain layers, 4 biases and 1 multiplier in each of 2 blocks, 1 before the
    classifier: 19. Classifier 512·10 + 10 = 5,130. Together 6,568,669.
    """
    with torch.device("meta"):
        model = ResNet9((3, 32, 32), 10)
    assert sum(p.numel() for p in model.parameters()) == 6_568_669


def test_nine_weight_layers_and_no_normalisation() -> None:
    kinds = [type(module) for module in ResNet9((3, 32, 32), 10, width=2).modules()]
    assert kinds.count(nn.Conv2d) + kinds.count(nn.Linear) == 9
    assert not any("Norm" in kind.__name__ for kind in kinds)


def test_at_the_start_logits_are_0_and_blocks_are_the_identity(images: Tensor) -> None:
    model = build_model("resnet9", (3, 16, 16), 10, seed=0, width=4)
    assert torch.equal(model(images), torch.zeros(8, 10))
    maps = torch.rand(2, 8, 5, 5, generator=torch.Generator().manual_seed(1))
    assert torch.equal(model.get_submodule("block1")(maps), maps)


def test_scale_of_the_initial_weights() -> None:
    """He: deviation √(2 / (9·outputs)); within a branch times L^(−1/(2m−2)) = 2^(−1/2), L = m = 2.

    With 9·512·512 ≈ 2.4 million draws the estimate is within 0.2 % (four standard errors of 1/√(2n)).
    """
    model = build_model("resnet9", (3, 8, 8), 10, seed=0)
    plain = model.get_parameter("layer3.conv.weight").std().item()
    branch = model.get_parameter("block3.conv1.weight").std().item()
    assert plain == pytest.approx((2 / (9 * 512)) ** 0.5, rel=0.003)
    assert branch == pytest.approx((2 / (9 * 512)) ** 0.5 * 2**-0.5, rel=0.003)
    assert not model.get_parameter("block3.conv2.weight").any()


def test_block_computes_its_equation() -> None:
    """y = max(0, x + scale · conv₂(max(0, conv₁(x + a) + b) + c) + d), all scalars away from 0 and 1."""
    block = FixupBlock(3)
    a, b, c, scale, d = 0.1, -0.2, 0.3, 1.5, -0.4
    values = (a, b, c, scale, d)
    names = ("before_conv1", "before_relu1", "before_conv2", "scale", "before_relu2")
    for name, value in zip(names, values, strict=True):
        block.get_parameter(name).data.fill_(value)
    generator = torch.Generator().manual_seed(0)
    block.conv2.weight.data.normal_(generator=generator)
    maps = torch.randn(2, 3, 6, 6, generator=generator)
    inner = torch.clamp(F.conv2d(maps + a, block.conv1.weight, padding=1) + b, min=0)
    expected = torch.clamp(maps + scale * F.conv2d(inner + c, block.conv2.weight, padding=1) + d, min=0)
    torch.testing.assert_close(block(maps), expected)


def test_gradients_wake_up_layer_by_layer(images: Tensor) -> None:
    """Zeros hide what stands behind them for one step each.

    Step 1: the classifier's weight is 0, so only the classifier has a gradient (its weight and bias).
    Step 2: the classifier passes gradients on; conv2 of a branch is still 0, so conv1, the scalars between
    them and the multiplier (whose gradient is the branch's output) have none.
    Step 3: every parameter has a gradient.
    """
    model = build_model("resnet9", (3, 16, 16), 4, seed=0, width=4)
    labels = torch.tensor([0, 0, 0, 0, 0, 1, 2, 3])  # balanced labels would leave the bias without gradient
    asleep = []
    for _ in range(3):
        model.zero_grad()
        F.cross_entropy(model(images), labels).backward()
        asleep.append({name for name, p in model.named_parameters() if not p.grad.any()})  # type: ignore[union-attr]
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.1 * parameter.grad  # type: ignore[operator]
    everything = {name for name, _ in model.named_parameters()}
    hidden = ("before_conv1", "conv1.weight", "before_relu1", "scale")
    assert asleep[0] == everything - {"classifier.weight", "classifier.bias"}
    behind = {f"{block}.{name}" for block in ("block1", "block3") for name in (*hidden, "before_conv2")}
    assert asleep[1] == behind
    assert asleep[2] == set()


def test_maximum_over_all_pixels_is_classified(images: Tensor) -> None:
    model = build_model("resnet9", (3, 16, 16), 4, seed=0, width=4)
    assert isinstance(model, ResNet9)
    model.classifier.weight.data.normal_(generator=torch.Generator().manual_seed(0))
    maps = F.max_pool2d(model.layer1(model.stem(images)), 2)
    maps = F.max_pool2d(model.layer3(F.max_pool2d(model.layer2(maps), 2)), 2)
    assert maps.shape == (8, 32, 2, 2)
    torch.testing.assert_close(model(images), model.classifier(maps.amax((2, 3))))
