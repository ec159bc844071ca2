"""FedSGD: one full-batch step a client, and centralised gradient descent when everybody takes part."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.func import functional_call

import fedretain
from fedretain.data.transforms import draw_crop_flip
from fedretain.tensors import Tensors


def descend(played: Any, params: Tensors, inputs: torch.Tensor, labels: torch.Tensor, lr: float) -> Tensors:
    leaves = {name: value.detach().clone().requires_grad_() for name, value in params.items()}
    loss = torch.nn.functional.cross_entropy(functional_call(played.world.model, leaves, (inputs,)), labels)
    gradients = torch.autograd.grad(loss, tuple(leaves.values()))
    return {name: params[name] - lr * g for name, g in zip(leaves, gradients, strict=True)}


@pytest.mark.parametrize("local", [{}, {"drop_last": True}, {"steps": 1}, {"epochs": 1}, {"batch_size": 100}])
def test_a_client_takes_one_full_batch_gradient_step(play: Any, assert_close: Any, local: dict[str, Any]) -> None:
    """Whatever local.batch_size says (6 here, or 100), and nothing is dropped."""
    played = play(method="fedsgd", participation=2, local=local)
    for received, uploads, row in zip(played.received, played.uploads, played.rows, strict=True):
        assert row["clients"]["steps"] == [1, 1]
        for k, upload in uploads.items():
            inputs, labels = played.world.federation.examples(played.world.federation.train[k])
            expected = descend(played, received.params, inputs, labels, 0.2)
            assert_close({n: v[0] for n, v in upload.params.items()}, expected)


def test_with_everybody_it_is_gradient_descent_on_the_union(play: Any, assert_close: Any) -> None:
    """Σ_k (n_k/n)·∇L_k is the gradient of the mean over all n examples; four rounds, η decaying."""
    played = play(method="fedsgd", rounds=4, local={"lr_decay": 0.9})
    federation, params = played.world.federation, played.start.params
    inputs, labels = federation.normalise(federation.inputs), federation.labels
    for t, end in enumerate(played.ends):
        params = descend(played, params, inputs, labels, 0.2 * 0.9**t)
        assert_close(end.state.params, params)


def test_augmented_batches_draw_as_much_as_a_client_has(play: Any, monkeypatch: Any) -> None:
    """Not as much as the largest batch there could be: that would be 2³¹ draws."""
    sizes = []

    def counted(rng: np.random.Generator, steps: int, batch: int) -> np.ndarray:
        sizes.append(steps * batch)
        assert batch < 1000
        return draw_crop_flip(rng, steps, batch)

    monkeypatch.setattr("fedretain.engines.loop.draw_crop_flip", counted)
    rng = np.random.default_rng(0)
    images, labels = rng.integers(0, 255, (30, 8, 8)).astype(np.uint8), rng.integers(0, 3, 30)
    data = fedretain.from_arrays(images, labels, images, labels)
    partition = {"kind": "iid", "clients": 3, "validation": 0.0}
    played = play(data, method="fedsgd", rounds=1, partition=partition, local={"augment": "crop_flip"})
    assert played.rows[0]["clients"]["steps"] == [1, 1, 1]
    assert sizes == [10, 10, 10]
