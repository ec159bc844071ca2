"""Convolutions of many clients on one GPU, our kernels beside cuDNN's: ``python -m benchmarks.convolutions``."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import NamedTuple

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.nn import functional as F

from fedretain.engines import convolution


class Shape(NamedTuple):
    """3 × 3 taps, padded by 1, of square maps."""

    clients: int
    batch: int
    inputs: int
    outputs: int
    side: int
    stride: int = 1

    def __str__(self) -> str:
        stride = f", stride {self.stride}" if self.stride > 1 else ""
        return f"{self.inputs} → {self.outputs}, {self.side} × {self.side}{stride}"


SHAPES = {
    "resnet18": [
        Shape(10, 64, 64, 64, 32),
        Shape(10, 64, 128, 128, 16),
        Shape(10, 64, 256, 256, 8),
        Shape(10, 64, 512, 512, 4),
        Shape(10, 64, 64, 128, 32, 2),
        Shape(10, 64, 128, 256, 16, 2),
        Shape(10, 64, 256, 512, 8, 2),
    ],
    "resnet9": [
        Shape(100, 5, 64, 128, 32),
        Shape(100, 5, 128, 128, 16),
        Shape(100, 5, 128, 256, 16),
        Shape(100, 5, 256, 512, 8),
        Shape(100, 5, 512, 512, 4),
    ],
}


def ways(shape: Shape) -> tuple[list[Callable[[], Tensor]], list[Callable[[], Tensor]]]:
    """Forward pass, input and weight gradient: by our kernels, and by cuDNN's."""
    clients, batch, inputs, outputs, side, stride = shape
    made = convolution.outputs_of(side, 3, stride, 1)

    def random(*sizes: int) -> Tensor:
        return torch.randn(sizes, device="cuda").bfloat16().contiguous(memory_format=torch.channels_last)

    x, w = random(batch, clients * inputs, side, side), random(clients * outputs, inputs, 3, 3)
    d = random(batch, clients * outputs, made, made)
    given = (stride, [1, 1], clients)
    ours = [
        lambda: convolution._convolve(x, w, *given),
        lambda: convolution._input_gradient(d, w, [side, side], *given),
        lambda: convolution._weight_gradient(d, x, [3, 3], *given),
    ]
    cudnn = [
        lambda: F.conv2d(x, w, None, stride, 1, 1, clients),
        lambda: convolution._cudnn_gradient(d, x, w, *given, 0),
        lambda: convolution._cudnn_gradient(d, x, w, *given, 1),
    ]
    return ours, cudnn


def microseconds(way: Callable[[], Tensor], repeats: int = 20) -> float:
    """The best of three times ``repeats`` calls in one CUDA graph, so that launching costs nothing."""
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    with torch.cuda.stream(stream):
        for _ in range(3):
            way()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(repeats):
            way()
    times = []
    for _ in range(3):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(1000 * start.elapsed_time(end) / repeats)
    return min(times)


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="*", metavar="model", help=f"of {', '.join(SHAPES)}; all if none is named")
    models = parser.parse_args().models or list(SHAPES)
    unknown = set(models) - set(SHAPES)
    if unknown:
        parser.error(f"unknown model {', '.join(sorted(unknown))}; choose from {', '.join(SHAPES)}")
    torch.backends.cudnn.benchmark = True
    for model in models:
        first = SHAPES[model][0]
        title = f"{model}: {first.clients} clients × batch {first.batch}, microseconds"
        table = Table("shape", "our kernels", "cuDNN", "at 790 TFLOP/s", title=title)
        for shape in SHAPES[model]:
            ours, cudnn = (" / ".join(f"{microseconds(way):.0f}" for way in some) for some in ways(shape))
            pixels = shape.clients * shape.batch * (shape.side // shape.stride) ** 2
            operations = 2 * pixels * shape.inputs * shape.outputs * 9
            table.add_row(str(shape), ours, cudnn, f"{operations / 790e6:.0f}")
        Console(width=100).print(table)
    print("forward / input gradient / weight gradient, bfloat16")


if __name__ == "__main__":
    main()
