"""The vectorised engine gives the numbers of the loop engine, whatever is trained and however uneven the clients are.

Everything is computed in double precision, where the two differ by the order of their sums alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from tests.agreement.conftest import BY_OWNER, Ended, assert_agree, dataset, owned, settings
from torch import Tensor

from fedretain.config import make_experiment
from fedretain.engines import LoopEngine, vectorised
from fedretain.engines.native import available
from fedretain.engines.recording import Recording
from fedretain.engines.stack import Stack
from fedretain.engines.steps import LocalSteps
from fedretain.engines.sums import Sums
from fedretain.engines.vectorised import VectorisedEngine
from fedretain.errors import TrainingError
from fedretain.experiment import build_world
from fedretain.losses import LOSSES
from fedretain.methods import METHODS, Batch, Method, Own, Received, Task
from fedretain.models.norm import Norm, norm_layer
from fedretain.rounds import initial_state, train_rounds
from fedretain.runs.checkpoint import Checkpoint
from fedretain.tensors import Tensors, add_scaled

Trained = Callable[..., Ended]

CHOSEN: dict[str, Any] = {
    "fedavg": "fedavg",
    "fedsgd": "fedsgd",
    "fedprox": {"name": "fedprox", "mu": 0.3},
    "scaffold I": {"name": "scaffold", "option": "I"},
    "scaffold II": {"name": "scaffold", "option": "II"},
    "fednova": "fednova",
    "fedcurv": {"name": "fedcurv", "lam": 0.01},
    "fedreg": {"name": "fedreg", "gamma": 0.4, "eta_s": 0.05, "ascent_steps": 1},
    "fedreg modified": {
        "name": "fedreg",
        "gamma": 0.4,
        "eta_s": 0.05,
        "ascent_steps": 2,
        "modified_gradient": True,
        "pseudo_weight": 0.5,
    },
    "fedwavg": {"name": "fedwavg", "alpha": 0.5},
    "fedwavg rarely, frozen": {"name": "fedwavg", "alpha": 0.5, "period": 2, "freeze_classifier": True},
    "fedprox + fednova": [{"name": "fedprox", "mu": 0.3}, "fednova"],
    "fedprox + scaffold + fedwavg": [
        {"name": "fedprox", "mu": 0.3},
        {"name": "scaffold", "option": "I"},
        {"name": "fedwavg", "alpha": 0.5},
    ],
}
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "sgd": {},
    "momentum": {"momentum": 0.9},
    "nesterov": {"momentum": 0.9, "nesterov": True, "weight_decay": 0.01},
    "adam": {"optimizer": "adam", "lr": 0.01, "weight_decay": 0.01},
    "adamw": {"optimizer": "adamw", "lr": 0.01, "weight_decay": 0.1},
}


def both(trained: Trained, given: dict[str, Any], data: Any = None, **options: Any) -> tuple[Ended, Ended]:
    return trained(LoopEngine, given, data), trained(partial(VectorisedEngine, **options), given, data)


def test_every_method_is_tried() -> None:
    named = [member for chosen in CHOSEN.values() for member in (chosen if isinstance(chosen, list) else [chosen])]
    assert {member if isinstance(member, str) else member["name"] for member in named} == set(METHODS)


PAIRS = [(m, loss) for m in CHOSEN for loss in LOSSES if m != "fedreg modified" or loss in ("wsm", "fedlc")]
"""Both kinds of FedReg take every loss through the same calls."""


@pytest.mark.parametrize(("method", "loss"), PAIRS)
def test_methods_and_losses(method: str, loss: str, trained: Trained) -> None:
    """Full batches of clients of different sizes: shorter ones are padded."""
    given = settings(method=CHOSEN[method], loss=loss, local={"epochs": None, "steps": 2, "batch_size": 100})
    if method == "fedsgd":
        given["local"].pop("steps")
    assert_agree(*both(trained, given))


@pytest.mark.parametrize("method", [name for name in CHOSEN if name not in ("fedavg", "fedsgd", "fedreg")])
def test_methods_with_partial_batches_and_different_numbers_of_steps(method: str, trained: Trained) -> None:
    """Clients of 23, 9, 17, 6, 16 and 19 examples in batches of 5: 5, 2, 4, 2, 4 and 4 steps; some wait for others."""
    assert_agree(*both(trained, settings(method=CHOSEN[method], loss="wsm", local={"epochs": 1})))


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("method", ["fedprox", "scaffold I", "fedwavg"])
def test_methods_and_optimisers(method: str, optimizer: str, trained: Trained) -> None:
    local = {"epochs": None, "steps": 3, "batch_size": 100, **OPTIMIZERS[optimizer]}
    assert_agree(*both(trained, settings(method=CHOSEN[method], loss="tce", local=local)))


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_optimisers_with_partial_batches(optimizer: str, trained: Trained) -> None:
    """A client that has done its steps must stand still, its momentum and its decay too."""
    assert_agree(*both(trained, settings(local=OPTIMIZERS[optimizer])))


def test_fednova_with_momentum(trained: Trained) -> None:
    assert_agree(*both(trained, settings(method="fednova", local={"momentum": 0.9})))


@pytest.mark.parametrize(
    "local",
    [
        {"lr_decay": 0.5},
        {"epochs": None, "steps": 7},
        {"epochs": 1.5},
        {"epochs": 0.01},
        {"batch_size": 4, "drop_last": True},
        {"batch_size": 1, "epochs": 1},
        {"batch_size": 100},
        {"augment": "crop_flip"},
        {"augment": "crop_flip", "batch_size": 100, "epochs": 3},
    ],
    ids=str,
)
def test_local_settings(local: dict[str, Any], trained: Trained) -> None:
    assert_agree(*both(trained, settings(local=local)))


@pytest.mark.parametrize("norm", ["batch", "group", "layer"])
def test_norms(norm: str, trained: Trained) -> None:
    """Clients of 13, 10 and 8 examples in batches of 6 take 3, 2 and 2 steps; the last batches hold 1, 4 and 2.

    Batch norm must leave padding out of its statistics, and the third step out of the others' running statistics.
    """
    given = settings(participation=3, model={"name": f"{__name__}:Normed", "norm": norm}, local={"batch_size": 6})
    given["partition"] = {"kind": f"{__name__}:three_sizes", "validation": 0.0}
    assert_agree(*both(trained, given, dataset(31)), tolerance=1e-8)


@pytest.mark.parametrize("norm", ["batch", "mixed"])
def test_a_deep_network(norm: str, trained: Trained) -> None:
    """Full batches of 13, 10 and 8 examples through 20 normalisations in another order of sums."""
    given = settings(
        participation=3,
        model={"name": "resnet18", "width": 4, "norm": norm},
        local={"batch_size": 100, "epochs": 1, "lr": 0.01},
    )
    given["partition"] = {"kind": f"{__name__}:three_sizes", "validation": 0.0}
    assert_agree(*both(trained, given, dataset(31, (1, 16, 16))), tolerance=1e-7)


def three_sizes(labels: np.ndarray, seed: int) -> list[np.ndarray]:
    """Three clients."""
    return np.split(np.arange(31), [13, 23])


class Normed(torch.nn.Module):
    """A convolution, a normalisation, a classifier."""

    def __init__(self, shape: tuple[int, int, int], classes: int, *, norm: Norm = "batch") -> None:
        super().__init__()
        self.layer = torch.nn.Conv2d(shape[0], 4, 3, stride=2)
        self.norm = norm_layer(norm, 4, 2)
        self.classifier = torch.nn.Linear(36, classes)

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.classifier(self.norm(self.layer(images)).relu().flatten(1))
        return logits


@pytest.mark.parametrize("method", ["scaffold I", "fedcurv", "fedreg", "fedwavg"])
def test_methods_with_running_statistics(method: str, trained: Trained) -> None:
    """What a hook computes beside training must neither read nor move another client's running statistics."""
    given = settings(
        method=CHOSEN[method],
        rounds=2,
        participation=3,
        model={"name": f"{__name__}:BatchNormed"},
        local={"batch_size": 7, "epochs": 1},
    )
    assert_agree(*both(trained, given), tolerance=1e-8)


