"""Many models on the test set: the numbers of each alone, whatever stands beside it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedretain import evaluation
from fedretain.config import make_experiment
from fedretain.data import from_arrays
from fedretain.engines import World
from fedretain.evaluation import Model, cross_entropies, evaluate, evaluate_all, is_right, of_each
from fedretain.experiment import build_world
from fedretain.randomness import stream

TEST = 40


class Asking(nn.Module):
    """Decides by a value of its own: several of them cannot be one call."""

    def __init__(self, shape: tuple[int, int, int], classes: int) -> None:
        super().__init__()
        self.linear = nn.Linear(int(np.prod(shape)), classes)

    def forward(self, inputs: Tensor) -> Tensor:
        sign = 1 if self.linear.bias[0].item() > 0 else -1
        logits: Tensor = sign * self.linear(inputs.flatten(1))
        return logits


def world_of(model: Any, shape: tuple[int, int, int] = (1, 8, 8), **keys: Any) -> World:
    """Forty random test examples of three classes."""
    rng = stream(0, "evaluation test")
    inputs, labels = rng.normal(size=(TEST, *shape)).astype(np.float32), np.arange(TEST) % 3
    given = {"model": model, "partition": {"kind": "iid", "clients": 2}, "precision": "float64", **keys}
    return build_world(make_experiment(given), from_arrays(inputs, labels, inputs, labels))


def models_of(world: World, count: int) -> list[Model]:
    """The world's own model, with other random parameters every time."""
    rng = stream(1, "evaluation models")
    return [
        (
            {name: torch.from_numpy(rng.normal(size=p.shape)).to(p) for name, p in world.model.named_parameters()},
            {name: buffer.detach().clone() for name, buffer in world.model.named_buffers()},
        )
        for _ in range(count)
    ]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One entry for every forward pass, however many models share it."""
    seen: list[int] = []
    forward = evaluation.forward
    monkeypatch.setattr(evaluation, "forward", lambda *given, **named: (seen.append(1), forward(*given, **named))[1])
    return seen


@pytest.mark.parametrize("batch_size", [1, 7, 1000])
def test_evaluate_equals_a_direct_computation(batch_size: int) -> None:
    """Accuracy and mean −log softmax(f)_y over the test set, in float64, by NumPy."""
    world = world_of({"name": "mlp", "hidden": [5]})
    ((params, buffers),) = models_of(world, 1)
    found = evaluate(world, params, buffers, batch_size)
    world.model.load_state_dict(params)
    with torch.no_grad():
        logits = world.model.eval()(world.federation.normalise(world.federation.test.inputs)).cpu().numpy()
    labels = world.federation.test.labels.cpu().numpy()
    exact = np.log(np.exp(logits).sum(1)) - logits[np.arange(len(labels)), labels]
    assert found["test_accuracy"] == (logits.argmax(1) == labels).mean()
    assert found["test_loss"] == pytest.approx(exact.mean(), rel=1e-12)


@pytest.mark.parametrize(("precision", "rounding"), [("float64", 1e-13), ("float32", 1e-5)])
@pytest.mark.parametrize("batch_size", [1, 7, 1000])
@pytest.mark.parametrize("hidden", [[], [5], [64, 32]])
def test_a_stack_gives_the_numbers_of_each_alone(
    hidden: list[int], batch_size: int, precision: str, rounding: float
) -> None:
    """No example's two largest logits are close enough here to change places: accuracies are equal."""
    world = world_of({"name": "mlp", "hidden": hidden}, precision=precision)
    models = models_of(world, 12)
    logits = of_each(world, models, world.federation.test.batches(1000), lambda logits, _: logits.movedim(-1, 1))
    first, second = np.sort(logits, axis=1)[:, -2:].swapaxes(0, 1)[::-1]
    assert (first - second).min() > 100 * rounding
    together = evaluate_all(world, models, batch_size)
    for found, (params, buffers) in zip(together, models, strict=True):
        alone = evaluate(world, params, buffers, batch_size)
        assert found["test_accuracy"] == alone["test_accuracy"]
        assert found["test_loss"] == pytest.approx(alone["test_loss"], rel=rounding)
    assert len({found["test_loss"] for found in together}) == 12


