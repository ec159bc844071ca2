"""A recorded step prepared for the GPU: client-batched convolutions, results written back in place, one CUDA graph."""

from __future__ import annotations

import hashlib
import logging
import operator
import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx

from fedretain.engines.convolution import TYPES, convolve, input_gradient, weight_gradient
from fedretain.engines.folding import FEW_CHANNELS, few, folded_convolve, folded_weight_gradient
from fedretain.engines.nodes import shape_of, type_of, views_into
from fedretain.engines.recording import Recording
from fedretain.engines.rolling import Rolled, find_loop
from fedretain.engines.settling import settle, share_equal

LOG = logging.getLogger("fedretain")
aten = torch.ops.aten

_CLIENTS_FIRST = [1, 0, 2, 3, 4]
_READS = 8
"""So many reads may be repeated before the compiler writes a value that is used twice: its own 4 would have it write
every norm's result, which is made of one map and four numbers a channel."""


class InPlace:
    """A recording whose carry is written back into the tensors it was read from.

    Called with the tensors of carry, moving and fixed, it returns the results. ``compile`` fuses its operations.
    """

    def __init__(self, recording: Recording) -> None:
        self.module = recording.module
        graph = self.module.graph
        without_layout(graph)
        batch_convolutions(graph)
        pool_side_by_side(graph)
        sum_in_memory_order(graph)
        straighten(graph)
        share_equal(graph)
        write_back(graph, recording.carried)
        self.used = _drop_unused_inputs(graph)
        self.module.recompile()
        self.call: Callable[..., Any] = self.module
        self.code = self.module.code

    def __call__(self, leaves: Sequence[Any]) -> list[Tensor]:
        """One step."""
        return list(self.call(*(leaves[index] for index in self.used)))

    def compiled_before(self, leaves: Sequence[Any]) -> bool:
        """Whether the compiler has done this in an earlier run and kept the result."""
        try:
            return self._note(leaves).exists()
        except (ImportError, OSError):  # a compiler without such a cache, or one that cannot be read
            return False

    def _note(self, leaves: Sequence[Any]) -> Path:
        """A file in the compiler's own cache, which goes when that goes."""
        from torch._inductor.runtime.cache_dir_utils import cache_dir

        shapes = [(leaf.shape, leaf.stride(), leaf.dtype) for leaf in leaves if isinstance(leaf, Tensor)]
        what = f"{torch.__version__} {torch.cuda.get_device_name()} {shapes} {self.code}"
        return Path(cache_dir()) / f"fedretain-{hashlib.sha256(what.encode()).hexdigest()[:32]}"

    def compile(self, leaves: Sequence[Any]) -> None:
        """Fuse operations with PyTorch's compiler, for the layouts of these tensors; without it steps are slower."""
        try:
            self._compile(leaves)
        except Exception as error:  # whatever a compiler of another version does not like
            self.call = self.module
            LOG.info("engine: graphed goes on without PyTorch's compiler: %s", str(error).split("\n", 1)[0])

    def _compile(self, leaves: Sequence[Any]) -> None:
        graph = self.module.graph
        options: dict[str, Any] = {"triton.cudagraphs": False}
        if settle(graph, [_op(kernel) for kernel in (convolve, input_gradient, weight_gradient)]):
            options["realize_reads_threshold"] = _READS
            straighten(graph)
            self.module.recompile()
        given = [leaves[index] for index in self.used]
        loop = find_loop(graph)
        with torch.no_grad():
            if loop is None:
                self.call = _fused(self.module, given, options)
            else:
                self.call = Rolled(self.module, loop, given, lambda part, given: _fused(part, given, options))
        with suppress(ImportError, OSError):
            self._note(leaves).touch()


def _fused(module: fx.GraphModule, given: Sequence[Any], options: dict[str, Any]) -> Callable[..., Any]:
    """A module compiled for tensors that lie as the given ones do."""
    for node in module.graph.nodes:
        node.meta = {}  # of the tracing that is over; the compiler traces anew
    with warnings.catch_warnings(), _kept_for_later():
        warnings.simplefilter("ignore")  # advice on TF32 and the compiler's own deprecations are not the user's
        from torch._inductor import compile as fuse

        compiled: Callable[..., Any] = fuse(module, list(given), options=options)
    return compiled