class BatchNormed(torch.nn.Module):
    """A fully connected layer, batch norm, a classifier."""

    def __init__(self, shape: tuple[int, int, int], classes: int) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(int(np.prod(shape)), 6)
        self.norm = torch.nn.BatchNorm1d(6)
        self.classifier = torch.nn.Linear(6, classes)

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.classifier(self.norm(self.layer(images.flatten(1))).relu())
        return logits


@pytest.mark.parametrize(("method", "at_once"), [("fedavg", 1), ("scaffold II", 2), ("fedwavg", 4)])
def test_fewer_at_once_than_take_part(method: str, at_once: int, trained: Trained) -> None:
    given = settings(method=CHOSEN[method], local={"batch_size": 100})
    assert_agree(*both(trained, given, at_once=at_once))


def test_one_client_alone(trained: Trained) -> None:
    given = settings(participation=1)
    given["partition"] = {"kind": "iid", "clients": 1}
    assert_agree(*both(trained, given))


def test_many_rounds_of_states(trained: Trained) -> None:
    """Three of six clients for seven rounds: new ones beside those that were seen, with their states of every size."""
    given = settings(
        rounds=7, participation=3, method=CHOSEN["fedprox + scaffold + fedwavg"], local={"epochs": 1, "batch_size": 8}
    )
    loop, vectorised = both(trained, given)
    assert len(loop.states) > 3
    assert_agree(loop, vectorised)


