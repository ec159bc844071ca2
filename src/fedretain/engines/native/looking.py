"""Our pooling where nothing is recorded: models that look at data without learning from it."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from fedretain.engines.native.kernels import LEAST_WIDTH, available, pool
from fedretain.engines.native.passes import uses_kernels

aten = torch.ops.aten


def pooling(model: nn.Module, inputs: Tensor) -> AbstractContextManager[Any]:
    """A block without gradients in which 2 × 2 max-pooling is done by our kernel, to the same bits."""
    ours = inputs.device.type == "cpu" and uses_kernels(model) and available(inputs.dtype)
    return _Pooling() if ours else nullcontext()  # type: ignore[no-untyped-call]


class _Pooling(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees every operation, and takes over one kind of them."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """True would import the compiler to keep it out."""
        return False

    def __torch_dispatch__(
        self, operation: Any, types: Any, arguments: tuple[Any, ...] = (), keywords: dict[str, Any] | None = None
    ) -> Any:
        """Nobody asks for the indices, so that their place may hold those of our kernel."""
        if operation is aten.max_pool2d_with_indices.default and _fits(*arguments, **(keywords or {})):
            return pool(arguments[0])
        return operation(*arguments, **(keywords or {}))


def _fits(maps: Tensor, window: list[int], stride: list[int] | None = None, *others: Any, **more: Any) -> bool:
    height, width = maps.shape[-2:]
    return (
        [*window, *(stride or window)] == [2, 2, 2, 2]
        and not others
        and not more
        and not height % 2
        and not width % 2
        and width >= LEAST_WIDTH.get(maps.dtype, width + 1)
        and maps.is_contiguous()
    )