def _kept_for_later() -> AbstractContextManager[Any]:
    """Let the compiler keep its work for the next run, which it does for shapes that it knows to be fixed."""
    from torch._guards import TracingContext, tracing
    from torch._subclasses import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    return tracing(TracingContext(FakeTensorMode(shape_env=ShapeEnv(), static_shapes=True)))


class Replay:
    """A function without arguments, captured once as a CUDA graph; it must read and write fixed tensors only."""

    def __init__(self, function: Callable[[], None], pool: Any) -> None:
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            function()  # libraries set themselves up, kernels are built
        torch.cuda.current_stream().wait_stream(stream)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, pool=pool):
            function()

    def __call__(self) -> None:
        """Again, with what the tensors hold now."""
        self.graph.replay()


def without_layout(graph: fx.Graph) -> None:
    """Make the operations independent of memory layout: reshape in place of view, no copies for the sake of order."""
    for node in graph.nodes:
        if node.target in (aten.view.default, aten._unsafe_view.default):
            node.target = aten.reshape.default
        elif node.target == aten.clone.default:
            node.replace_all_uses_with(node.args[0])
    graph.eliminate_dead_code()


def batch_convolutions(graph: fx.Graph) -> None:
    """Grouped convolutions become convolutions of many clients."""
    for node in list(graph.nodes):
        if node.target == aten.convolution.default:
            _forward(graph, node)
        elif node.target == aten.convolution_backward.default:
            _backward(graph, node)


