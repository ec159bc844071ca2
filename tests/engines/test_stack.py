"""Clients side by side: rooms, buckets, states of every size, and batches that are those of the loop engine."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations, pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.agreement.conftest import BY_OWNER, dataset, owned, settings

from fedretain.config import make_experiment
from fedretain.engines.schedule import local_batches
from fedretain.engines.stack import (
    OVERHEAD,
    Member,
    in_buckets,
    kept_states,
    like_costs,
    normalised,
    per_example_state,
    roomy,
    stack,
)
from fedretain.experiment import build_world
from fedretain.methods import FedAvg, FedWAvg, Method, Own, Scaffold, chain
from fedretain.tensors import Tensors


def test_rooms_are_powers_of_two_and_one_and_a_half_times_these() -> None:
    sizes = [1, 2, 3, 4, 5, 6, 7, 9, 12, 13, 17, 24, 25, 1000]
    assert [roomy(size) for size in sizes] == [1, 2, 3, 4, 6, 6, 8, 12, 12, 16, 24, 24, 32, 1024]


@given(st.integers(1, 10**6))
def test_a_room_is_large_enough_and_at_most_half_as_much_again(size: int) -> None:
    assert size <= roomy(size) <= max(1, 1.5 * size)
    assert roomy(roomy(size)) == roomy(size)


@given(st.lists(st.integers(1, 60), min_size=1, max_size=40), st.floats(0.1, 50))
def test_buckets_hold_everybody_once_and_cost_no_more_than_one(steps: list[int], overhead: float) -> None:
    taken = np.array(steps)
    buckets = in_buckets(taken, lambda clients: overhead + clients)
    assert sorted(np.concatenate(buckets).tolist()) == list(range(len(steps)))
    cost = sum(taken[bucket].max() * (overhead + len(bucket)) for bucket in buckets)
    assert cost <= taken.max() * (overhead + len(steps)) + 1e-9
    ends = [(taken[bucket].max(), taken[bucket].min()) for bucket in buckets]
    assert all(first[1] >= second[0] for first, second in pairwise(ends))


def test_one_long_client_does_not_hold_up_the_others() -> None:
    """One client of 100 steps and seven of 1; a step of n clients costs 1 + n.

    Together 100·9 = 900; two buckets of four 100·5 + 5 = 505; four of two 100·3 + 3·3 = 309; eight 100·2 + 7·2 = 214.
    """
    buckets = in_buckets(np.array([1, 1, 1, 100, 1, 1, 1, 1]), lambda clients: 1 + clients)
    assert [bucket.tolist() for bucket in buckets] == [[3], [0], [1], [2], [4], [5], [6], [7]]


def test_like_clients_stay_together_and_in_order() -> None:
    (bucket,) = in_buckets(np.full(9, 5), lambda clients: 16 + clients)
    assert bucket.tolist() == list(range(9))


@given(st.lists(st.integers(1, 60), min_size=1, max_size=8), st.integers(1, 4))
def test_no_other_cuts_make_the_dearest_share_cheaper(steps: list[int], parts: int) -> None:
    """All ways to cut the clients, most steps first, into so many shares or fewer are tried."""
    taken = -np.sort(-np.array(steps))

    def dearest(cuts: list[int]) -> float:
        return max(float(part.sum() + OVERHEAD * part[0]) for part in np.split(taken, cuts))

    cuts = like_costs(taken, parts)
    assert len(cuts) < parts
    others = [list(at) for n in range(min(parts, len(steps))) for at in combinations(range(1, len(steps)), n)]
    assert dearest(cuts) <= min(dearest(at) for at in others) + 1


def test_few_clients_of_many_steps_are_a_share() -> None:
    """Three clients of 40 steps cost 3·40 + 16·40 = 760; forty of 10 cost 40·10 + 16·10 = 560, and 24 more of them 800.

    In turns, half of each kind, either share would cost 60 + 320 + 640 = 1020.
    """
    steps = np.array([40] * 3 + [10] * 64)
    (cut,) = like_costs(steps, 2)
    assert 3 <= cut <= 6
    assert like_costs(np.full(10, 5), 1) == []


@dataclass(frozen=True)
class Told(Method):
    """Keeps a number, a matrix, and one entry for every example."""

    def init_client(self, params: Tensors, own: Own) -> Tensors:
        entries = torch.zeros(len(own.data.labels), 2)
        return {"number": torch.zeros(()), "matrix": torch.zeros(2, 3), "entries": entries}


@pytest.mark.parametrize(
    ("method", "names"),
    [
        (Told(), {"entries"}),
        (Scaffold(), set()),
        (FedAvg(), set()),
        (FedWAvg(0.3), {"correct"}),
        (chain(Scaffold(), FedWAvg(0.3)), {"fedwavg/correct"}),
    ],
    ids=lambda value: value.name if isinstance(value, Method) else "",
)
def test_states_with_an_entry_per_example(method: Method, names: set[str]) -> None:
    """Scaffold's matrices have two and three rows here as well, whatever the client holds."""
    world = build_world(make_experiment(settings()), dataset())
    assert per_example_state(method, {"w": torch.zeros(3, 2)}, world.federation) == names


