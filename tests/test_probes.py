"""Probes against a slow, plain second implementation: one model, one client, one example after another."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch

import fedretain
from fedretain import evaluation
from fedretain.config import make_experiment
from fedretain.config.settings import ForgettingSettings
from fedretain.data import Dataset, from_arrays
from fedretain.data.federation import Parts, build_federation
from fedretain.data.transforms import Normalise
from fedretain.engines import LoopEngine, Uploads, World
from fedretain.errors import ConfigError
from fedretain.evaluation import evaluate
from fedretain.experiment import build_world
from fedretain.methods import Received
from fedretain.probes import (
    MEASURES,
    ForgettingRecord,
    Moment,
    measure_classes,
    measure_drift,
    measure_fisher,
    measure_forgetting,
    measure_loss_increase,
    measure_personalised,
)
from fedretain.rounds import initial_state
from fedretain.server import ServerState, advance, example_weights, receive

COHORT = np.array([0, 2, 3, 5])
EARLIER = [np.array([1, 4]), np.array([0, 1, 5])]
"""The participants of the two rounds before, as if there had been any."""


def tiny_data() -> Dataset:
    """Clients of 1, 9, 10, 15, 20 and 25 examples: with 10 % for validation the first two have none."""
    rng = np.random.default_rng(0)
    owners = np.repeat(np.arange(6), [1, 9, 10, 15, 20, 25])
    x, y = rng.normal(size=(80, 4)).astype(np.float32), rng.integers(0, 3, 80)
    x[:, 0] += 2 * y
    return from_arrays(x, y, x[:30], y[:30], columns={"owner": (owners, owners[:30])})


def one_round(**keys: Any) -> tuple[World, Received, list[Uploads], ServerState]:
    given: dict[str, Any] = {
        "partition": {"kind": "by_column", "column": "owner", "validation": 0.1},
        "model": {"name": "mlp", "hidden": [5]},
        "local": {"lr": 0.5, "epochs": 3, "batch_size": 4},
        "precision": "float64",
        **keys,
    }
    experiment = make_experiment(given)
    world = build_world(experiment, tiny_data())
    state = initial_state(experiment, world)
    received = Received(state.params, state.buffers, {}, 1)
    uploads = list(LoopEngine(world).train(received, COHORT, lambda client: None))
    weights = example_weights(world.federation.train.sizes[COHORT], "examples", torch.zeros(1, dtype=torch.float64))
    reception, _ = receive(world.method, uploads, weights)
    optimizer = experiment.server.build_optimizer()
    after = advance(state, reception, received, world.method, optimizer, participants=4, population=6)
    return world, received, uploads, after


def right(world: World, params: dict[str, torch.Tensor], numbers: np.ndarray) -> list[bool]:
    """One example after another through the plain module."""
    world.model.load_state_dict(params)
    world.model.eval()
    answers = []
    with torch.no_grad():
        for number in numbers.tolist():
            inputs = world.federation.normalise(world.federation.inputs[number : number + 1])
            answers.append(int(world.model(inputs).argmax()) == int(world.federation.labels[number]))
    return answers


@pytest.mark.parametrize("everyone", [False, True])
@pytest.mark.parametrize("batch_size", [1, 7, 1000])
def test_forgetting_equals_the_slow_way(everyone: bool, batch_size: int) -> None:
    world, received, uploads, after = one_round()
    record = measure_forgetting(
        world, received, uploads, after, everyone=everyone, count_examples=True, batch_size=batch_size
    )
    data = list(range(6)) if everyone else COHORT.tolist()
    locals_ = [{n: v[0] for n, v in chunk.params.items()} for chunk in uploads]
    validation, train = world.federation.validation, world.federation.train
    assert [len(validation[k]) for k in range(6)] == [0, 0, 1, 1, 2, 2]

    def accuracy(params: dict[str, torch.Tensor], k: int) -> float:
        answers = right(world, params, validation[k])
        return sum(answers) / len(answers) if answers else float("nan")

    before = np.array([accuracy(received.params, k) for k in data])
    matrix = np.array([[accuracy(params, k) for params in locals_] for k in data])
    np.testing.assert_array_equal(record.before, before)
    np.testing.assert_array_equal(record.after, matrix)
    np.testing.assert_array_equal(record.clients.matrix, before[:, None] - matrix)
    for column, i in enumerate(COHORT.tolist()):
        others = [before[row] - matrix[row, column] for row, k in enumerate(data) if k != i and len(validation[k])]
        assert record.clients.by_model[column] == pytest.approx(np.mean(others))
    for row, k in enumerate(data):
        others = [before[row] - matrix[row, column] for column, i in enumerate(COHORT.tolist()) if i != k]
        assert record.clients.by_data[row] == pytest.approx(np.mean(others), nan_ok=True)
    assert record.forgettable is not None
    for column, i in enumerate(COHORT.tolist()):
        was, now = right(world, locals_[column], train[i]), right(world, after.params, train[i])
        assert record.forgettable[column] == sum(a and not b for a, b in zip(was, now, strict=True))
    assert record.examples.tolist() == [len(train[i]) for i in COHORT.tolist()]


def test_something_is_forgotten_in_this_world() -> None:
    """The comparison above would mean little if all were zero."""
    world, received, uploads, after = one_round()
    record: ForgettingRecord = measure_forgetting(
        world, received, uploads, after, everyone=True, count_examples=True, batch_size=10
    )
    assert np.nanmax(np.abs(record.clients.matrix)) > 0
    assert record.forgettable is not None
    assert record.forgettable.sum() > 0
    without = measure_forgetting(world, received, uploads, after, everyone=True, count_examples=False, batch_size=10)
    assert without.forgettable is None


def test_probes_leave_the_round_alone() -> None:
    world, received, uploads, after = one_round(method={"name": "fedreg", "gamma": 0.5, "eta_s": 0.1})
    tensors = [*received.params.values(), *after.params.values(), *(v for c in uploads for v in c.params.values())]
    copies = [value.clone() for value in tensors]
    for measure in MEASURES.values():
        assert measure(Moment(world, received, uploads, after, EARLIER, 10)) is not None
    measure_forgetting(world, received, uploads, after, everyone=True, count_examples=True, batch_size=10)
    evaluate(world, after.params, after.buffers, 10)
    assert all(torch.equal(a, b) for a, b in zip(tensors, copies, strict=True))


def test_personalised_accuracy_by_hand() -> None:
    """A linear model that shows its input as logits: f = x, three classes, two clients.

    Client a trained on classes 0, 0, 1 (β = ⅔, ⅓, 0) and is tested on x = (1, 1.5, 9), y = 1: plain says 2 (wrong);
    with log β the logits are 1 − 0.405 = 0.595, 1.5 − 1.099 = 0.401 and −∞, so it says 0 (wrong as well).
    Client b trained on classes 2, 2, 1 and is tested on x = (5, 0, 1), y = 2: plain says 0 (wrong); with log β −∞,
    −1.099 and 0.595, so it says 2 (right).
    """
    x = np.array([[0, 0, 0]] * 6 + [[1, 1.5, 9], [5, 0, 1]], dtype=np.float32)
    y = np.array([0, 0, 1, 2, 2, 1, 1, 2])
    data = from_arrays(x, y, x, y)
    given = {"partition": {"kind": "iid", "clients": 2}, "model": {"name": "mlp", "hidden": []}}
    experiment = make_experiment(given)
    normalise = Normalise.fit(data, "unit")
    federation = build_federation(
        data,
        Parts.of([np.array([0, 1, 2]), np.array([3, 4, 5])]),
        Parts.of([np.array([6]), np.array([7])]),
        normalise,
        device=torch.device("cpu"),
        dtype=torch.float32,
    )
    world = build_world(experiment, data)
    world = replace(world, federation=federation)
    state = initial_state(experiment, world)
    identity = {"classifier.weight": torch.eye(3), "classifier.bias": torch.zeros(3)}
    record = measure_personalised(world, state._replace(params=identity), batch_size=1)
    assert record.plain.tolist() == [0, 0]
    assert record.personalised.tolist() == [0, 1]


@pytest.mark.parametrize("measure", ["classes", "loss_increase"])
def test_every_batch_is_normalised_once_for_all_models(measure: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The 30 test examples at once; the 1 + 9 + 23 training examples of clients 0, 1 and 5 in five batches of 7."""
    moment = moment_of(7)
    sizes = {"classes": 30, "loss_increase": sum(len(moment.world.federation.train[k]) for k in (0, 1, 5))}
    calls: list[int] = []
    normalise = Normalise.__call__

    def counted(self: Normalise, inputs: torch.Tensor) -> torch.Tensor:
        calls.append(len(inputs))
        return normalise(self, inputs)

    monkeypatch.setattr(Normalise, "__call__", counted)
    MEASURES[measure](moment)
    assert len(calls) == {"classes": 1, "loss_increase": 5}[measure]
    assert sum(calls) == sizes[measure]


