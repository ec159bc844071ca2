"""A function of tensors written down as the operations that it led to, without PyTorch's compiler.

``make_fx`` and ``torch.func.grad`` do the same, but import the whole compiler on first use: 1.7 s and 70 MB in every
process, for settings that do not matter where nothing is compiled.
"""

from __future__ import annotations

import importlib
import operator
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only
from torch.utils.weak import WeakTensorKeyDictionary


class Seen(NamedTuple):
    """What is known of a tensor that was there while tracing; ``val`` in the ``meta`` of its node."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    contiguous: bool
    strides: tuple[int, ...]

    @classmethod
    def of(cls, value: Tensor) -> Seen:
        """The facts of a tensor."""
        return cls(tuple(value.shape), value.dtype, value.device, value.is_contiguous(), tuple(value.stride()))

    def is_contiguous(self) -> bool:
        """Whether its numbers lay in the order of its axes."""
        return self.contiguous

    def stride(self) -> tuple[int, ...]:
        """How far apart its numbers lay along each axis."""
        return self.strides


def trace(function: Callable[..., Sequence[Any]], arguments: Sequence[Any]) -> fx.GraphModule:
    """The operations of ``function(*arguments)``, one placeholder for each argument.

    The function is run once, on the given tensors. Tensors that it holds itself become attributes of the module. An
    operation that hands a number to Python, which the operations could not show, is refused.
    """
    tracer = _Tracer()
    given = []
    for number, argument in enumerate(arguments):
        node = tracer.graph.placeholder(f"argument_{number}")
        if isinstance(argument, Tensor):
            argument = argument.detach()  # known by its identity, and one tensor may be given twice
            tracer.follow(argument, node)
            tracer.variable.add(node)
        given.append(argument)
    with tracer:
        results = function(*given)
    tracer.graph.output([tracer.node_of(result) if isinstance(result, Tensor) else result for result in results])
    return fx.GraphModule(tracer.held, tracer.graph)


class _Tracer(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees every operation below automatic differentiation and ``vmap``, on plain tensors."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.graph = fx.Graph()
        self.held = torch.nn.Module()
        self.nodes: Any = WeakTensorKeyDictionary()
        self.variable: set[fx.Node] = set()
        """Nodes that depend on an argument."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """True would import the compiler to keep it out."""
        return False

    def follow(self, value: Tensor, node: fx.Node) -> None:
        """From here on this tensor is what the node gives."""
        node.meta["val"] = Seen.of(value)
        self.nodes[value] = node

    def node_of(self, value: Tensor) -> fx.Node:
        """The node that gave a tensor; one that came from nowhere is held by the module."""
        if value not in self.nodes:
            name = f"held_{sum(1 for _ in self.held.buffers())}"
            self.held.register_buffer(name, value.detach(), persistent=False)
            self.follow(value, self.graph.get_attr(name))
        node: fx.Node = self.nodes[value]
        return node

    def __torch_dispatch__(
        self, operation: Any, types: Any, arguments: tuple[Any, ...] = (), keywords: dict[str, Any] | None = None
    ) -> Any:
        """Run an operation and write it down."""
        keywords = keywords or {}
        given, named = tree_map_only(Tensor, self.node_of, (arguments, keywords))
        node = self.graph.call_function(operation, given, named)
        if any(source in self.variable for source in node.all_input_nodes):
            if torch.Tag.data_dependent_output in operation.tags:
                raise RuntimeError(
                    f"a recorded step cannot turn a tensor into a number ({operation}): use tensors only"
                )
            self.variable.add(node)
        result = operation(*arguments, **keywords)
        if isinstance(result, Tensor):
            self.follow(result, node)
        elif isinstance(result, tuple | list):
            for index, part in enumerate(result):
                if isinstance(part, Tensor):
                    self.follow(part, self.graph.call_function(operator.getitem, (node, index)))
                    if node in self.variable:
                        self.variable.add(self.node_of(part))
        return result


class _Idle(ModuleType):
    """Stands for a module of PyTorch's compiler while nothing is compiled; other names lead to the real one."""

    def __init__(self, name: str, **known: Any) -> None:
        super().__init__(name)
        vars(self).update(known)

    def __getattr__(self, name: str) -> Any:
        return getattr(importlib.import_module(self.__name__), name)


@contextmanager
def uncompiled() -> Iterator[None]:
    """A block in which ``torch.func.grad`` does not import PyTorch's compiler.

    It does so only to switch compiled backward passes off, and as long as the compiler was never imported there are
    none.
    """
    name = "torch._dynamo"
    if name in sys.modules or "_dynamo" in vars(torch):
        yield
        return
    torch._dynamo = _Idle(name, compiled_autograd=_Idle(f"{name}.compiled_autograd", _disable=nullcontext))
    try:
        yield
    finally:
        if name in sys.modules:
            torch._dynamo = sys.modules[name]
        else:
            del torch._dynamo
