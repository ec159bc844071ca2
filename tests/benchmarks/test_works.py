"""Every runner is given the same work, and reads it as fedretain does it."""

import dataclasses

import numpy as np
import pytest
import torch
from benchmarks.peers.given import Given, Objective, seconds_per_round, train_client
from benchmarks.peers.networks import NETWORKS
from benchmarks.works import SWEEP, WORKS, Variant, Work, dataset_of, pack, unpack

import fedretain
from fedretain.losses import LOSSES
from fedretain.models import build_model

TINY = Work("tiny", 6, 10, 2, 2, 4, (3, 4, 1), {"name": "mlp", "hidden": [64]}, (Variant(), Variant(1, 0.1, "wsm")))


@pytest.fixture
def given(tmp_path):
    pack(TINY, 2, tmp_path)
    return Given(tmp_path)


def test_double_precision_reaches_model_examples_and_loss(tmp_path):
    pack(TINY, 1, tmp_path, "float64")
    given = Given(tmp_path)
    inputs, labels = given.examples(0)
    logits = given.model(0)(inputs)
    losses = [Objective(loss, given.counts(0))(logits, labels) for loss in ("ce", "wsm")]
    assert {tensor.dtype for tensor in (inputs, logits, *losses)} == {torch.float64}


def test_the_checked_work_has_two_whole_batches_and_a_partial_one():
    """Two and a half batches of 32, 64, 10 and 64, but not more than a client holds (20 in W3)."""
    assert [work.small().examples for work in WORKS.values()] == [80, 160, 20, 160]


@pytest.mark.parametrize("work", WORKS.values(), ids=list(WORKS))
def test_networks_are_those_of_fedretain(work):
    """Same parameter names and shapes, and the same outputs from the same parameters."""
    theirs = build_model(
        work.model["name"], work.shape, 10, seed=0, **{k: v for k, v in work.model.items() if k != "name"}
    )
    ours = NETWORKS[work.model["name"]](work.shape, 10)
    ours.load_state_dict(theirs.state_dict())
    inputs = torch.linspace(0, 1, 2 * int(np.prod(work.shape))).reshape(2, *work.shape)
    assert torch.allclose(ours(inputs), theirs(inputs), atol=1e-6)


def test_the_cnn_is_the_one_of_the_fedavg_paper():
    assert sum(p.numel() for p in NETWORKS["fedavg_cnn"]((1, 28, 28), 10).parameters()) == 1_663_370


@pytest.mark.parametrize("loss", ["ce", "wsm"])
def test_objectives_are_those_of_fedretain(loss):
    logits, labels = torch.tensor([[1.0, -2.0, 0.5], [0.0, 3.0, 1.0]]), torch.tensor([0, 2])
    counts = torch.tensor([6, 3, 1])
    expected = LOSSES[loss](logits, labels, counts).mean()
    assert torch.allclose(Objective(loss, counts)(logits, labels), expected)


def test_the_sweep_has_twelve_variants_of_seed_rate_and_loss():
    assert len(set(SWEEP)) == 12
    assert [len({getattr(v, name) for v in SWEEP}) for name in ("seed", "lr", "loss")] == [2, 3, 2]
    assert dataclasses.replace(WORKS["W4-sweep"], name="", variants=(), at_most_rounds=None) == dataclasses.replace(
        WORKS["W2-cifar-lenet"], name="", variants=()
    )


def test_long_works_are_timed_for_fewer_rounds_and_short_ones_for_more():
    """A number that is asked for holds, but for the sweep."""
    assert {name.split("-")[0]: work.rounds() for name, work in WORKS.items()} == {"W1": 3, "W2": 3, "W3": 30, "W4": 1}
    assert [work.rounds(5) for work in WORKS.values()] == [5, 5, 5, 1]


def test_every_epoch_goes_once_through_the_examples(given):
    """10 examples in batches of 4: 4, 4 and 2; two epochs, so 6 steps."""
    client = given.cohort(0, 1)[1]
    inputs, labels = given.examples(client)
    order = given.order(0, 1, client)
    assert order.shape == (2, 10)
    assert [sorted(epoch.tolist()) for epoch in order] == [list(range(10))] * 2
    sizes = [len(y) for epoch in order for _, y in given.batches(inputs, labels, epoch)]
    assert sizes == [4, 4, 2] * 2


@pytest.mark.parametrize("index", [0, 1])
def test_the_hand_written_loop_ends_where_fedretain_ends(given, tmp_path, index):
    """The given schedule, trained by hand: two rounds, the mean of the two participants' parameters each."""
    variant = given.variants[index]
    model = given.model(variant["seed"])
    for number in (1, 2):
        states = []
        for client in given.cohort(variant["seed"], number):
            local = given.model(variant["seed"])
            local.load_state_dict(model.state_dict())
            train_client(local, given, variant, number, client)
            states.append(local.state_dict())
        model.load_state_dict({name: torch.stack([s[name] for s in states]).mean(0) for name in states[0]})
    run = fedretain.run(TINY.experiment(TINY.variants[index], 2), out=tmp_path / "run", data=dataset_of(*TINY.data()))
    for name, value in run.model().state_dict().items():
        assert torch.allclose(value, model.state_dict()[name], atol=1e-6), name
        assert not torch.allclose(value, given.model(variant["seed"]).state_dict()[name], atol=1e-5), name


def test_seconds_of_rounds_leave_out_the_first_and_add_up_over_trainings():
    """Ends at 10, 12, 15 and at 30, 31, 35: rounds 2 + 1 = 3 s and 3 + 4 = 7 s."""
    assert seconds_per_round([[10.0, 12.0, 15.0], [30.0, 31.0, 35.0]]) == [3.0, 7.0]


def test_a_packed_work_says_how_it_is_done(given):
    assert unpack(given.folder) == (TINY, 2, "float32")
    assert given.variants[1] == {"seed": 1, "lr": 0.1, "loss": "wsm"}
