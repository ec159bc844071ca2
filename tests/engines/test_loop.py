"""The oracle itself: a round by hand, and whole rounds against a plain PyTorch loop written here."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

import fedretain
from fedretain.config import make_experiment
from fedretain.data import Dataset
from fedretain.engines import LoopEngine
from fedretain.engines.schedule import local_batches, sample_cohort
from fedretain.errors import ConfigError, TrainingError
from fedretain.experiment import build_world
from fedretain.methods import Method
from fedretain.rounds import initial_state, train_rounds
from fedretain.runs.checkpoint import Checkpoint


def two_clients() -> Dataset:
    """Two numbers per example, two classes, two clients told apart by a column."""
    inputs = np.array([[1.0, 0.0], [0.0, 2.0], [1.0, 1.0]], dtype=np.float32)
    labels = np.array([0, 1, 1])
    return fedretain.from_arrays(
        inputs, labels, inputs, labels, columns={"owner": (np.array(["a", "b", "b"]), np.array(["a", "b", "b"]))}
    )


def settings(**keys: Any) -> dict[str, Any]:
    return {
        "rounds": 1,
        "participation": 1.0,
        "data": {"name": "digits", "normalise": "unit"},
        "partition": {"kind": "by_column", "column": "owner", "validation": 0.0},
        "model": {"name": "mlp", "hidden": []},
        "local": {"lr": 0.5, "steps": 1, "batch_size": 100},
        "precision": "float64",
        "forgetting": {"every": 0},
        **keys,
    }


def play(given: dict[str, Any], data: Dataset | None = None, start: dict[str, torch.Tensor] | None = None):
    experiment = make_experiment(given)
    world = build_world(experiment, data)
    state = initial_state(experiment, world)
    if start is not None:
        state = state._replace(params={name: start[name].clone() for name in state.params})
    rounds = list(train_rounds(experiment, world, LoopEngine(world), Checkpoint(state, {}, {})))
    return experiment, world, state, rounds


@pytest.mark.parametrize(("weights", "parts"), [("examples", (1 / 3, 2 / 3)), ("uniform", (1 / 2, 1 / 2))])
def test_one_fedavg_round_by_hand(weights: str, parts: tuple[float, float]) -> None:
    """A linear model from zero, one full-batch step of η = 0.5 on each client.

    At w = 0 every softmax is (½, ½), so an example (x, y) has ∂L/∂W = (½ − e_y) xᵀ and ∂L/∂b = ½ − e_y.
    Client a: x = (1, 0), y = 0: ∂b = (−½, ½), ∂W = [[−½, 0], [½, 0]]; after the step W_a = [[¼, 0], [−¼, 0]],
    b_a = (¼, −¼).
    Client b: x = (0, 2) and (1, 1), both y = 1, mean x = (½, 3/2): ∂b = (½, −½), ∂W = [[¼, ¾], [−¼, −¾]];
    W_b = [[−⅛, −⅜], [⅛, ⅜]], b_b = (−¼, ¼).
    The server takes p_a W_a + p_b W_b.
    """
    _, _, start, _ = play(settings(rounds=0), two_clients())
    zero = {name: torch.zeros_like(value) for name, value in start.params.items()}
    _, _, _, [(end, row, _)] = play(settings(server={"weights": weights}), two_clients(), zero)
    w_a, w_b = np.array([[1, 0], [-1, 0]]) / 4, np.array([[-1, -3], [1, 3]]) / 8
    b_a, b_b = np.array([1, -1]) / 4, np.array([-1, 1]) / 4
    np.testing.assert_allclose(end.state.params["classifier.weight"], parts[0] * w_a + parts[1] * w_b, atol=1e-15)
    np.testing.assert_allclose(end.state.params["classifier.bias"], parts[0] * b_a + parts[1] * b_b, atol=1e-15)
    assert row["clients"]["weight"] == pytest.approx(parts)
    assert row["train_loss"] == pytest.approx(np.log(2))
    # Each client receives and sends 6 numbers of 8 bytes.
    assert row["upload_bytes"] == row["download_bytes"] == 2 * 6 * 8


@pytest.mark.parametrize(
    ("model", "local"),
    [
        ({"name": "mlp", "hidden": [12]}, {"optimizer": "sgd", "momentum": 0.9, "weight_decay": 1e-3}),
        ({"name": "mlp", "hidden": [12]}, {"optimizer": "adam", "lr": 0.01}),
        ({"name": "shallow_resnet", "width": 4}, {"optimizer": "sgd", "lr_decay": 0.5}),
    ],
)
def test_rounds_agree_with_a_plain_pytorch_loop(model: dict[str, Any], local: dict[str, Any]) -> None:
    """Modules, torch.optim and load_state_dict, written without any of our training code; float64, three rounds.

    The ResNet has batch norm: its running statistics are averaged by examples, its counters are not.
    """
    given = settings(
        rounds=3,
        participation=3,
        data={"name": "digits"},
        partition={"kind": "dirichlet_by_class", "clients": 6, "alpha": 0.5},
        model=model,
        loss="ce",
        local={"lr": 0.05, "epochs": 1, "batch_size": 40, **local},
    )
    experiment, world, _, rounds = play(given)
    fed = world.federation
    model_ = copy.deepcopy(world.model)
    for t in range(1, 4):
        cohort = sample_cohort(0, t, 6, 3)
        states, sizes = [], []
        for k in cohort.tolist():
            client = copy.deepcopy(model_).train()
            lr = 0.05 * experiment.local.lr_decay ** (t - 1) if "lr" not in local else local["lr"]
            if local["optimizer"] == "adam":
                optimizer: torch.optim.Optimizer = torch.optim.Adam(client.parameters(), lr=lr)
            else:
                optimizer = torch.optim.SGD(
                    client.parameters(),
                    lr=lr,
                    momentum=local.get("momentum", 0),
                    weight_decay=local.get("weight_decay", 0),
                )
            numbers = fed.train[k]
            for at in local_batches(0, t, k, len(numbers), experiment.local):
                inputs, labels = fed.examples(numbers[at])
                optimizer.zero_grad()
                torch.nn.functional.cross_entropy(client(inputs), labels).backward()
                optimizer.step()
            states.append(client.state_dict())
            sizes.append(len(numbers))
        mean = {
            name: sum(n / sum(sizes) * s[name] for n, s in zip(sizes, states, strict=True))
            if value.is_floating_point()
            else torch.stack([s[name] for s in states]).amax(0)
            for name, value in states[0].items()
        }
        model_.load_state_dict(mean)
        ours = {**rounds[t - 1][0].state.params, **rounds[t - 1][0].state.buffers}
        for name, value in mean.items():
            torch.testing.assert_close(ours[name], value, rtol=1e-9, atol=1e-11)
            assert ours[name].dtype == value.dtype


def test_client_that_does_not_move_leaves_the_model_where_it_is() -> None:
    """Deltas are averaged, not models: with a gradient of exactly 0 the global model keeps its bits."""

    @dataclass(frozen=True)
    class Still(Method):
        def direction(self, gradient, params, received, own):
            return {name: torch.zeros_like(value) for name, value in gradient.items()}

    experiment = make_experiment(settings(rounds=2))
    world = build_world(experiment, two_clients())
    world = type(world)(**{**vars(world), "method": Still()})
    state = initial_state(experiment, world)
    rounds = list(train_rounds(experiment, world, LoopEngine(world), Checkpoint(state, {}, {})))
    for name, value in rounds[-1][0].state.params.items():
        assert torch.equal(value, state.params[name])


def test_measuring_does_not_change_training(small: dict[str, Any]) -> None:
    quiet = play({**small, "forgetting": {"every": 0}, "evaluate": {"every": 0}})[3]
    loud = play({**small, "forgetting": {"every": 1, "clients": "all"}, "evaluate": {"every": 1}})[3]
    for (a, _, _), (b, _, _) in zip(quiet, loud, strict=True):
        assert all(torch.equal(a.state.params[name], b.state.params[name]) for name in a.state.params)


def test_same_bits_whatever_ran_before_and_no_global_generator_is_touched(small: dict[str, Any]) -> None:
    first = play(small)[3]
    torch.manual_seed(123)
    np.random.seed(5)  # noqa: NPY002
    torch.rand(10)
    play({**small, "seed": 9, "rounds": 2})
    before, numpy_before = torch.get_rng_state(), np.random.get_state()[1]  # noqa: NPY002
    second = play(small)[3]
    assert torch.equal(before, torch.get_rng_state())
    assert np.array_equal(numpy_before, np.random.get_state()[1])  # noqa: NPY002
    for (a, row_a, _), (b, row_b, _) in zip(first, second, strict=True):
        assert all(torch.equal(a.state.params[name], b.state.params[name]) for name in a.state.params)
        assert {k: v for k, v in row_a.items() if "seconds" not in k} == {
            k: v for k, v in row_b.items() if "seconds" not in k
        }


def test_augmentation_is_seeded_and_changes_the_model() -> None:
    given = settings(
        data={"name": "digits"}, partition={"kind": "iid", "clients": 4}, local={"lr": 0.1, "augment": "crop_flip"}
    )
    a, b = play(given)[3][0][0], play(given)[3][0][0]
    plain = play({**given, "local": {"lr": 0.1}})[3][0][0]
    name = "classifier.weight"
    assert torch.equal(a.state.params[name], b.state.params[name])
    assert not torch.equal(a.state.params[name], plain.state.params[name])


def test_bfloat16_on_the_cpu_is_refused(small: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="precision: bfloat16 is for accelerators"):
        play({**small, "precision": "bfloat16", "device": "cpu"})


def test_divergence_names_round_and_client(small: dict[str, Any]) -> None:
    with pytest.raises(TrainingError, match=r"round \d, client \d: training diverged: .*lower local.lr") as caught:
        play({**small, "local": {"lr": 1e30, "epochs": 3}})
    assert caught.value.client is not None


def test_an_error_inside_a_client_says_where(small: dict[str, Any]) -> None:
    @dataclass(frozen=True)
    class Broken(Method):
        def penalty(self, params, received, own):
            raise RuntimeError("boom")

    experiment = make_experiment(small)
    world = build_world(experiment)
    world = type(world)(**{**vars(world), "method": Broken()})
    start = Checkpoint(initial_state(experiment, world), {}, {})
    with pytest.raises(TrainingError, match=r"round 1, client \d+: local training failed: boom"):
        list(train_rounds(experiment, world, LoopEngine(world), start))


def test_a_batch_of_one_under_batch_norm_is_explained() -> None:
    """Three examples in batches of two: the last one stands alone."""
    rng = np.random.default_rng(0)
    inputs, labels = rng.integers(0, 256, (6, 1, 8, 8), dtype=np.uint8), np.arange(6) % 2
    data = fedretain.from_arrays(inputs, labels, inputs, labels)
    given = settings(
        data={"name": "digits"},
        partition={"kind": "iid", "clients": 2, "validation": 0.0},
        model={"name": "resnet18", "width": 4},
        local={"lr": 0.1, "batch_size": 2},
    )
    with pytest.raises(TrainingError, match=r"round 1, client 0: .*a batch of one example: set local.drop_last"):
        play(given, data)