@pytest.mark.parametrize("measure", ["classes", "loss_increase"])
@pytest.mark.parametrize("held", [1, 2, 4, 100])
def test_models_look_at_a_batch_in_stacks(measure: str, held: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The global model, four local ones and, for ``classes``, the new one: all of them, or as many as fit at once.

    A model of 4·5 + 5 + 5·3 + 3 = 43 parameters takes 344 bytes in float64.
    """
    moment = moment_of(100)
    expected = MEASURES[measure](moment)
    monkeypatch.setattr(evaluation, "STACKED", held * 344)
    calls: list[int] = []
    forward = evaluation.forward
    monkeypatch.setattr(evaluation, "forward", lambda *given, **named: (calls.append(1), forward(*given, **named))[1])
    found = MEASURES[measure](moment)
    models = 6 if measure == "classes" else 5
    assert len(calls) == -(-models // held)
    assert expected is not None
    assert found is not None
    for name, values in expected.arrays.items():
        np.testing.assert_allclose(found.arrays[name], values, rtol=1e-12, err_msg=name)


def moment_of(batch_size: int, earlier: list[np.ndarray] = EARLIER, **keys: Any) -> Moment:
    return Moment(*one_round(**keys), earlier, batch_size)


def local_models(moment: Moment) -> list[dict[str, torch.Tensor]]:
    return [{name: value[0] for name, value in chunk.params.items()} for chunk in moment.uploads]


@pytest.mark.parametrize("batch_size", [7, 1000])
def test_classes_equal_the_slow_way(batch_size: int) -> None:
    """One test example after another; who holds a class is read off the labels of the clients' training data."""
    moment = moment_of(batch_size)
    world, federation = moment.world, moment.world.federation

    def accuracies(params: dict[str, torch.Tensor]) -> list[float]:
        world.model.load_state_dict(params)
        hits: dict[int, list[bool]] = {c: [] for c in range(3)}
        with torch.no_grad():
            for i, label in enumerate(federation.test.labels.tolist()):
                inputs = federation.normalise(federation.test.inputs[i : i + 1])
                hits[label].append(int(world.model.eval()(inputs).argmax()) == label)
        return [sum(answers) / len(answers) for answers in hits.values()]

    numbers, arrays = measure_classes(moment)
    before, after = accuracies(moment.received.params), accuracies(moment.after.params)
    local = [accuracies(params) for params in local_models(moment)]
    held = [[bool((federation.labels[federation.train[i]] == c).any()) for i in COHORT.tolist()] for c in range(3)]
    np.testing.assert_array_equal(arrays["models"], COHORT)
    np.testing.assert_array_equal(arrays["before"], before)
    np.testing.assert_array_equal(arrays["aggregated"], after)
    np.testing.assert_array_equal(arrays["after"], np.array(local).T)
    np.testing.assert_array_equal(arrays["forgetting"], np.array(before)[:, None] - np.array(local).T)
    np.testing.assert_array_equal(arrays["held"], held)
    lost: dict[bool, list[float]] = {True: [], False: []}
    for i in range(len(COHORT)):
        for holds, of_models in lost.items():
            drops = [before[c] - local[i][c] for c in range(3) if held[c][i] == holds]
            of_models += [sum(drops) / len(drops)] if drops else []
    assert numbers == {
        "absent_classes": sum(not any(holders) for holders in held),
        "vanished_classes": sum(a > 0 and b == 0 for a, b in zip(before, after, strict=True)),
        "class_forgetting_held": pytest.approx(np.mean(lost[True])),
        "class_forgetting_absent": pytest.approx(np.mean(lost[False])),
    }
    assert numbers["class_forgetting_absent"] != 0


def test_drift_equals_the_slow_way() -> None:
    moment = moment_of(10)
    numbers, arrays = measure_drift(moment)
    updates = [
        np.concatenate([(params[n] - w).numpy().ravel() for n, w in moment.received.params.items()])
        for params in local_models(moment)
    ]
    norms = [np.sqrt((u**2).sum()) for u in updates]
    cosines = [[u @ v / np.sqrt(u @ u) / np.sqrt(v @ v) for v in updates] for u in updates]
    np.testing.assert_allclose(arrays["norms"], norms)
    np.testing.assert_allclose(arrays["cosines"], cosines, atol=1e-12)
    pairs = [cosines[i][j] for i in range(4) for j in range(i)]
    assert numbers == {"drift_norm": pytest.approx(np.mean(norms)), "drift_cosine": pytest.approx(np.mean(pairs))}
    assert arrays["models"].tolist() == COHORT.tolist()


@pytest.mark.parametrize("batch_size", [7, 1000])
def test_loss_increase_equals_the_slow_way(batch_size: int) -> None:
    """−log p of one training example after another; the data are those of the latest round before, 0, 1 and 5."""
    moment = moment_of(batch_size)
    world, federation = moment.world, moment.world.federation

    def loss(params: dict[str, torch.Tensor], client: int) -> float:
        world.model.load_state_dict(params)
        total = 0.0
        for number in federation.train[client].tolist():
            with torch.no_grad():
                logits = world.model.eval()(federation.normalise(federation.inputs[number : number + 1]))[0]
            total -= float(logits.softmax(-1)[federation.labels[number]].log())
        return total / len(federation.train[client])

    measured = measure_loss_increase(moment)
    assert measured is not None
    increases = []
    for row, client in enumerate([0, 1, 5]):
        before = loss(moment.received.params, client)
        local = [loss(params, client) for params in local_models(moment)]
        assert measured.arrays["before"][row] == pytest.approx(before)
        np.testing.assert_allclose(measured.arrays["after"][row], local)
        increases.append(sum(local) / 4 - before)
    np.testing.assert_allclose(measured.arrays["loss_increase"], increases)
    assert measured.arrays["data"].tolist() == [0, 1, 5]
    assert measured.arrays["models"].tolist() == COHORT.tolist()
    assert measured.numbers == {"loss_increase": pytest.approx(np.mean(increases))}


@pytest.mark.parametrize("method", ["fedreg", ["fedreg", "fedwavg"]])
def test_fisher_equals_the_slow_way(method: str | list[str]) -> None:
    """Pseudo data and squared gradients of one example after another, through the plain module.

    Clients 0, 1, 4 and 5 took part in the rounds before: the union of their data, each example once.
    """
    reg = {"name": "fedreg", "gamma": 0.5, "eta_s": 0.1, "ascent_steps": 3}
    chained = reg if method == "fedreg" else [reg, {"name": "fedwavg", "alpha": 0.3}]
    moment = moment_of(7, method=chained)
    federation, model = moment.world.federation, moment.world.model
    model.eval()

    def squared_gradient(inputs: torch.Tensor, target: torch.Tensor) -> np.ndarray:
        model.zero_grad()
        (-(target * model(inputs)[0].log_softmax(-1)).sum()).backward()
        return np.concatenate([p.grad.numpy().ravel() ** 2 for p in model.parameters()])

    def pseudo(number: int) -> tuple[torch.Tensor, torch.Tensor]:
        model.load_state_dict(moment.received.params)
        inputs = federation.normalise(federation.inputs[number : number + 1])
        for _ in range(3):
            inputs = inputs.detach().requires_grad_()
            torch.nn.functional.cross_entropy(model(inputs), federation.labels[number : number + 1]).backward()
            inputs = inputs + 0.1 * inputs.grad.sign()
        return inputs.detach(), model(inputs)[0].softmax(-1).detach()

    measured = measure_fisher(moment)
    assert measured is not None
    expected = []
    for client, params in zip(COHORT.tolist(), local_models(moment), strict=True):
        made = [pseudo(number) for number in federation.train[client].tolist()]
        model.load_state_dict(params)
        of_pseudo = np.mean([squared_gradient(x, y) for x, y in made], axis=0)
        previous = [number for k in (0, 1, 4, 5) for number in federation.train[k].tolist()]
        one_hot = torch.eye(3, dtype=torch.float64)
        of_previous = np.mean(
            [
                squared_gradient(federation.normalise(federation.inputs[n : n + 1]), one_hot[federation.labels[n]])
                for n in previous
            ],
            axis=0,
        )
        expected.append(np.corrcoef(of_pseudo, of_previous)[0, 1])
    np.testing.assert_allclose(measured.arrays["agreement"], expected, rtol=1e-9)
    assert measured.arrays["data"].tolist() == [0, 1, 4, 5]
    assert measured.numbers == {"fisher_agreement": pytest.approx(np.mean(expected))}


def test_the_first_round_has_no_previous_data() -> None:
    moment = moment_of(10, earlier=[], method={"name": "fedreg", "gamma": 0.5, "eta_s": 0.1})
    assert measure_loss_increase(moment) is None
    assert measure_fisher(moment) is None


def test_every_measure_of_the_experiment_file_exists() -> None:
    (choices, _) = get_args(ForgettingSettings.model_fields["measures"].annotation)
    assert tuple(MEASURES) == get_args(choices)


@pytest.mark.parametrize(
    ("measures", "message"),
    [
        (["drfit"], r"forgetting\.measures\.0: .*did you mean 'drift'"),
        (["drift", "drift"], r"forgetting\.measures: drift stands there twice"),
        ("drift", r"forgetting\.measures: must be a list"),
        (["fisher"], r"forgetting\.measures: fisher looks at pseudo data, which fedavg does not make"),
    ],
)
def test_measures_that_cannot_be_taken_are_refused(measures: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        fedretain.run({"rounds": 1, "forgetting": {"measures": measures}}, out=tmp_path / "run")


# ---------------------------------------------------------------------------------------------------- in a whole run

ALL = {
    "rounds": 13,
    "participation": 2,
    "partition": {"kind": "dirichlet", "clients": 30, "alpha": 0.1},
    "model": {"name": "mlp", "hidden": [6]},
    "method": {"name": "fedreg", "gamma": 0.5, "eta_s": 0.05, "ascent_steps": 2},
    "local": {"lr": 0.1, "epochs": 1, "batch_size": 16},
    "checkpoint": {"every": 4},
    "engine": "loop",  # bits are promised for one engine; auto may choose another by its timings
}
MEASURED = {"forgetting": {"every": 1, "measures": list(MEASURES)}}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> fedretain.Run:
    return fedretain.run({**ALL, **MEASURED}, out=tmp_path_factory.mktemp("runs") / "whole")


def rows_of(path: Path) -> list[dict[str, Any]]:
    """Metrics without the seconds, which are never the same."""
    rows = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in row.items() if "seconds" not in key} for row in rows]


