"""Which operations of a recorded graph are played by our kernels, and that this changes no number but by rounding."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad

from fedretain.engines.native import convolve_few_channels, few_channels, kernels, passes, pool_in_one_pass
from fedretain.engines.recording import Recording
from fedretain.engines.tracing import trace, uncompiled
from fedretain.models import build_model


def traced(model: nn.Module, images: Tensor) -> Any:
    """The gradient of the sum of squares of a model's output."""
    names, values = zip(*model.named_parameters(), strict=True)

    def step(*given: Tensor) -> list[Tensor]:
        *params, inputs = given

        def objective(*current: Tensor) -> Tensor:
            out: Tensor = functional_call(model, dict(zip(names, current, strict=True)), (inputs,))
            return out.square().sum()

        with uncompiled():
            return list(grad(objective, tuple(range(len(params))))(*params))

    given = [*(value.detach() for value in values), images]
    return trace(step, given), given


def targets(module: Any) -> list[Any]:
    return [node.target for node in module.graph.nodes if node.op == "call_function"]


def images(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(dtype)


def test_lenet(dtype: torch.dtype) -> None:
    """Two convolutions and two poolings. PyTorch keeps the second convolution's forward pass (16 outputs)."""
    torch_model = build_model("lenet", shape=(3, 32, 32), classes=10, seed=0).to(dtype)
    module, given = traced(torch_model, images(20, 3, 32, 32, dtype=dtype))
    before = module(*given)
    pool_in_one_pass(module.graph)
    module.recompile()
    assert all(map(torch.equal, module(*given), before))
    convolve_few_channels(module.graph)
    module.recompile()
    found = targets(module)
    counts = [found.count(kind) for kind in (kernels.pool, kernels.pool_backward, kernels.convolve)]
    assert counts == [2, 2, 1]
    assert found.count(passes.convolve_backward) == 2
    assert found.count(torch.ops.aten.convolution.default) == 1
    tolerance = 1e-12 if dtype == torch.float64 else 1e-4
    for ours, theirs in zip(module(*given), before, strict=True):
        assert (ours - theirs).abs().max() <= tolerance * theirs.abs().max()


def test_few_images_are_little_work(dtype: torch.dtype) -> None:
    """16 × 1 × 144 outputs of 6 · 25 products each: starting PyTorch's convolution would take longer."""
    module, _ = traced(nn.Conv2d(6, 16, 5), images(1, 6, 16, 16, dtype=torch.float32))
    convolve_few_channels(module.graph)
    assert torch.ops.aten.convolution.default not in targets(module)


@pytest.mark.parametrize(
    "layer",
    [
        nn.Conv2d(2, 4, 3, stride=2),
        nn.Conv2d(2, 4, 3, dilation=2),
        nn.Conv2d(2, 4, 3, groups=2),
        nn.Conv2d(2, 4, 3, padding=3),
        nn.Conv2d(16, 32, 3),
        nn.ConvTranspose2d(2, 4, 3),
        nn.Conv2d(2, 4, 3).half(),
        nn.Conv2d(2, 4, 3).to(memory_format=torch.channels_last),
        nn.MaxPool2d(3),
        nn.MaxPool2d(2, stride=1),
        nn.MaxPool2d(2, padding=1),
        nn.MaxPool2d(2, ceil_mode=True),
    ],
    ids=str,
)
def test_left_to_pytorch(layer: nn.Module) -> None:
    """Other strides, groups, paddings wider than the window, many channels, half precision, another layout."""
    weights = next(layer.parameters(), torch.zeros(()))
    inputs = images(30, 16 if weights.shape[1:2] == (16,) else 2, 17, 17, dtype=weights.dtype)
    if weights.dim() == 4 and not weights.is_contiguous():
        inputs = inputs.to(memory_format=torch.channels_last)
    model = nn.Sequential(nn.Identity(), layer)
    if not list(model.parameters()):
        model = nn.Sequential(nn.Conv2d(2, 2, 1, padding=0, dilation=2), layer)
    module, _ = traced(model, inputs)
    before = targets(module)
    pool_in_one_pass(module.graph)
    convolve_few_channels(module.graph)
    assert targets(module) == before


def test_without_kernels_nothing_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(passes, "available", lambda dtype: False)
    module, _ = traced(
        build_model("lenet", shape=(1, 16, 16), classes=4, seed=0), images(4, 1, 16, 16, dtype=torch.float32)
    )
    before = targets(module)
    pool_in_one_pass(module.graph)
    convolve_few_channels(module.graph)
    assert targets(module) == before


def updated(weights: Tensor, gradient: Tensor, rate: Tensor) -> Any:
    """A recording of w + c·g, the rate a number."""

    def step(carry: dict[str, Tensor], moving: Tensor, fixed: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        return {"w": carry["w"] + fixed * (moving * 2)}, moving

    return Recording(step, {"w": weights.clone()}, gradient, rate)


@pytest.mark.parametrize("rows", [100, 200])
def test_updates_of_large_tensors(rows: int, dtype: torch.dtype) -> None:
    """From 2¹⁴ numbers on; the same bits as the loop engine's w + c·g."""
    generator = torch.Generator().manual_seed(2)
    weights = torch.randn(rows, 100, generator=generator, dtype=torch.float64).to(dtype)
    gradient = torch.randn(rows, 100, generator=generator, dtype=torch.float64).to(dtype)
    rate = torch.tensor(-0.3, dtype=torch.float64)
    recording = updated(weights, gradient, rate)
    assert (kernels.add_scaled_ in targets(recording.module)) is (rows == 200)
    (found,), _ = recording.play([weights.clone()], [gradient], [rate])
    assert found.equal(weights + rate * (gradient * 2))


@pytest.mark.parametrize(("name", "few"), [("lenet", True), ("fedavg_cnn", False), ("mlp", False)])
def test_models_with_few_channels(name: str, few: bool) -> None:
    assert few_channels(build_model(name, shape=(1, 28, 28), classes=10, seed=0)) is few
