"""The server: sums as they arrive equal a mean over everything at once."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fedretain.engines import Uploads
from fedretain.engines.sums import upload_bytes
from fedretain.methods import FedAvg, Method, Received
from fedretain.optimizers import ServerOptimizer
from fedretain.server import ServerState, advance, download_bytes, example_weights, receive
from fedretain.tensors import Tensors

CLIENTS = 5


def everything() -> Uploads:
    """Five clients' uploads, all in one chunk."""
    rng = np.random.default_rng(0)

    def draw(*shape: int) -> Tensor:
        return torch.from_numpy(rng.normal(size=(CLIENTS, *shape)))

    return Uploads(
        clients=np.arange(CLIENTS),
        params={},
        delta={"w": draw(3, 2), "b": draw(3)},
        buffers={"running_mean": draw(3), "num_batches_tracked": torch.tensor([3, 9, 4, 1, 2])},
        extras={"norm": draw(), "count": torch.tensor([1, 2, 3, 4, 5])},
        state={},
        train_loss=draw(),
        steps=np.ones(CLIENTS, int),
    )


def cut(uploads: Uploads, sizes: tuple[int, ...]) -> list[Uploads]:
    edges = np.cumsum((0, *sizes))

    def part(value: Any, a: int, b: int) -> Any:
        if value is None:
            return None
        return {n: v[a:b] for n, v in value.items()} if isinstance(value, dict) else value[a:b]

    return [Uploads(*(part(value, a, b) for value in uploads)) for a, b in pairwise(edges.tolist())]


WEIGHTS = torch.tensor([0.1, 0.2, 0.3, 0.15, 0.25], dtype=torch.float64)


@pytest.mark.parametrize("sizes", [(5,), (1, 1, 1, 1, 1), (2, 3), (1, 4)])
def test_sums_over_chunks_equal_the_weighted_mean(sizes: tuple[int, ...]) -> None:
    uploads = everything()
    reception, weights = receive(FedAvg(), iter(cut(uploads, sizes)), WEIGHTS)
    p = WEIGHTS.numpy()
    assert torch.equal(weights, WEIGHTS)
    for name, value in uploads.delta.items():
        np.testing.assert_allclose(reception.delta[name], np.einsum("k,k...->...", p, value.numpy()), rtol=1e-12)
    for name, value in uploads.extras.items():
        np.testing.assert_allclose(reception.mean[name], (p * value.numpy()).sum(), rtol=1e-12)
        np.testing.assert_allclose(reception.total[name], value.numpy().sum(), rtol=1e-12)
    running = uploads.buffers["running_mean"].numpy()
    np.testing.assert_allclose(reception.buffers["running_mean"], p @ running, rtol=1e-12)


@pytest.mark.parametrize("sizes", [(5,), (1, 1, 1, 1, 1), (4, 1)])
def test_whole_numbers_are_not_averaged(sizes: tuple[int, ...]) -> None:
    """The most advanced client's counter stands: max(3, 9, 4, 1, 2) = 9, still a whole number."""
    reception, _ = receive(FedAvg(), cut(everything(), sizes), WEIGHTS)
    assert reception.buffers["num_batches_tracked"].item() == 9
    assert not reception.buffers["num_batches_tracked"].is_floating_point()


@dataclass(frozen=True)
class ByCount(Method):
    """Weighs by an uploaded count."""

    def weigh(self, weights: Tensor, extras: Tensors) -> Tensor:
        """p_k ∝ count_k."""
        return extras["count"] / extras["count"].sum()


def test_a_method_that_weighs_sees_all_uploads_first() -> None:
    """Counts 1 … 5 make the weights k/15, whatever the weights were before."""
    uploads = everything()
    reception, weights = receive(ByCount(), iter(cut(uploads, (2, 3))), WEIGHTS)
    expected = np.arange(1, 6) / 15
    np.testing.assert_allclose(weights, expected, rtol=1e-6)
    np.testing.assert_allclose(reception.delta["b"], expected @ uploads.delta["b"].numpy(), rtol=1e-6)


def test_the_global_model_moves_by_the_averaged_change() -> None:
    """w ← w + η_s·Δ with η_s = 0.5."""
    uploads = everything()
    params = {"w": torch.zeros(3, 2, dtype=torch.float64), "b": torch.ones(3, dtype=torch.float64)}
    optimizer = ServerOptimizer("sgd", 0.5, 0.9, 0.9, 0.99, 1e-3)
    state = ServerState(4, params, {}, {}, optimizer.init(params))
    received = Received(params, {}, {}, 5)
    reception, _ = receive(FedAvg(), [uploads], WEIGHTS)
    after = advance(state, reception, received, FedAvg(), optimizer, participants=CLIENTS, population=9)
    assert after.round == 5
    assert torch.allclose(after.params["b"], 1 + 0.5 * (WEIGHTS @ uploads.delta["b"]))
    assert torch.equal(params["b"], torch.ones(3, dtype=torch.float64)), "the state before is left alone"


def test_weights_by_examples_and_uniform() -> None:
    """10, 20 and 70 of 100 examples; or a third each."""
    like = torch.zeros(1)
    sizes = np.array([10, 20, 70])
    assert example_weights(sizes, "examples", like).tolist() == pytest.approx([0.1, 0.2, 0.7])
    assert example_weights(sizes, "uniform", like).tolist() == pytest.approx([1 / 3] * 3)
    assert example_weights(sizes, "uniform", like).dtype == like.dtype


def test_bytes_on_the_wire() -> None:
    """Up, per client: 6 + 3 float64 of the model, 3 float64 and 1 int64 of statistics, 2 extras of 8 bytes = 15 · 8."""
    assert upload_bytes(everything()) == CLIENTS * 15 * 8
    received = Received({"w": torch.zeros(3)}, {"n": torch.zeros((), dtype=torch.int64)}, {"c": torch.zeros(2)}, 1)
    assert download_bytes(received) == 3 * 4 + 8 + 2 * 4