def final_tensors(run: fedretain.Run) -> dict[str, torch.Tensor]:
    state = run.checkpoint().state
    return {**state.params, **{f"server/{name}": value for name, value in state.server.items()}}


def test_the_same_bits_with_and_without_measures(whole: fedretain.Run, tmp_path: Path) -> None:
    bare = fedretain.run({**ALL, "forgetting": {"every": 0}}, out=tmp_path / "bare")
    ours, theirs = final_tensors(whole), final_tensors(bare)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    for with_measures, without in zip(rows_of(whole.path), rows_of(bare.path), strict=True):
        clients = with_measures["clients"]
        assert without["clients"] == {key: clients[key] for key in without["clients"]}
        assert without == {**{key: with_measures[key] for key in without}, "clients": without["clients"]}


@pytest.mark.parametrize(
    "kind", [{"kind": "iid"}, {"kind": "dirichlet_by_class", "alpha": 0.5}], ids=["even", "uneven"]
)
@pytest.mark.parametrize(
    "engine",
    ["vectorised", {"name": "workers", "workers": 2}, {"name": "workers", "workers": 2, "inner": "vectorised"}],
    ids=["vectorised", "workers", "workers/vectorised"],
)
def test_measures_change_no_bit_on_other_engines(engine: Any, kind: dict[str, Any], tmp_path: Path) -> None:
    """An engine is asked for the local models only in rounds that measure; that must be all that differs.

    Uneven clients stand in another order in a stack than in the cohort, and are summed up in that one.
    """
    base = {"rounds": 3, "participation": 6, "data": {"name": "digits"}, "engine": engine, "device": "cpu"}
    base |= {"partition": {**kind, "clients": 10, "validation": 0.1}}
    every = {"every": 1, "measures": ["classes", "drift", "loss_increase"]}
    with_them = fedretain.run({**base, "forgetting": every}, out=tmp_path / "with").checkpoint().state
    without = fedretain.run({**base, "forgetting": {"every": 0}}, out=tmp_path / "without").checkpoint().state
    assert all(torch.equal(value, without.params[name]) for name, value in with_them.params.items())