def test_kept_and_fresh_states_side_by_side() -> None:
    """The second client was seen before, with three examples; the stack has room for four."""
    world = build_world(make_experiment(settings()), dataset())
    fresh = {"count": torch.tensor([1, 1]), "correct": torch.ones(2, 4, dtype=torch.bool)}
    seen = {"correct": torch.tensor([True, False, True]), "count": torch.tensor(7)}
    members = [Member(world, 0, None), Member(world, 1, seen)]
    states = kept_states(members, fresh, 4, frozenset({"correct"}))
    assert list(states) == ["count", "correct"]
    assert states["count"].tolist() == [1, 7]
    assert states["correct"].tolist() == [[True] * 4, [True, False, True, False]]
    assert kept_states([Member(world, 0, None)] * 2, fresh, 4, frozenset()) is fresh


@pytest.mark.parametrize("augment", ["none", "crop_flip"])
@pytest.mark.parametrize("gather", [True, False])
def test_batches_are_those_of_the_schedule(gather: bool, augment: str) -> None:
    """Clients of 23, 9 and 6 examples in batches of 5: 5, 2 and 2 steps of an epoch, then padding of weight 0."""
    experiment = make_experiment(settings(local={"epochs": 1, "augment": augment}))
    world = build_world(experiment, dataset())
    clients = [0, 1, 3]
    assert world.federation.train.sizes[clients].tolist() == [23, 9, 6]
    stacked = stack([Member(world, client, None) for client in clients], 2, gather=gather)
    assert stacked.plan.steps.tolist() == [5, 2, 2]
    for column, client in enumerate(clients):
        numbers = world.federation.train[client]
        batches = local_batches(world.seed, 2, client, len(numbers), world.local)
        for step in range(5):
            batch = stacked.batch(step)
            taken = numbers[batches[step]] if step < len(batches) else []
            weights = torch.ones(3, 5) if batch.weights is None else batch.weights
            assert weights[column].tolist() == [1.0] * len(taken) + [0.0] * (5 - len(taken))
            inputs, labels = world.federation.examples(np.array(taken, dtype=np.int64))
            assert torch.equal(batch.labels[column, : len(taken)], labels)
            if augment == "none":
                assert torch.equal(batch.inputs[column, : len(taken)], inputs)


def test_what_belongs_to_each_client() -> None:
    world = build_world(make_experiment(settings(method={"name": "fedprox", "mu": 0.1})), dataset())
    stacked = stack([Member(world, client, None) for client in (3, 0)], 1)
    assert stacked.own.examples.tolist() == [6, 23]
    assert stacked.own.data.labels.shape == (2, 24)
    assert stacked.own.data.weights is not None
    assert stacked.own.data.weights.sum(1).tolist() == [6, 23]
    for row, client in enumerate((3, 0)):
        assert torch.equal(stacked.own.class_counts[row], world.federation.class_counts(client))


@pytest.mark.parametrize("whole", [True, False])
def test_batches_of_all_steps_are_those_of_single_steps(whole: bool) -> None:
    """Whether they are cut from the clients' own data or from the whole dataset, kept normalised."""
    world = build_world(make_experiment(settings(local={"epochs": 2})), dataset())
    stacked = stack([Member(world, client, None) for client in (0, 1, 3)], 2, gather=not whole)
    batches = list(stacked.batches(normalised(world) if whole else None))
    assert len(batches) == len(stacked.plan.lengths)
    for step, batch in enumerate(batches):
        for one, other in zip(batch, stacked.batch(step), strict=True):
            assert one is other is None or torch.equal(one, other)


def widths_of(sizes: list[int], epochs: int = 1) -> list[int]:
    """The widths of a stack of clients with so many examples, in batches of five."""
    given = settings(participation=len(sizes), local={"epochs": epochs}) | {"partition": BY_OWNER}
    world = build_world(make_experiment(given), owned(sizes))
    return stack([Member(world, client, None) for client in range(len(sizes))], 1).widths()


def test_a_stack_gets_smaller_by_eighths_and_then_by_halves() -> None:
    """64 clients have three steps, 33 of them one more, then 31, 16, 5 and 1.

    The stack is 128 / 8 = 16 clients wide or a multiple of it; 5 and 1 go to the next power of two from 8 on.
    """
    left = [64, 64, 64, 33, 31, 16, 5, 1]
    steps = np.sum(np.arange(64)[:, None] < np.array(left), 1)
    assert widths_of((5 * steps).tolist()) == [64, 64, 64, 48, 32, 16, 8, 8]


def test_a_stack_keeps_its_width_where_clients_are_alike_or_in_another_order() -> None:
    assert widths_of([10] * 20, epochs=2) == [20] * 4
    assert widths_of([5] * 19 + [15]) == [20] * 3


def test_a_large_or_augmented_dataset_is_not_kept_normalised(monkeypatch: pytest.MonkeyPatch) -> None:
    world = build_world(make_experiment(settings()), dataset())
    kept = normalised(world)
    assert kept is not None
    assert torch.equal(kept, world.federation.normalise(world.federation.inputs))
    assert normalised(build_world(make_experiment(settings(local={"augment": "crop_flip"})), dataset())) is None
    monkeypatch.setattr("fedretain.engines.stack.KEPT_DATA", kept.numel() * kept.element_size() - 1)
    assert normalised(world) is None
