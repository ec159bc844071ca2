from __future__ import annotations

import pytest
import torch

from fedretain.models.mlp import MLP

pytestmark = pytest.mark.usefixtures("seeded")


def test_parameter_count() -> None:
    """64 → 64 → 10: 64·64 + 64 = 4,160 and 64·10 + 10 = 650, together 4,810."""
    assert sum(p.numel() for p in MLP((1, 8, 8), 10).parameters()) == 4_810


def test_forward_is_relu_between_affine_maps() -> None:
    model = MLP((1, 2, 2), 3, hidden=(5, 4))
    inputs = torch.randn(6, 1, 2, 2, generator=torch.Generator().manual_seed(0))
    features = inputs.reshape(6, 4)
    for layer in ("hidden.0", "hidden.1"):
        weight, bias = (model.get_parameter(f"{layer}.{kind}") for kind in ("weight", "bias"))
        features = torch.clamp(features @ weight.T + bias, min=0)
    expected = features @ model.classifier.weight.T + model.classifier.bias
    torch.testing.assert_close(model(inputs), expected)


def test_without_hidden_layers_it_is_linear() -> None:
    model = MLP((4, 1, 1), 3, hidden=())
    inputs = torch.randn(6, 4, 1, 1, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(model(inputs), inputs[..., 0, 0] @ model.classifier.weight.T + model.classifier.bias)