@pytest.mark.parametrize("measure", [*MEASURES, "matrix", "everyone", "personalised"])
def test_no_measure_alone_changes_a_bit(measure: str, tmp_path: Path) -> None:
    """Batch norm as well: running statistics are what a careless forward pass would change."""
    base = {
        **ALL,
        "rounds": 3,
        "data": {"name": "digits"},
        "model": {"name": "resnet18", "width": 2},
        "local": {"lr": 0.05, "steps": 1, "batch_size": 16},
    }
    forgetting: dict[str, Any] = {"every": 1, "examples": measure == "matrix"}
    if measure in MEASURES:
        forgetting["measures"] = [measure]
    if measure == "everyone":
        forgetting["clients"] = "all"
    evaluate = {"every": 1, "personalised": measure == "personalised"}
    with_it = fedretain.run({**base, "forgetting": forgetting, "evaluate": evaluate}, out=tmp_path / "with")
    without = fedretain.run({**base, "forgetting": {"every": 0}, "evaluate": {"every": 0}}, out=tmp_path / "without")
    ours, theirs = with_it.checkpoint().state, without.checkpoint().state
    assert ours.buffers.keys() == theirs.buffers.keys()
    assert len(ours.buffers) > 0
    for section in ("params", "buffers", "server"):
        a, b = getattr(ours, section), getattr(theirs, section)
        assert all(torch.equal(a[name], b[name]) for name in a)
    assert with_it.metrics["train_loss"] == without.metrics["train_loss"]


