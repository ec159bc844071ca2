"""A trace holds the operations of a function, whatever transformations it uses, and imports no compiler."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import grad, vmap

from fedretain.engines.tracing import Seen, trace, uncompiled
from fedretain.randomness import stream

ROOT = Path(__file__).parents[2]


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.from_numpy(stream(seed, "tracing").normal(size=shape))


HELD = torch.arange(3.0, dtype=torch.float64)


def by_hand(x: Tensor, w: Tensor) -> list[Tensor]:
    return [(x @ w).relu().sum(0) + HELD, x.amax()]


def by_transformations(x: Tensor, w: Tensor) -> list[Tensor]:
    return [vmap(grad(lambda row, w: (row @ w).square().sum()), in_dims=(0, None))(x, w)]


def by_automatic_differentiation(x: Tensor, w: Tensor) -> list[Tensor]:
    with torch.enable_grad():
        leaf = w.detach().requires_grad_()
        return list(torch.autograd.grad((x @ leaf).tanh().sum(), leaf))


def by_several_results(x: Tensor, w: Tensor) -> list[Tensor]:
    variance, mean = torch.var_mean(x, 0)
    return [mean, variance * w.sum()]


@pytest.mark.parametrize(
    "function",
    [by_hand, by_transformations, by_automatic_differentiation, by_several_results],
    ids=lambda f: f.__name__,
)
def test_a_trace_computes_what_the_function_does(function: Callable[[Tensor, Tensor], list[Tensor]]) -> None:
    """On other numbers than it was made with, to the bit."""
    module = trace(function, [numbers(4, 2), numbers(2, 3, seed=1)])
    x, w = numbers(4, 2, seed=2), numbers(2, 3, seed=3)
    found, expected = module(x, w), function(x, w)
    assert len(found) == len(expected)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_a_tensor_that_is_given_twice_has_two_places() -> None:
    """f(a, b) = a − 2b: traced with one tensor in both places, 3 − 2·5 = −7."""
    same = torch.ones(())
    module = trace(lambda a, b: [a - 2 * b], [same, same])
    assert module(torch.tensor(3.0), torch.tensor(5.0))[0] == -7


def test_what_is_no_tensor_goes_through() -> None:
    assert trace(lambda x, n: [x + n, None], [torch.ones(2), 3])(torch.zeros(2), 0)[1] is None


def test_nodes_know_their_tensors() -> None:
    module = trace(lambda x: [x.t()], [torch.zeros(2, 3, dtype=torch.float32)])
    seen = [node.meta["val"] for node in module.graph.nodes if node.op != "output"]
    cpu = torch.device("cpu")
    assert seen == [Seen((2, 3), torch.float32, cpu, True, (3, 1)), Seen((3, 2), torch.float32, cpu, False, (1, 3))]
    assert not seen[1].is_contiguous()
    assert seen[1].stride() == (1, 3)


@pytest.mark.parametrize("decide", [lambda x: float(x), lambda x: bool(x > 0), lambda x: torch.equal(x, x + 1)])
def test_a_number_for_python_is_refused(decide: Callable[[Tensor], Any]) -> None:
    with pytest.raises(RuntimeError, match="cannot turn a tensor into a number"):
        trace(lambda x: [x * decide(x)], [torch.ones(())])


def test_a_number_that_no_argument_decides_is_fine() -> None:
    module = trace(lambda x: [x * float(torch.tensor(2.5))], [torch.ones(())])
    assert module(torch.tensor(2.0))[0] == 5.0


TRAINS = """
import sys
import numpy as np
from fedretain.config import make_experiment
from fedretain.engines.recorded import RecordedEngine
from fedretain.engines.vectorised import VectorisedEngine
from fedretain.experiment import build_world
from fedretain.methods import Received

given = {"data": "digits", "device": "cpu", "method": {"name": "fedprox", "mu": 0.1}, "local": {"steps": 5}}
world = build_world(make_experiment(given))
received = Received({name: p.detach() for name, p in world.model.named_parameters()}, {}, {}, 1)
for engine in (RecordedEngine(world), VectorisedEngine(world)):
    list(engine.train(received, np.array([0, 1]), lambda client: None))
    assert getattr(engine, "steps", engine).recordings
print(sorted({"torch._dynamo", "torch._inductor", "sympy"} & set(sys.modules)))
"""


def test_training_imports_no_compiler() -> None:
    """One client after another, recorded, and stacked."""
    done = subprocess.run([sys.executable, "-c", TRAINS], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.strip() == "[]"


AROUND = """
import sys, torch
from torch.func import grad
from fedretain.engines.tracing import uncompiled
x = torch.tensor(3.0)
with uncompiled():
    with uncompiled():
        assert grad(torch.square)(x) == 6
    assert "torch._dynamo" not in sys.modules
assert "_dynamo" not in vars(torch)
with uncompiled():
    assert torch._dynamo.compiled_autograd.reset is not None
    torch._dynamo.is_compiling()
    assert grad(torch.square)(x) == 6
assert torch._dynamo is sys.modules["torch._dynamo"]
with uncompiled():
    assert torch._dynamo is sys.modules["torch._dynamo"]
"""


def test_whoever_asks_for_the_compiler_gets_it() -> None:
    """It is left out only as long as nobody wants it; afterwards nothing stands in its place."""
    subprocess.run([sys.executable, "-c", AROUND], check=True, cwd=ROOT)


def test_an_error_leaves_nothing_in_place() -> None:
    before = vars(torch).get("_dynamo")
    with pytest.raises(ValueError, match="inside"), uncompiled():
        raise ValueError("inside")
    assert vars(torch).get("_dynamo") is before


def test_arguments_stay_as_they_are() -> None:
    """A function that writes into its argument writes into the given memory, as without a trace."""
    given = torch.ones(2)

    def write(x: Tensor) -> Sequence[Tensor]:
        return [x.add_(1)]

    module = trace(write, [given])
    assert given.tolist() == [2, 2]
    assert module(torch.zeros(2))[0].tolist() == [1, 1]
