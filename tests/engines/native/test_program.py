"""Steps of small models played by the kernels give what PyTorch's operations give."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.func import grad_and_value, vmap
from torch.nn import functional as F

from fedretain.engines.native import available
from fedretain.engines.native.operations import LARGEST
from fedretain.engines.native.program import REMEMBERED, Program
from fedretain.engines.recording import Recording
from fedretain.losses import LOSSES

pytestmark = pytest.mark.skipif(not available(torch.float32, "play"), reason="no C compiler")
CLOSE = {torch.float64: 1e-12, torch.float32: 2e-5}
Tensors = dict[str, Tensor]


def random(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """The same numbers every time."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape) + len(shape)), dtype=dtype)


def networks(clients: int, sizes: list[int], dtype: torch.dtype) -> Tensors:
    """Fully connected layers of every client."""
    found = {}
    for at, (before, after) in enumerate(pairwise(sizes)):
        found[f"w{at}"] = random(clients, after, before, dtype=dtype) / before**0.5
        found[f"b{at}"] = random(clients, after, dtype=dtype)
    return found


def trained(
    padded: bool = False, change: Callable[[Tensor], Tensor] = lambda logits: logits, loss: str = "ce"
) -> Callable[..., Any]:
    """A step of plain SGD for all clients."""
    objective = LOSSES[loss]

    def mean(params: Tensors, inputs: Tensor, labels: Tensor, weights: Tensor, counts: Tensor) -> Tensor:
        layers = len(params) // 2
        for at in range(layers):
            inputs = F.linear(inputs, params[f"w{at}"], params[f"b{at}"])
            inputs = inputs.relu() if at < layers - 1 else change(inputs)
        losses = objective(inputs, labels, counts)
        return (losses * (weights / weights.sum().clamp(min=1))).sum() if padded else losses.mean()

    def one(params: Tensors, moving: Any, lr: Tensor, counts: Tensor) -> tuple[Tensors, Tensor]:
        gradient, value = grad_and_value(mean)(params, *moving, counts)
        return {name: params[name] - lr * gradient[name] for name in params}, value

    def every(params: Tensors, moving: Any, fixed: Any) -> tuple[Tensors, Tensor]:
        return vmap(one, in_dims=(0, 0, None, 0))(params, moving, *fixed)

    return every


def batch(clients: int, size: int, inputs: int, classes: int, dtype: torch.dtype, seed: int = 0) -> tuple[Tensor, ...]:
    """Inputs, labels, and 1 for what is real."""
    chance = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, classes, (clients, size), generator=chance)
    real = (torch.rand(clients, size, generator=chance) > 0.3).to(dtype)
    return torch.randn(clients, size, inputs, generator=chance, dtype=dtype), labels, real


class Both:
    """A step recorded, and what it starts from."""

    def __init__(self, step: Callable[..., Any], params: Tensors, moving: list[tuple[Tensor, ...]], lr: float = 0.1):
        clients, classes = list(params.values())[-1].shape
        counts = torch.arange(clients * classes).reshape(clients, classes) % 3
        counts[:, 0] = 1
        self.fixed = (torch.tensor(lr, dtype=moving[0][0].dtype), counts)
        self.params, self.moving = params, moving
        self.recording = Recording(step, params, moving[0], self.fixed, exact=False, stacked=True)
        assert self.recording.program is not None
        self.program: Program = self.recording.program

    def play(self, *, native: bool, one_by_one: bool = False) -> tuple[list[Tensor], list[Tensor]]:
        """All steps from the start."""
        carry = [value.clone() for value in self.params.values()]
        begun = self.recording.begin(carry, self.fixed)
        if native and not one_by_one:
            return self.recording.steps(carry, self.moving, begun)
        results = []
        for one in self.moving:
            if native:
                carry, found = self.recording.steps(carry, [one], begun)
                results += found
            else:
                carry, result = self.recording.step(carry, one, begun)
                results.append(result)
        return carry, results

    def agree(self) -> None:
        """By the kernels and by PyTorch."""
        for one, other in zip(self.play(native=True), self.play(native=False), strict=True):
            for a, b in zip(one, other, strict=True):
                torch.testing.assert_close(a, b, rtol=CLOSE[a.dtype], atol=CLOSE[a.dtype])


@settings(deadline=None, max_examples=30)
@given(
    clients=st.integers(1, 12),
    size=st.integers(1, 13),
    sizes=st.lists(st.integers(1, 70), min_size=1, max_size=3),
    classes=st.integers(1, 19),
    padded=st.booleans(),
    dtype=st.sampled_from([torch.float64, torch.float32]),
)
def test_any_small_network(
    clients: int, size: int, sizes: list[int], classes: int, padded: bool, dtype: torch.dtype
) -> None:
    """Widths that fill no vector, one or several; as many clients as classes, or one."""
    moving = [batch(clients, size, sizes[0], classes, dtype, seed) for seed in range(3)]
    Both(trained(padded), networks(clients, [*sizes, classes], dtype), moving).agree()