def records_of(path: Path, measure: str) -> dict[str, dict[str, np.ndarray]]:
    found = {}
    for file in sorted((path / measure).iterdir()):
        with np.load(file) as record:
            found[file.name] = dict(record)
    return found


def interrupted(experiment: dict[str, Any], out: Path) -> Path:
    """Rounds 1 to 5, then the rest: the participants of earlier rounds need not have been stored."""
    fedretain.run({**experiment, "rounds": 5}, out=out)
    return fedretain.run(experiment, out=out, resume=True).path


def test_an_interrupted_run_measures_the_same_bits(tmp_path: Path) -> None:
    """All measures that FedAvg has, on a run that stopped in between."""
    measures = ["classes", "drift", "loss_increase"]
    experiment = {**ALL, "method": "fedavg", "forgetting": {"every": 1, "measures": measures}}
    straight = fedretain.run(experiment, out=tmp_path / "straight").path
    path = interrupted(experiment, tmp_path / "interrupted")
    assert rows_of(path) == rows_of(straight)
    for measure, rounds in zip(measures, (13, 13, 12), strict=True):
        ours, theirs = records_of(straight, measure), records_of(path, measure)
        assert len(ours) == rounds
        assert ours.keys() == theirs.keys()
        for name, arrays in ours.items():
            assert arrays.keys() == theirs[name].keys()
            for key, value in arrays.items():
                np.testing.assert_array_equal(value, theirs[name][key])


