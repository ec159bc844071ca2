"""How many clients fit into memory at once, and what the C library does with memory that is freed."""

from __future__ import annotations

import ctypes
import sys

import numpy as np
import torch
from torch import Tensor

from fedretain.engines.engine import World, forward
from fedretain.methods import Received
from fedretain.tensors import size_in_bytes

MEMORY = 2**30
"""Bytes that the clients trained at once may take on a CPU."""
_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD = -1, -2, -3
_KEPT = 2**29


def keep_freed_memory() -> None:
    """Let this process keep memory that it frees, for its next use.

    By default glibc gives large blocks back to the system at once; fetching fresh pages for the activations of every
    step then costs more than some of the convolutions that fill them. Elsewhere nothing happens.
    """
    if not sys.platform.startswith("linux"):
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return
    for what, size in ((_MMAP_THRESHOLD, _KEPT), (_TRIM_THRESHOLD, _KEPT), (_TOP_PAD, 2**26)):
        mallopt(what, size)


def clients_in_memory(world: World, received: Received) -> int:
    """How many clients fit into memory at once.

    One takes 8 times the parameters (their copy, gradient, optimiser, upload and what is on the way), its data, and
    twice the activations of a batch: they are kept for the backward pass, whose gradients are of the same size.
    """
    federation = world.federation
    largest = federation.train.largest
    data = 0 if world.local.augment != "none" else largest * int(np.prod(federation.shape)) * 4
    batch = min(world.local.batch_size, largest)
    memory = MEMORY
    if federation.device.type == "cuda":
        memory = torch.cuda.mem_get_info(federation.device)[0] // 2
    return max(1, memory // (8 * size_in_bytes(received.params) + data + 2 * batch * activation_bytes(world)))


def activation_bytes(world: World) -> int:
    """What the backward pass of one example needs of its forward pass, apart from the parameters.

    0 for a model that breaks down: training will say where and why.
    """
    federation = world.federation
    params = {name: value.detach().requires_grad_() for name, value in world.model.named_parameters()}
    buffers = {name: value.detach().clone() for name, value in world.model.named_buffers()}
    own = {_place(value) for value in (*params.values(), *buffers.values())}
    kept: dict[int, int] = {}

    def keep(value: Tensor) -> Tensor:
        if _place(value) not in own:
            kept[_place(value)] = value.untyped_storage().nbytes()
        return value

    examples = 2  # batch norm cannot do with one
    inputs = federation.normalise(federation.inputs[:1]).repeat(examples, 1, 1, 1)
    try:
        with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(keep, lambda value: value):
            forward(world, params, buffers, inputs, training=True)
    except (RuntimeError, ValueError, TypeError, KeyError):
        return 0
    return sum(kept.values()) // examples


def _place(value: Tensor) -> int:
    return value.untyped_storage().data_ptr()
