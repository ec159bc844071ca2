"""FedReg against Algorithm D.1 written out plainly here, and the properties that its equations promise."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.func import functional_call

import fedretain
from fedretain.engines.loop import LoopTask
from fedretain.engines.schedule import local_batches
from fedretain.methods import Batch, FedReg, Own, Received
from fedretain.tensors import Tensors, inner, subtract


def scene(played: Any, client: int, method: FedReg) -> tuple[Received, Own, LoopTask]:
    """One client at the start of a round, its pseudo and perturbed data made."""
    federation = played.world.federation
    numbers = federation.train[client]
    inputs, labels = federation.examples(numbers)
    counts = federation.class_counts(client)
    own = Own(Batch(inputs, labels), counts, torch.tensor(len(numbers)), torch.tensor(1), {}, {})
    received = Received(played.start.params, played.start.buffers, {}, 1)
    task = LoopTask(played.world, counts, {n: b.clone() for n, b in played.start.buffers.items()}, 1)
    return received, own._replace(prepared=method.prepare(received, own, task)), task


def vector(tensors: Tensors) -> Tensor:
    return torch.cat([value.detach().flatten() for value in tensors.values()])


class Plain:
    """Algorithm D.1 for one client, on one flat vector of parameters.

    The loss is −Σ_c y_c f_c + log Σ_c β_c exp f_c: cross-entropy when β = 1, WSM when β are the class proportions.
    """

    def __init__(self, played: Any, params: Tensors, beta: Tensor) -> None:
        self.model, self.beta = played.world.model, beta
        self.shapes = {name: value.shape for name, value in params.items()}
        self.w = vector(params)
        self.weights: list[tuple[float, float]] = []

    def logits(self, theta: Tensor, x: Tensor) -> Tensor:
        parts = theta.split([shape.numel() for shape in self.shapes.values()])
        params = {n: part.view(shape) for (n, shape), part in zip(self.shapes.items(), parts, strict=True)}
        return functional_call(self.model, params, (x,))

    def loss(self, theta: Tensor, x: Tensor, y: Tensor) -> Tensor:
        f = self.logits(theta, x)
        return ((self.beta * f.exp()).sum(1).log() - (y * f).sum(1)).mean()

    def gradient(self, theta: Tensor, x: Tensor, y: Tensor) -> Tensor:
        leaf = theta.detach().clone().requires_grad_()
        (g,) = torch.autograd.grad(self.loss(leaf, x, y), leaf)
        return g

    def ascend(self, x: Tensor, y: Tensor, eta: float, steps: int) -> Tensor:
        for _ in range(steps):
            x = x.detach().clone().requires_grad_()
            (g,) = torch.autograd.grad(self.loss(self.w, x, y), x)
            x = x + eta * g.sign()
        return x.detach()

    def train(self, x: Tensor, y: Tensor, batches: list[Any], lr: float, m: FedReg, size: int) -> Tensor:
        assert m.eta_p is not None
        x_s, x_p = (self.ascend(x, y, eta, m.ascent_steps) for eta in (m.eta_s, m.eta_p))
        y_s = self.logits(self.w, x_s).softmax(1).detach()
        pseudo = [slice(at, at + size) for at in range(0, len(x), size)]
        theta = self.w.clone()
        for i, at in enumerate(batches):
            part = pseudo[i % len(pseudo)]
            slow = m.gamma * theta + (1 - m.gamma) * self.w
            g = self.gradient(slow, x[at], y[at])
            if m.modified_gradient:
                g_u = self.gradient(slow, x_s[part], torch.full_like(y_s[part], 1 / y_s.shape[1]))
                g = g - (g @ g_u) / (g_u @ g_u) * g_u
            theta = theta - lr * g
            middle = 0.5 * (theta + self.w)
            g_s = self.gradient(middle, x_s[part], y_s[part])
            g_p = self.gradient(middle, x_p[part], y[part])
            w_s = max(float((theta - self.w) @ g_s / (g_s @ g_s)), 0.0)
            w_p = max(float((theta - w_s * g_s - self.w) @ g_p / (g_p @ g_p)), 0.0)
            self.weights.append((w_s, w_p))
            theta = theta - w_s * g_s - w_p * g_p
        return theta


@pytest.mark.parametrize(
    ("gamma", "modified_gradient", "loss"),
    [(0.0, False, "ce"), (0.4, False, "ce"), (1.0, False, "ce"), (0.4, True, "ce"), (0.4, False, "wsm")],
)
def test_two_rounds_are_algorithm_d1(play: Any, gamma: float, modified_gradient: bool, loss: str) -> None:
    """Unequal clients, several epochs, a last pseudo batch that is smaller than the others; unweighted mean.

    With cross-entropy the received model is the best there is for its own answers y_s, so w_s > 0 in every step; with
    WSM it is not, and max(…, 0) cuts off both weights now and then.
    """
    given = {"gamma": gamma, "eta_s": 0.15, "eta_p": 0.1, "ascent_steps": 4, "modified_gradient": modified_gradient}
    played = play(method={"name": "fedreg", **given}, loss=loss, rounds=2, local={"epochs": 3, "lr_decay": 0.5})
    method, federation, weights = FedReg(**given), played.world.federation, []
    params = played.start.params
    for t, end in enumerate(played.ends, start=1):
        ends = []
        for k in range(5):
            counts = federation.class_counts(k).double()
            plain = Plain(played, params, counts / counts.sum() if loss == "wsm" else torch.ones_like(counts))
            numbers = federation.train[k]
            x, y = federation.examples(numbers)
            y = torch.nn.functional.one_hot(y, 4).double()
            batches = local_batches(0, t, k, len(numbers), played.world.local)
            ends.append(plain.train(x, y, batches, 0.2 * 0.5 ** (t - 1), method, 6))
            weights += plain.weights
            np.testing.assert_allclose(
                vector({n: v[0] for n, v in played.uploads[t - 1][k].params.items()}), ends[-1], rtol=1e-10, atol=1e-12
            )
        params = end.state.params
        np.testing.assert_allclose(vector(params), torch.stack(ends).mean(0), rtol=1e-10, atol=1e-12)
    pseudo, perturbed = zip(*weights, strict=True)
    assert min(perturbed) == 0 < max(perturbed)
    assert (min(pseudo) == 0) == (loss == "wsm")
    assert max(pseudo) > 0


@pytest.mark.parametrize("loss", ["ce", "wsm"])
def test_corrections_make_the_constraints_hold_to_first_order(play: Any, loss: str) -> None:
    """Eq. 8 and 9: ⟨w − θ', g_s⟩ ≥ 0 after the pseudo correction, ⟨w − θ'', g_p⟩ ≥ 0 after the perturbed one.

    Where θ already satisfied the constraint nothing changes; where not, it ends on the boundary, ⟨w − θ', g_s⟩ = 0.
    """
    played = play(rounds=0, loss=loss)
    off = FedReg(gamma=0.5, eta_s=0.2, eta_p=0.15, ascent_steps=4, pseudo_weight=0, perturbed_weight=0)
    seen = set()
    for client in range(5):
        received, own, task = scene(played, client, off)
        w = received.params
        theta = w
        for index in range(6):
            batch = task.part(own.data, index)
            steps = [
                replace(off, pseudo_weight=s, perturbed_weight=p).step(theta, batch, index, received, own, task)[0]
                for s, p in ((0.0, 0.0), (1.0, 0.0), (1.0, 1.0))
            ]
            plain, after_s, after_p = steps
            middle = {n: (v + w[n]) / 2 for n, v in plain.items()}
            pseudo = task.part(Batch(own.prepared["x_s"], own.prepared["y_s"]), index)
            perturbed = task.part(Batch(own.prepared["x_p"], own.data.labels), index)
            for before, after, data in ((plain, after_s, pseudo), (after_s, after_p, perturbed)):
                _, g = task.gradient(middle, data, training=False)
                violated = bool(inner(subtract(w, before), g) < 0)
                size = float((inner(subtract(before, w), subtract(before, w)) * inner(g, g)).sqrt())
                left = float(inner(subtract(w, after), g))
                assert left >= -1e-14 * size
                if violated:
                    assert left == pytest.approx(0, abs=1e-14 * size)
                else:
                    assert all(torch.equal(before[n], after[n]) for n in before)
                seen.add((data is pseudo, violated))
            theta = after_p
    assert {(True, True), (False, False)} < seen
    assert ((True, False) if loss == "wsm" else (False, True)) in seen


def test_modified_gradient_is_orthogonal_to_the_uniform_label_gradient(play: Any) -> None:
    """Eq. 12: ⟨g − v·g', g'⟩ = 0; the step without corrections moves by −η times that gradient."""
    played = play(rounds=0)
    plain = FedReg(gamma=0.3, eta_s=0.2, pseudo_weight=0, perturbed_weight=0)
    for client in range(5):
        received, own, task = scene(played, client, plain)
        theta = {
            n: v + 0.1 * torch.sin(torch.arange(v.numel()).double()).view_as(v) for n, v in received.params.items()
        }
        slow = {n: 0.3 * v + 0.7 * received.params[n] for n, v in theta.items()}
        batch = task.part(own.data, 0)
        pseudo = task.part(Batch(own.prepared["x_s"], torch.full_like(own.prepared["y_s"], 1 / 4)), 0)
        _, semantic = task.gradient(slow, pseudo, training=False)
        moved = {
            mg: subtract(theta, replace(plain, modified_gradient=mg).step(theta, batch, 0, received, own, task)[0])
            for mg in (False, True)
        }
        norms = {mg: float((inner(g, g) * inner(semantic, semantic)).sqrt()) for mg, g in moved.items()}
        assert abs(float(inner(moved[True], semantic))) < 1e-13 * norms[True]
        assert abs(float(inner(moved[False], semantic))) > 1e-4 * norms[False]


@pytest.mark.parametrize("eta", [0.0, 0.4])
def test_generated_data_share_no_memory_with_the_training_data(play: Any, eta: float) -> None:
    """Not even when the steps have no length, and the inputs are as they were."""
    played = play(rounds=0)
    before = played.world.federation.inputs.clone()
    _, own, _ = scene(played, 0, FedReg(gamma=0.5, eta_s=eta, eta_p=eta))
    fresh = played.world.federation.examples(played.world.federation.train[0])[0]
    assert torch.equal(own.data.inputs, fresh)
    assert torch.equal(played.world.federation.inputs, before)
    tensors = [own.data.inputs, own.prepared["x_s"], own.prepared["x_p"], played.world.federation.inputs]
    assert len({tensor.untyped_storage().data_ptr() for tensor in tensors}) == 4
    assert torch.equal(own.prepared["x_s"], own.data.inputs) == (eta == 0)


def test_pseudo_data_follow_the_sign_of_the_gradient_without_clamping(play: Any) -> None:
    """Ten steps of 0.5 leave the range of the inputs; every coordinate moves by 0.5·(an integer of at most 10).

    η_p is 0.01·η_s unless given; the loss with the true label rises; y_s is the received model's own answer.
    """
    played = play(rounds=0)
    received, own, task = scene(played, 0, FedReg(gamma=0.5, eta_s=0.5))
    x, x_s, x_p = own.data.inputs, own.prepared["x_s"], own.prepared["x_p"]
    moves = (x_s - x) / 0.5
    torch.testing.assert_close(moves, moves.round(), rtol=0, atol=1e-9)
    assert 1 < moves.abs().max() <= 10
    assert x_s.max() > x.max() + 1
    assert (x_p - x).abs().max() == pytest.approx(10 * 0.005, abs=1e-12)
    losses = [task.losses(task.logits(received.params, z), own.data.labels) for z in (x, x_p, x_s)]
    assert bool((losses[0] < losses[1]).all())
    assert bool((losses[1] < losses[2]).all())
    answer = functional_call(played.world.model, received.params, (x_s,)).softmax(1)
    torch.testing.assert_close(own.prepared["y_s"], answer, rtol=1e-13, atol=1e-15)


def test_generation_runs_in_evaluation_mode(play: Any) -> None:
    """With batch norm: running statistics stay, and an example's pseudo data do not depend on its neighbours."""
    rng = np.random.default_rng(1)
    images, labels = rng.normal(size=(8, 1, 8, 8)).astype(np.float32), np.arange(8) % 4
    names = np.array(["a"] * 4 + ["b"] * 4)
    data = fedretain.from_arrays(images, labels, images, labels, columns={"owner": (names, names)})
    played = play(data, rounds=0, model={"name": "shallow_resnet", "width": 2})
    assert played.start.buffers
    method = FedReg(gamma=0.5, eta_s=0.1, ascent_steps=3)
    received, own, task = scene(played, 0, method)
    assert all(torch.equal(task.buffers[n], b) for n, b in played.start.buffers.items())
    half = own._replace(data=Batch(own.data.inputs[:2], own.data.labels[:2]), prepared={})
    alone = method.prepare(received, half, task)
    for name, value in alone.items():
        torch.testing.assert_close(value, own.prepared[name][:2], rtol=1e-12, atol=1e-13)


def test_twice_the_same_bits(play: Any, assert_same_bits: Any) -> None:
    method = {"name": "fedreg", "gamma": 0.4, "eta_s": 0.2, "modified_gradient": True}
    first, second = (play(method=method, participation=3, loss="wsm") for _ in range(2))
    assert_same_bits(first.params, second.params)
    for a, b in zip(first.uploads[-1].values(), second.uploads[-1].values(), strict=True):
        assert_same_bits(a.params, b.params)