@pytest.mark.parametrize("precision", ["float32", "float64"])
@pytest.mark.parametrize("batch_size", [1, 7, 1000])
def test_without_stacks_every_bit_is_that_of_each_alone(batch_size: int, precision: str) -> None:
    """784 inputs: sums of so many are made in another order when models are multiplied as one."""
    world = world_of({"name": "mlp", "hidden": [100]}, (1, 28, 28), precision=precision)
    models = models_of(world, 5)
    alone = [evaluate(world, params, buffers, batch_size) for params, buffers in models]
    assert evaluate_all(world, models, batch_size, stacked=False) == alone


def test_the_test_set_passes_by_once(calls: list[int]) -> None:
    """Forty examples in batches of seven: six forward passes for twelve models, or 72 of one each."""
    world = world_of({"name": "mlp", "hidden": [5]})
    models = models_of(world, 12)
    evaluate_all(world, models, 7)
    assert len(calls) == 6
    evaluate_all(world, models, 7, stacked=False)
    assert len(calls) == 6 + 72


def test_a_model_that_overflows_disturbs_no_other() -> None:
    world = world_of({"name": "mlp", "hidden": [5]})
    models = models_of(world, 4)
    broken = {name: value * 1e300 for name, value in models[1][0].items()}
    mixed = evaluate_all(world, [models[0], (broken, {}), *models[2:]], 100)
    assert not np.isfinite(mixed[1]["test_loss"])
    for index in (0, 2, 3):
        assert mixed[index] == pytest.approx(evaluate(world, *models[index], 100), rel=1e-13)


def test_a_model_that_cannot_be_stacked_is_asked_alone() -> None:
    """Half of these turn their logits around, by the sign of a bias."""
    world = world_of(f"{__name__}:Asking")
    models = models_of(world, 6)
    assert len({bool(params["linear.bias"][0] > 0) for params, _ in models}) == 2
    assert evaluate_all(world, models, 7) == [evaluate(world, *model, 7) for model in models]


def test_models_with_convolutions_stay_alone_on_a_cpu(calls: list[int]) -> None:
    """Several at once would be slower."""
    world = world_of("lenet", (1, 28, 28), device="cpu")
    models = models_of(world, 3)
    right = of_each(world, models, world.federation.test.batches(20), is_right)
    assert right.shape == (3, TEST)
    assert len(calls) == 6


def test_models_with_convolutions_are_stacked_on_an_accelerator() -> None:
    """At most 16 of them; the meta device stands in for one. Without a stack, each alone."""
    world = world_of("lenet", (1, 28, 28))
    params, buffers = models_of(world, 1)[0]
    elsewhere = {name: value.to("meta") for name, value in params.items()}
    stacks = evaluation._stacks([(elsewhere, buffers)] * 20, True)
    assert [len(stack["classifier.bias"]) for stack, _ in stacks] == [16, 4]
    assert len(evaluation._stacks([(elsewhere, buffers)] * 20, False)) == 20


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("model", ["lenet", {"name": "mlp", "hidden": [64]}])
def test_a_stack_on_a_gpu(model: Any, calls: list[int]) -> None:
    """float64, so that no rounding decides."""
    world = world_of(model, (1, 28, 28), device="cuda")
    models = models_of(world, 5)
    together = evaluate_all(world, models, 20)
    assert len(calls) == 2
    for found, one in zip(together, models, strict=True):
        assert found == pytest.approx(evaluate(world, *one, 20), rel=1e-10)


def test_cross_entropies_by_hand() -> None:
    """Logits (0, ln 3) give probabilities ¼ and ¾: −ln ¼ = ln 4 for label 0, −ln ¾ = ln 4 − ln 3 for label 1.

    The second model says (ln 3, 0): the other way round.
    """
    three = float(np.log(3))
    logits = torch.tensor([[[0, three], [0, three]], [[three, 0], [three, 0]]], dtype=torch.float64)
    four = float(np.log(4))
    expected = torch.tensor([[four, four - three], [four - three, four]], dtype=torch.float64)
    torch.testing.assert_close(cross_entropies(logits, torch.tensor([0, 1])), expected)