def test_a_cohort_without_padding_and_then_one_with_it(trained: Trained) -> None:
    """Eight, eight, eight and seven examples: two clients a round either fill their room or do not.

    The steps of both kinds of cohort have the same shapes, batches of four; what a hook is given of the client's data
    has weights only where there is padding.
    """
    given = settings(
        rounds=8,
        participation=2,
        method=CHOSEN["fedreg"],
        local={"batch_size": 4, "epochs": 1},
    )
    given["partition"] = {"kind": f"{__name__}:eights_and_a_seven", "validation": 0.0}
    loop, vectorised = both(trained, given, dataset(31))
    assert {tuple(sorted(row["clients"]["examples"])) for row in loop.rows} == {(8, 8), (7, 8)}
    assert_agree(loop, vectorised)


def eights_and_a_seven(labels: np.ndarray, seed: int) -> list[np.ndarray]:
    """Four clients."""
    return np.split(np.arange(31), [8, 16, 24])


@dataclass(frozen=True)
class Fading(Method):
    """A penalty and a direction that fade with the rounds."""

    where: str = "penalty"

    def penalty(self, params: Tensors, received: Received, own: Own) -> Tensor:
        size = torch.stack([value.square().sum() for value in params.values()]).sum()
        return size / received.round if self.where == "penalty" else 0 * size

    def direction(self, gradient: Tensors, params: Tensors, received: Received, own: Own) -> Tensors:
        factor = 1 / received.round if self.where == "direction" else 1.0
        return {name: factor * value for name, value in gradient.items()}


@pytest.mark.parametrize("where", ["penalty", "direction"])
def test_a_hook_that_reads_the_round(where: str, trained: Trained, monkeypatch: pytest.MonkeyPatch) -> None:
    """A recorded step must not keep the number of the round that it was recorded in; once a round is enough."""
    given = settings(rounds=3, method=Fading(where), local={"epochs": 4, "batch_size": 100})
    recordings: list[int] = []

    record = LocalSteps.record

    def counted(steps: LocalSteps, *arguments: Any, **options: Any) -> Any:
        recordings.append(arguments[3])
        return record(steps, *arguments, **options)

    monkeypatch.setattr(LocalSteps, "record", counted)
    loop, vectorised = trained(LoopEngine, given), trained(VectorisedEngine, given)
    assert_agree(loop, vectorised)
    assert sorted(set(recordings)) == [1, 2, 3]
    assert len(recordings) <= 6
    steady = trained(VectorisedEngine, given | {"method": "fedavg"})
    with pytest.raises(AssertionError):
        assert_agree(loop, steady)