def test_fisher_agreement_goes_on_after_an_interruption(whole: fedretain.Run, tmp_path: Path) -> None:
    """The same previous data in every round, and the same agreement.

    Not the same bits: a checkpoint gives the tensors back in another order, and FedReg's inner products over all
    parameters round differently then, by about 1e-7 in a weight.
    """
    path = interrupted({**ALL, **MEASURED}, tmp_path / "interrupted")
    ours, theirs = records_of(whole.path, "fisher"), records_of(path, "fisher")
    assert list(ours) == [f"round-{t:06d}.npz" for t in range(2, 14)]
    assert ours.keys() == theirs.keys()
    for name, arrays in ours.items():
        np.testing.assert_array_equal(arrays["data"], theirs[name]["data"])
        np.testing.assert_array_equal(arrays["models"], theirs[name]["models"])
        np.testing.assert_allclose(arrays["agreement"], theirs[name]["agreement"], rtol=0, atol=0)


@pytest.mark.parametrize("measure", list(MEASURES))
def test_measures_do_not_depend_on_the_order_of_tensors(measure: str) -> None:
    """Tensors read from a checkpoint come in any order; the same bits must come out."""
    moment = moment_of(10, method={"name": "fedreg", "gamma": 0.5, "eta_s": 0.1})
    turned = moment._replace(received=moment.received._replace(params=dict(reversed(moment.received.params.items()))))
    one, other = MEASURES[measure](moment), MEASURES[measure](turned)
    assert one is not None
    assert other is not None
    assert one.numbers == other.numbers