def pool_side_by_side(graph: fx.Graph) -> None:
    """Pool maps as convolutions make them, [B, K·C, H, W]; ``vmap`` would turn them around to [K·B, C, H, W] first.

    Pooling mixes neither examples nor channels, so both are the same numbers.
    """
    for node in list(graph.nodes):
        if node.target == aten.max_pool2d_with_indices.default:
            maps, results = node.args[0], [user for user in node.users if user.target is operator.getitem]
        elif node.target == aten.max_pool2d_with_indices_backward.default:
            maps, results = node.args[1], [node]
        else:
            continue
        sides = _shape(maps.args[0]) if maps.target == aten.reshape.default else ()
        stacked = len(sides) == 5 and (sides[0] * sides[1], *sides[2:]) == _shape(maps)
        if not stacked or sides[2] <= FEW_CHANNELS:
            continue
        clients = sides[0]
        with graph.inserting_before(node):
            for given in list(node.all_input_nodes):
                apart = graph.call_function(aten.reshape.default, (given, [clients, -1, *_shape(given)[1:]]))
                batch, channels, *rest = _shape(given)
                _meta(apart, (clients, batch // clients, channels, *rest), given)
                beside = _grouped(graph, apart, (batch // clients, clients * channels, *rest))
                node.replace_input_with(given, beside)
        node.meta["beside"] = True
        for result in results:
            batch, channels, *rest = _shape(result)
            users = list(result.users)
            _meta(result, (batch // clients, clients * channels, *rest), result)
            with graph.inserting_before(result.next):
                apart = _by_client(graph, result, clients)
                behind = graph.call_function(aten.reshape.default, (apart, [batch, channels, *rest]))
                _meta(behind, (batch, channels, *rest), result)
            for user in users:
                user.replace_input_with(result, behind)


def sum_in_memory_order(graph: fx.Graph) -> None:
    """Sums over all of a client's maps or weights take the channels last, as they lie in memory.

    The compiler divides such a sum over many programs in the order of its axes, and would read one channel of every
    pixel, then the next.
    """
    for node in list(graph.nodes):
        if node.target != aten.sum.dim_IntList or sorted(node.args[1]) != [1, 2, 3, 4]:
            continue
        source = node.args[0]
        clients, first, channels, *sides = _shape(source)
        if len(sides) == 2 and channels > FEW_CHANNELS:
            with graph.inserting_before(node):
                turned = graph.call_function(aten.permute.default, (source, [0, 1, 3, 4, 2]))
            _meta(turned, (clients, first, *sides, channels), source)
            node.replace_input_with(source, turned)


def straighten(graph: fx.Graph) -> None:
    """Drop reshapes and permutations that undo each other."""
    for node in graph.nodes:
        if node.target not in (aten.reshape.default, aten.permute.default):
            continue
        source: Any = node.args[0]
        if node.target == aten.reshape.default:
            while source.target == aten.reshape.default:
                source = source.args[0]
            node.args = (source, node.args[1])
            if _shape(source) == _shape(node):
                node.replace_all_uses_with(source)
        else:
            order = [dim % len(node.args[1]) for dim in node.args[1]]
            if source.target == aten.permute.default:
                order = [source.args[1][dim] for dim in order]
                source = source.args[0]
                node.args = (source, order)
            if order == sorted(order):
                node.replace_all_uses_with(source)
    graph.eliminate_dead_code()


def write_back(graph: fx.Graph, carried: int) -> None:
    """Copy the new carry over the old one at the end, and return the results alone."""
    inputs = [node for node in graph.nodes if node.op == "placeholder"][:carried]
    (output,) = (node for node in graph.nodes if node.op == "output")
    given: Any = output.args[0]
    new, results = given[:carried], given[carried:]
    with graph.inserting_before(output):
        # A new value that lies in another old one's memory would be overwritten before it is copied.
        apart = [
            graph.call_function(aten.clone.default, (value,)) if views_into(value) in inputs else value
            for old, value in zip(inputs, new, strict=True)
            if value is not old
        ]
        targets = [old for old, value in zip(inputs, new, strict=True) if value is not old]
        for old, value in zip(targets, apart, strict=True):
            graph.call_function(aten.copy_.default, (old, value))
    output.args = (list(results),)


def _forward(graph: fx.Graph, node: fx.Node) -> None:
    arguments: Any = node.args
    x, w, bias, stride, padding, dilation, transposed, _, groups = arguments
    if not _ours(x, stride, padding, dilation, transposed):
        return
    batch, channels, height, width = _shape(node)
    with graph.inserting_before(node):
        if few(_shape(w)[1], channels // groups, stride[0]):
            maps, weights = _by_client(graph, x, groups), _weights_by_client(graph, w, groups)
            made = graph.call_function(_op(folded_convolve), (maps, weights, _pair(padding)))
            _meta(made, (groups, batch, channels // groups, height, width), node)
            result = _grouped(graph, made, (batch, channels, height, width))
        else:
            result = graph.call_function(_op(convolve), (x, w, stride[0], _pair(padding), groups))
            _meta(result, (batch, channels, height, width), node)
        if bias is not None:
            aligned = graph.call_function(aten.reshape.default, (bias, [1, channels, 1, 1]))
            _meta(aligned, (1, channels, 1, 1), bias)
            result = _meta(graph.call_function(aten.add.Tensor, (result, aligned)), _shape(node), node)
    node.replace_all_uses_with(result)


def _backward(graph: fx.Graph, node: fx.Node) -> None:
    given: Any = node.args
    d, x, w, _, stride, padding, dilation, transposed, _, groups, wanted = given
    if not _ours(x, stride, padding, dilation, transposed):
        return
    parts = {user.args[1]: user for user in node.users if user.target is operator.getitem}
    folded = few(_shape(w)[1], _shape(w)[0] // groups, stride[0])
    with graph.inserting_before(node):
        if wanted[0] and 0 in parts:
            if folded:
                made = _folded_input_gradient(graph, d, x, w, padding, groups)
            else:
                arguments = (d, w, list(_shape(x)[2:]), stride[0], _pair(padding), groups)
                made = _meta(graph.call_function(_op(input_gradient), arguments), _shape(x), x)
            parts[0].replace_all_uses_with(made)
        if wanted[1] and 1 in parts:
            outputs, inputs, *taps = _shape(w)
            if folded:
                gradient, maps = _by_client(graph, d, groups), _by_client(graph, x, groups)
                made = graph.call_function(_op(folded_weight_gradient), (gradient, maps, taps, _pair(padding)))
                _meta(made, (groups, outputs // groups, inputs, *taps), w)
                made = graph.call_function(aten.reshape.default, (made, [outputs, inputs, *taps]))
            else:
                arguments = (d, x, taps, stride[0], _pair(padding), groups)
                made = graph.call_function(_op(weight_gradient), arguments)
            parts[1].replace_all_uses_with(_meta(made, (outputs, inputs, *taps), w))
        if wanted[2] and 2 in parts:
            total = graph.call_function(aten.sum.dim_IntList, (d, [0, 2, 3]))
            parts[2].replace_all_uses_with(_meta(total, (_shape(d)[1],), d))


def _folded_input_gradient(
    graph: fx.Graph, d: fx.Node, x: fx.Node, w: fx.Node, padding: Sequence[int], groups: int
) -> fx.Node:
    """A convolution of the output's gradient with the taps turned around."""
    batch, channels, height, width = _shape(x)
    outputs, inputs, rows, columns = _shape(w)
    gradient, weights = _by_client(graph, d, groups), _weights_by_client(graph, w, groups)
    turned = graph.call_function(aten.flip.default, (weights, [3, 4]))
    _meta(turned, _shape(weights), w)
    turned = graph.call_function(aten.transpose.int, (turned, 1, 2))
    _meta(turned, (groups, inputs, outputs // groups, rows, columns), w)
    outside = [rows - 1 - _pair(padding)[0], columns - 1 - _pair(padding)[1]]
    made = graph.call_function(_op(folded_convolve), (gradient, turned, outside))
    _meta(made, (groups, batch, channels // groups, height, width), x)
    return _grouped(graph, made, (batch, channels, height, width))


def _ours(x: fx.Node, stride: Any, padding: Any, dilation: Any, transposed: bool) -> bool:
    """Whether the kernels can do this convolution; what they cannot do stays as it is."""
    return (
        len(stride) == 2
        and len(_shape(x)) == 4
        and len({*stride}) == 1
        and list(dilation) in ([1, 1], [1])
        and not transposed
        and type_of(x) in TYPES
    )


def _shape(node: fx.Node) -> tuple[int, ...]:
    shape = shape_of(node)
    assert shape is not None
    return shape


def _pair(padding: Sequence[int]) -> list[int]:
    return [padding[0], padding[-1]]


def _op(operation: Any) -> Any:
    return operation._opoverload


def _by_client(graph: fx.Graph, node: fx.Node, groups: int) -> fx.Node:
    """[B, K·C, H, W] as [K, B, C, H, W]."""
    batch, channels, height, width = _shape(node)
    split = (batch, groups, channels // groups, height, width)
    apart = graph.call_function(aten.reshape.default, (node, list(split)))
    _meta(apart, split, node)
    made = graph.call_function(aten.permute.default, (apart, _CLIENTS_FIRST))
    return _meta(made, (groups, batch, *split[2:]), node)


def _grouped(graph: fx.Graph, node: fx.Node, shape: tuple[int, ...]) -> fx.Node:
    """[K, B, C, H, W] as [B, K·C, H, W]."""
    clients, batch, *rest = _shape(node)
    made = graph.call_function(aten.permute.default, (node, _CLIENTS_FIRST))
    _meta(made, (batch, clients, *rest), node)
    return _meta(graph.call_function(aten.reshape.default, (made, list(shape))), shape, node)


def _weights_by_client(graph: fx.Graph, node: fx.Node, groups: int) -> fx.Node:
    outputs, inputs, rows, columns = _shape(node)
    shape = (groups, outputs // groups, inputs, rows, columns)
    return _meta(graph.call_function(aten.reshape.default, (node, list(shape))), shape, node)


def _meta(node: fx.Node, shape: tuple[int, ...], like: fx.Node) -> fx.Node:
    node.meta["val"] = torch.empty(shape, dtype=type_of(like), device="meta")
    return node


def _drop_unused_inputs(graph: fx.Graph) -> list[int]:
    used = []
    for index, node in enumerate([node for node in graph.nodes if node.op == "placeholder"]):
        if node.users:
            used.append(index)
        else:
            graph.erase_node(node)
    return used