@dataclass(frozen=True)
class Remembering(Method):
    """Counts how often each example was right; those often wrong weigh more in the penalty."""

    def init_client(self, params: Tensors, own: Own) -> Tensors:
        return {"right": torch.zeros(len(own.data.labels), dtype=torch.float64), "rounds": torch.zeros(())}

    def penalty(self, params: Tensors, received: Received, own: Own) -> Tensor:
        size = torch.stack([value.square().sum() for value in params.values()]).sum()
        return 0.01 * own.state["right"].sum() / own.examples * size

    def finish(self, params: Tensors, received: Received, own: Own, task: Task) -> tuple[Tensors, Tensors]:
        right = task.logits(params, own.data.inputs).argmax(-1) == own.data.labels
        if own.data.weights is not None:
            right = right & (own.data.weights > 0)
        return {"right": own.state["right"] + right, "rounds": own.state["rounds"] + 1}, {}


def test_a_state_with_an_entry_per_example(trained: Trained) -> None:
    """It is padded in a stack, and as long as the client's data when it is kept."""
    loop, vectorised = both(trained, settings(rounds=4, participation=3, method=Remembering()))
    assert_agree(loop, vectorised)
    assert len({len(state["right"]) for state in vectorised.states.values()}) > 1


@dataclass(frozen=True)
class OwnStep(Method):
    """A step of its own whose loss is not 0 on padding."""

    def step(
        self, params: Tensors, batch: Batch, index: int, received: Received, own: Own, task: Task
    ) -> tuple[Tensors, Tensor]:
        loss, gradient = task.gradient(params, task.part(own.data, index))
        return add_scaled(params, -task.lr, gradient), loss + 1


def test_a_step_of_its_own_counts_only_while_the_client_trains(trained: Trained) -> None:
    assert_agree(*both(trained, settings(method=OwnStep(), local={"epochs": 1})))


@dataclass(frozen=True)
class BreaksAfterwards(OwnStep):
    """A step that makes no numbers any more once a client has done all of its own."""

    def step(
        self, params: Tensors, batch: Batch, index: int, received: Received, own: Own, task: Task
    ) -> tuple[Tensors, Tensor]:
        new, loss = super().step(params, batch, index, received, own, task)
        over = torch.as_tensor(index) >= own.steps
        return {name: torch.where(over, torch.nan, value) for name, value in new.items()}, loss


def test_what_is_computed_at_the_place_of_a_client_that_is_done_is_nobodys(trained: Trained) -> None:
    """Clients of 23, 9, 17, 6, 16 and 19 examples in batches of 5 take 5, 2, 4, 2, 4 and 4 steps as one stack."""
    assert_agree(*both(trained, settings(method=BreaksAfterwards(), local={"epochs": 1})))


def test_single_precision(trained: Trained) -> None:
    """Eight decimal digits less: 1e-5 after two rounds."""
    given = settings(precision="float32", local={"optimizer": "adam", "lr": 0.01})
    assert_agree(*both(trained, given), tolerance=1e-5)


def test_local_models_only_where_asked_for() -> None:
    experiment = make_experiment(settings(local={"epochs": 1, "batch_size": 100}))
    world = build_world(experiment, dataset())
    received = Received(*initial_state(experiment, world)[1:3], {}, 1)
    cohort = np.array([4, 0, 2])
    engine = VectorisedEngine(world)
    with_models = list(engine.train(received, cohort, lambda client: None))
    without = list(engine.train(received, cohort, lambda client: None, local_models=False))
    assert [client for chunk in with_models for client in chunk.clients.tolist()] == [4, 0, 2]
    assert all(chunk.params.keys() == received.params.keys() for chunk in with_models)
    assert all(not chunk.params for chunk in without)
    for chunk in with_models:
        for name, delta in chunk.delta.items():
            torch.testing.assert_close(delta, chunk.params[name] - received.params[name])