def test_previous_data_are_those_of_the_participants_of_the_rounds_before(whole: fedretain.Run) -> None:
    """The last round for the loss increase, the last ten for the Fisher agreement: in round 13 rounds 3 to 12."""
    cohorts = {row["round"]: row["clients"]["id"] for row in whole.metrics}
    assert set(cohorts[2]) - {client for t in range(3, 13) for client in cohorts[t]}, "too few clients to tell"
    for t in range(2, 14):
        with np.load(whole.path / "loss_increase" / f"round-{t:06d}.npz") as record:
            assert record["data"].tolist() == cohorts[t - 1]
            assert record["models"].tolist() == cohorts[t]
        with np.load(whole.path / "fisher" / f"round-{t:06d}.npz") as record:
            assert record["data"].tolist() == sorted({k for s in range(max(1, t - 10), t) for k in cohorts[s]})
            assert np.nanmean(record["agreement"]) == pytest.approx(whole.metrics[t - 1]["fisher_agreement"])


def test_the_page_of_the_run_directory_names_every_number_and_array(whole: fedretain.Run, tmp_path: Path) -> None:
    page = (Path(__file__).parents[1] / "docs" / "run-directory.md").read_text(encoding="utf-8")
    section = page.split("\n## Further measures\n")[1].split("\n## ")[0]
    plain = fedretain.run({**ALL, "rounds": 1, "forgetting": {"every": 1}}, out=tmp_path / "plain")
    for measure in MEASURES:
        text = section.split(f"\n### `{measure}`\n")[1].split("\n### ")[0]
        named = [set(re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)) for table in text.split("| array |")]
        with np.load(whole.path / measure / "round-000013.npz") as record:
            assert named[1] == set(record.files)
        alone = {**ALL, "rounds": 2, "forgetting": {"every": 1, "measures": [measure]}}
        rows = fedretain.run(alone, out=tmp_path / measure).metrics
        assert named[0] == {key for row in rows for key in row} - plain.metrics[0].keys()
