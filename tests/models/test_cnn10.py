from __future__ import annotations

import pytest
import torch
from torch import nn

from fedretain.models import build_model
from fedretain.models.cnn10 import CNN10

pytestmark = pytest.mark.usefixtures("seeded")


def test_parameter_count() -> None:
    """Width 32 on 1×256×256: ⌊256/3⌋ = 85, so the last layer reads 128·85·85 = 924,800 features.

    conv 9·32 + 32 = 320; 9·32·64 + 64 = 18,496; 9·64·64 + 64 = 36,928; 9·64·128 + 128 = 73,856; five times
    9·128·128 + 128 = 147,584; two norms of 2·128 = 256; fc 924,800·2 + 2 = 1,849,602. Together 2,717,634.
    """
    with torch.device("meta"):
        model = CNN10((1, 256, 256), 2)
    assert sum(p.numel() for p in model.parameters()) == 2_717_634
    layers = [type(module) for module in model.modules()]
    assert (layers.count(nn.Conv2d), layers.count(nn.Linear)) == (9, 1)


@pytest.mark.parametrize("shape", [(1, 256, 256), (3, 32, 32)])
def test_layers_in_order(shape: tuple[int, int, int]) -> None:
    model = CNN10(shape, 2, width=2)
    side = shape[1] // 3
    sequence = nn.Sequential(
        *(nn.Conv2d(shape[0], 2, 3, padding=1), nn.ReLU()),
        *(nn.Conv2d(2, 4, 3, padding=1), nn.ReLU()),
        *(nn.Conv2d(4, 4, 3, padding=1), nn.ReLU()),
        *(nn.Conv2d(4, 8, 3, padding=1), nn.ReLU()),
        *(nn.Conv2d(8, 8, 3, padding=1), nn.ReLU()),
        *(nn.Conv2d(8, 8, 3, padding=1), nn.GroupNorm(1, 8), nn.ReLU(), nn.MaxPool2d(3)),
        *(nn.Conv2d(8, 8, 3, padding=1), nn.ReLU()),
        *(nn.Conv2d(8, 8, 3, padding=1), nn.GroupNorm(1, 8), nn.ReLU()),
        *(nn.Conv2d(8, 8, 3, padding=1), nn.ReLU()),
        nn.Flatten(),
        nn.Linear(8 * side * side, 2),
    )
    # The norms start alike on both sides; convolutions and the classifier are copied.
    ours = [*model.convs, model.classifier]
    theirs = [layer for layer in sequence if isinstance(layer, nn.Conv2d | nn.Linear)]
    for mine, other in zip(ours, theirs, strict=True):
        other.load_state_dict(mine.state_dict())
    images = torch.randn(2, *shape, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(model(images), sequence(images))


def test_default_initialisation_trains() -> None:
    """Nine layers with two norms must not stall: eight random images are told apart in 40 steps of SGD."""
    model = build_model("cnn10", (1, 12, 12), 2, seed=0, width=8)
    images = torch.randn(8, 1, 12, 12, generator=torch.Generator().manual_seed(0))
    labels = torch.arange(8) % 2
    optimiser = torch.optim.SGD(model.parameters(), lr=0.05)
    for _ in range(40):
        optimiser.zero_grad()
        loss = nn.functional.cross_entropy(model(images), labels)
        loss.backward()
        optimiser.step()
    assert loss.item() < 0.1
