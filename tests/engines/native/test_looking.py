"""A model that only looks at data is pooled by our kernel where that fits, to the same bits."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from fedretain.engines.native import looking, pooling
from fedretain.models import build_model


@pytest.fixture
def pooled(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """The shapes that our kernel was given."""
    seen: list[tuple[int, ...]] = []
    kernel = looking.pool

    def noted(maps: Tensor) -> tuple[Tensor, Tensor]:
        seen.append(tuple(maps.shape))
        return kernel(maps)

    monkeypatch.setattr(looking, "pool", noted)
    return seen


def images(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(dtype)


def test_lenet(dtype: torch.dtype, pooled: list[tuple[int, ...]]) -> None:
    model = build_model("lenet", shape=(3, 32, 32), classes=10, seed=0).to(dtype)
    inputs = images(5, 3, 32, 32, dtype=dtype)
    with torch.no_grad():
        expected = model(inputs)
        assert pooled == []
        with pooling(model, inputs):
            found = model(inputs)
    assert torch.equal(found, expected)
    assert pooled == [(5, 6, 28, 28), (5, 16, 10, 10)]


@pytest.mark.parametrize(
    "layer",
    [
        nn.MaxPool2d(3),
        nn.MaxPool2d(2, stride=1),
        nn.MaxPool2d(2, padding=1),
        nn.MaxPool2d(2, dilation=2),
        nn.MaxPool2d(2, ceil_mode=True),
        nn.Sequential(nn.ConstantPad2d((0, 1, 0, 0), 0.0), nn.MaxPool2d(2)),
        nn.Sequential(nn.AdaptiveAvgPool2d((4, 2)), nn.MaxPool2d(2)),
    ],
    ids=str,
)
def test_left_to_pytorch(layer: nn.Module, dtype: torch.dtype, pooled: list[tuple[int, ...]]) -> None:
    """Other windows, odd or narrow maps."""
    model, inputs = nn.Sequential(nn.Conv2d(2, 2, 1), layer).to(dtype), images(3, 2, 12, 12, dtype=dtype)
    with torch.no_grad(), pooling(model, inputs):
        found = model(inputs)
    assert torch.equal(found, model(inputs))
    assert pooled == []


def test_the_other_layout(dtype: torch.dtype, pooled: list[tuple[int, ...]]) -> None:
    model = nn.Sequential(nn.Conv2d(2, 4, 1), nn.MaxPool2d(2)).to(dtype=dtype, memory_format=torch.channels_last)
    inputs = images(3, 2, 16, 16, dtype=dtype).to(memory_format=torch.channels_last)
    with torch.no_grad(), pooling(model, inputs):
        found = model(inputs)
    assert torch.equal(found, model(inputs))
    assert pooled == []


def test_models_without_convolutions_need_no_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(dtype: torch.dtype) -> bool:
        raise AssertionError("nothing to compile for")

    monkeypatch.setattr(looking, "available", never)
    with pooling(build_model("mlp", shape=(1, 8, 8), classes=4, seed=0), images(2, 1, 8, 8, dtype=torch.float32)):
        pass