@pytest.mark.parametrize("loss", ["ce", "tce", "wsm", "fedlc", "balanced"])
@pytest.mark.parametrize("padded", [False, True])
def test_it_is_played_by_the_kernels(padded: bool, loss: str) -> None:
    """A network, its loss and SGD: nothing of it is left to PyTorch, and several steps are one call."""
    moving = [batch(4, 10, 64, 10, torch.float32, seed) for seed in range(3)]
    both = Both(trained(padded, loss=loss), networks(4, [64, 64, 10], torch.float32), moving)
    both.agree()
    assert not both.program.unknown
    together, apart = both.play(native=True), both.play(native=True, one_by_one=True)
    assert len(both.program.plans) == 1, "the plan serves again"
    for one, other in zip((*together[0], *together[1]), (*apart[0], *apart[1]), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (torch.sin, "aten.sin"),
        (lambda logits: logits * torch.arange(logits.shape[-1]), "an argument"),
        (lambda logits: logits.flip(-1), "aten.flip"),
    ],
    ids=["an operation", "a value of all clients", "another order"],
)
def test_what_is_not_known_is_left_to_pytorch(change: Callable[[Tensor], Tensor], why: str) -> None:
    """The whole step then, and it says what."""
    both = Both(trained(change=change), networks(3, [5, 4], torch.float64), [batch(3, 6, 5, 4, torch.float64)])
    both.agree()
    ((_, said),) = both.program.unknown
    assert why in said
    assert not both.program.plans


def test_as_many_clients_as_a_layer_is_wide() -> None:
    """A value of all clients of that length is not taken for one number of each."""
    wide = 6

    def every(params: Tensors, moving: Any, fixed: Any) -> tuple[Tensors, Tensor]:
        (lr, _), received = fixed, torch.arange(wide, dtype=torch.float64)
        params = {name: value - lr * (value - received) for name, value in params.items()}
        return params, params["w"].sum(1)

    both = Both(every, {"w": random(wide, wide)}, [batch(wide, 2, 3, wide, torch.float64)])
    both.agree()
    assert both.program.unknown[0][1] == "values of other rank"


def test_large_products_are_left_to_pytorch() -> None:
    """They are as fast there."""
    width = int(LARGEST**0.5)
    both = Both(trained(), networks(1, [width, width, 2], torch.float32), [batch(1, 2, width, 2, torch.float32)])
    both.agree()
    assert both.program.unknown[0][1] == "a large product"


def test_arguments_that_lie_otherwise() -> None:
    """Batches cut from larger ones have other strides, and get a plan of their own."""
    moving = [batch(3, 6, 5, 4, torch.float64, seed) for seed in range(2)]
    both = Both(trained(), networks(3, [5, 4], torch.float64), moving)
    both.agree()
    wide = torch.zeros(3, 9, 5, dtype=torch.float64)
    wide[:, :6] = moving[1][0]
    both.moving = [moving[0], (wide[:, :6], *moving[1][1:])]
    both.agree()
    together, apart = both.play(native=True), both.play(native=True, one_by_one=True)
    for one, other in zip((*together[0], *together[1]), (*apart[0], *apart[1]), strict=True):
        assert torch.equal(one, other), "the same bits however steps are collected"


def test_only_so_many_layouts_are_remembered() -> None:
    """Batches that lie otherwise every time do not fill memory."""
    inputs, labels, real = batch(3, 6, 5, 4, torch.float64)
    both = Both(trained(), networks(3, [5, 4], torch.float64), [(inputs, labels, real)])
    for room in range(6, 6 + 3 * REMEMBERED):
        wide = torch.zeros(3, room, 5, dtype=torch.float64)
        wide[:, :6] = inputs
        both.moving = [(wide[:, :6], labels, real)]
        both.agree()
    assert len(both.program.plans) + len(both.program.unknown) <= REMEMBERED


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_what_is_not_a_number_stays(dtype: torch.dtype) -> None:
    """In the loss and parameters of the client that has it, and of nobody else."""
    (inputs, labels, real) = batch(3, 6, 5, 4, dtype)
    inputs[1, 2, 3] = float("nan")
    both = Both(trained(), networks(3, [5, 7, 4], dtype), [(inputs, labels, real)])
    params, (loss,) = both.play(native=True)
    assert not both.program.unknown
    assert loss.isnan().tolist() == [False, True, False]
    for value in params:
        assert value[1].isnan().any()
        assert value[[0, 2]].isfinite().all()


@pytest.mark.parametrize("label", [4, -1, 10**9])
def test_a_label_that_is_no_output(label: int) -> None:
    """An error, as PyTorch has it, and nothing is read or written elsewhere."""
    inputs, labels, real = batch(3, 6, 5, 4, torch.float32)
    both = Both(trained(), networks(3, [5, 4], torch.float32), [(inputs, labels, real)])
    both.agree()
    wrong = labels.clone()
    wrong[1, 2] = label
    both.moving = [(inputs, wrong, real)]
    with pytest.raises(ValueError, match="none of the model's outputs"):
        both.play(native=True)
    with pytest.raises(RuntimeError, match="out of bounds"):
        both.play(native=False)


def test_logits_far_apart() -> None:
    """exp(−200) is 0 and the greatest logit counts 1; within a few units of the last place elsewhere."""
    logits = torch.linspace(-120, 0, 16).repeat(2, 4, 1)
    logits[0, 1] = torch.linspace(-1, 1, 16)
    identity = torch.eye(16).repeat(2, 1, 1)
    params = {"w0": identity, "b0": torch.zeros(2, 16)}
    moving = (logits, torch.zeros(2, 4, dtype=torch.int64), torch.ones(2, 4))
    both = Both(trained(), params, [moving], lr=1.0)
    (_, bias), (loss,) = both.play(native=True)
    assert not both.program.unknown
    exact = logits.double()
    torch.testing.assert_close(loss.double(), (exact.logsumexp(-1) - exact[..., 0]).mean(-1), rtol=1e-6, atol=0)
    expected = -(exact.softmax(-1) - F.one_hot(torch.zeros(2, 4, dtype=torch.int64), 16)).mean(1)
    torch.testing.assert_close(bias.double(), expected, rtol=1e-6, atol=1e-12)