@pytest.mark.parametrize("method", ["fedavg", {"name": "scaffold", "option": "I"}])
def test_sums_in_place_of_single_uploads(method: Any) -> None:
    """With weights an engine gives Σ p_k·Δ_k, the same bytes, and losses and states of each client as before."""
    experiment = make_experiment(settings(method=method))
    world = build_world(experiment, dataset())
    state = initial_state(experiment, world)
    received = Received(state.params, state.buffers, world.method.broadcast(state.server), 1)
    cohort, weights = np.array([4, 0, 2]), torch.tensor([0.5, 0.2, 0.3], dtype=torch.float64)
    engine = VectorisedEngine(world)
    single = list(engine.train(received, cohort, lambda client: None, local_models=False))
    summed = list(engine.train(received, cohort, lambda client: None, local_models=False, weights=weights))
    expected, found = Sums(), Sums()
    start = 0
    for chunk in single:
        expected.add(chunk, weights[start : start + len(chunk.clients)])
        start += len(chunk.clients)
    for chunk in summed:
        assert chunk.delta == chunk.extras == {}
        assert chunk.sums is not None
        found.include(chunk.sums)
    assert found.bytes_up == expected.bytes_up
    for kind in ("delta", "mean", "total", "buffers"):
        torch.testing.assert_close(getattr(found, kind), getattr(expected, kind))
    for kind in ("clients", "steps"):
        assert np.array_equal(*(np.concatenate([getattr(c, kind) for c in chunks]) for chunks in (single, summed)))
    torch.testing.assert_close(*(torch.cat([chunk.train_loss for chunk in chunks]) for chunks in (single, summed)))
    assert [c.state.keys() for c in summed] == [c.state.keys() for c in single]


def test_what_was_prepared_is_what_would_have_been_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """The stack of the next round, made ahead, is used for exactly the clients and the round that it was made for."""
    given = settings()
    given["partition"] = {"kind": "iid", "clients": 6, "validation": 0.0}
    experiment = make_experiment(given)
    world = build_world(experiment, dataset())
    params, buffers = initial_state(experiment, world)[1:3]
    made: list[int] = []
    plain = vectorised.stack

    def noted(members: Any, round: int, **how: Any) -> Any:
        made.append(round)
        return plain(members, round, **how)

    monkeypatch.setattr(vectorised, "stack", noted)

    def losses(engine: VectorisedEngine, round: int, cohort: list[int]) -> list[float]:
        chunks = engine.train(Received(params, buffers, {}, round), np.array(cohort), lambda client: None)
        return [loss for chunk in chunks for loss in chunk.train_loss.tolist()]

    engine, fresh = VectorisedEngine(world), VectorisedEngine(world)
    losses(engine, 1, [0, 1])
    for asked, round in (([2, 5], 2), ([2, 4], 3), ([1, 3], 5)):
        engine.look_ahead(np.array([2, 5] if round < 5 else [1, 3]), min(round, 4))
        before = len(made)
        found = losses(engine, round, asked)
        assert (len(made) == before) == (round == 2)
        assert found == losses(fresh, round, asked)


def test_received_tensors_are_left_alone() -> None:
    """A played step writes into its own memory only: the global model of before is still the one that was sent."""
    experiment = make_experiment(settings(local={"epochs": 2}))
    world = build_world(experiment, dataset())
    start = initial_state(experiment, world)
    before = {name: value.clone() for name, value in start.params.items()}
    for _ in train_rounds(experiment, world, VectorisedEngine(world), Checkpoint(start, {}, {})):
        pass
    assert all(torch.equal(value, before[name]) for name, value in start.params.items())


def test_divergence_names_round_client_and_rate(trained: Trained) -> None:
    """With a rate of 1e200 the first update overflows; the loop engine says the same."""
    given = settings(local={"lr": 1e200, "epochs": 2})
    messages = []
    for engine in (LoopEngine, VectorisedEngine):
        with pytest.raises(TrainingError, match=r"round 1, client \d: training diverged.*it is 1e\+200") as raised:
            trained(engine, given)
        messages.append(raised.value)
    assert messages[1].which == 0
    assert messages[0].client == messages[1].client


@pytest.mark.parametrize("engine", [LoopEngine, VectorisedEngine])
def test_batch_norm_on_a_single_example(engine: Any, trained: Trained) -> None:
    """16 examples in batches of 5 leave one over, of which batch norm knows no variance: refused, not trained on 0."""
    given = settings(model={"name": f"{__name__}:BatchNormed"}, local={"epochs": 1, "batch_size": 5})
    with pytest.raises(TrainingError, match=r"batch norm needs more than a batch of one example: set local.drop_last"):
        trained(engine, given)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"method": "scaffold"},
        {"method": {"name": "fedreg", "gamma": 0.4, "eta_s": 0.01, "ascent_steps": 1}},
        {"method": {"name": "fedwavg", "alpha": 0.5, "period": 2, "freeze_classifier": True}},
        {"local": {"momentum": 0.9}},
        {"local": {"momentum": 0.9, "nesterov": True, "weight_decay": 0.01}},
        {"local": {"optimizer": "adam", "lr": 0.01}},
        {"local": {"augment": "crop_flip"}},
        {
            "model": {"name": "resnet18", "width": 4},
            "local": {"batch_size": 3, "epochs": 1, "lr": 0.01, "drop_last": True},
        },
    ],
    ids=str,
)
def test_clients_that_are_done_drop_out(
    trained: Callable[..., Ended], changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Twenty clients of 4 to some 60 examples: the stack gets smaller as they end, and nobody's numbers change."""
    seen: list[list[int]] = []
    widths = Stack.widths
    monkeypatch.setattr(Stack, "widths", lambda stack: (seen.append(widths(stack)), seen[-1])[1])
    partition = {"clients": 22, "alpha": 0.5, "minimum": 4}
    given = settings(**{"participation": 20, "partition": partition, **changes})
    data = dataset(400, (2, 16, 16))
    assert_agree(trained(VectorisedEngine, given, data), trained(LoopEngine, given, data))
    assert any(20 in steps and 8 in steps for steps in seen), "no stack got smaller"


def test_steps_of_all_widths_are_recorded_alike(trained: Trained, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who takes part in a step must not decide how its weights lie: every change of width would turn them around.

    Twenty clients of 5 to 60 examples, first layer 72 × 24: recorded for 20 of them, and with padding for 16 and 8.
    """
    monkeypatch.setattr(VectorisedEngine, "_summed", lambda *given: None)  # which records for all of them alone
    engines: list[VectorisedEngine] = []

    def build(world: Any) -> VectorisedEngine:
        engines.append(VectorisedEngine(world))
        return engines[0]

    given = settings(participation=20, model={"name": "mlp", "hidden": [24]}, precision="float32")
    given["partition"] = BY_OWNER
    data = owned([60] * 5 + [35] * 6 + [5] * 9, (2, 6, 6))
    assert_agree(trained(LoopEngine, given, data), trained(build, given, data), 1e-4)
    recordings = engines[0].steps.recordings
    kinds = sorted((shape[0], full) for shape, full, *_ in recordings)
    assert kinds == [(8, False), (16, False), (20, True)]
    assert {recording.transposed for recording in recordings.values()} == {frozenset({0})}


@pytest.mark.skipif(not available(torch.float64, "play"), reason="no C compiler")
@pytest.mark.parametrize(
    ("model", "several"), [({"name": "mlp", "hidden": [8]}, True), ({"name": "lenet"}, False)], ids=["mlp", "lenet"]
)
def test_steps_are_collected_where_one_call_plays_them(
    trained: Trained, monkeypatch: pytest.MonkeyPatch, model: dict[str, Any], several: bool
) -> None:
    """Else a batch is let go of before the next one is fetched. (Where nothing is summed up at once.)"""
    monkeypatch.setattr(VectorisedEngine, "_summed", lambda *given: None)
    played: list[int] = []
    original = Recording.steps

    def steps(recording: Recording, carry: Any, moving: Any, begun: Any) -> Any:
        played.append(len(moving))
        return original(recording, carry, moving, begun)

    monkeypatch.setattr(Recording, "steps", steps)
    given = settings(model=model, local={"batch_size": 2})
    given["partition"] = {"kind": "iid", "clients": 6, "validation": 0.0}
    found = trained(VectorisedEngine, given, dataset(shape=(2, 12, 12)))
    assert sum(played) == 2 * 16  # two rounds of two epochs of eight batches
    assert played[0] == 1, "the first step shows what it is"
    assert played.count(1) == (1 if several else len(played))
    assert_agree(found, trained(LoopEngine, given, dataset(shape=(2, 12, 12))))


@pytest.mark.skipif(not available(torch.float64, "play"), reason="no C compiler")
@pytest.mark.parametrize("precision", ["float32", "float64"])
@pytest.mark.parametrize(
    ("keys", "summed"),
    [
        ({}, True),
        ({"model": {"name": "mlp", "hidden": [40, 8]}, "loss": "wsm"}, True),
        ({"local": {"batch_size": 3}}, True),
        ({"partition": BY_OWNER, "participation": 20}, True),
        ({"local": {"batch_size": 4, "momentum": 0.9}}, False),
        ({"model": {"name": "lenet"}}, False),
    ],
    ids=["mlp", "wsm", "partial batches", "uneven", "momentum", "lenet"],
)
def test_summed_up_where_they_train(
    trained: Trained, monkeypatch: pytest.MonkeyPatch, keys: dict[str, Any], summed: bool, precision: str
) -> None:
    """A client's model need not be kept where only the sum is asked for: the same bits as from all of them.

    From the first round on, whatever was played before: a resumed run takes the same way.
    """
    made: list[bool] = []
    original = VectorisedEngine._summed

    def noted(engine: VectorisedEngine, *given: Any) -> Any:
        found = original(engine, *given)
        made.append(found is not None)
        return found

    usual = {"model": {"name": "mlp", "hidden": [8]}, "local": {"batch_size": 4}, "precision": precision}
    usual["partition"] = {"kind": "iid", "clients": 6, "validation": 0.0}
    given = settings(rounds=3) | usual | keys
    uneven = "partition" in keys
    data = owned([60] * 5 + [35] * 6 + [5] * 9, (2, 6, 6)) if uneven else dataset(shape=(2, 12, 12))
    monkeypatch.setattr(VectorisedEngine, "_summed", noted)
    found = trained(VectorisedEngine, given, data)
    assert made == [summed] * 3
    monkeypatch.setattr(VectorisedEngine, "_summed", lambda *given: None)
    kept = trained(VectorisedEngine, given, data)
    assert found.params.keys() == kept.params.keys()
    for name, value in found.params.items():
        assert torch.equal(value, kept.params[name]), name
    rows = [[{k: v for k, v in row.items() if "seconds" not in k} for row in ended.rows] for ended in (found, kept)]
    assert rows[0] == rows[1]


class TooFew(torch.nn.Module):
    """One output less than there are classes."""

    def __init__(self, shape: tuple[int, int, int], classes: int) -> None:
        super().__init__()
        self.classifier = torch.nn.Linear(int(np.prod(shape)), classes - 1)

    def forward(self, images: Tensor) -> Tensor:
        """Logits."""
        logits: Tensor = self.classifier(images.flatten(1))
        return logits


@pytest.mark.parametrize("engine", [VectorisedEngine, LoopEngine])
def test_a_model_with_too_few_outputs(trained: Trained, engine: Any) -> None:
    """An error in words, not a number from elsewhere in memory."""
    with pytest.raises(TrainingError, match=r"none of the model's outputs|out of bounds"):
        trained(engine, settings(model={"name": f"{__name__}:TooFew"}))
