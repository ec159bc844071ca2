"""Batches and cohorts: exact sizes, reproducible, independent of everything but their names."""

from __future__ import annotations

from unittest import mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedretain.config import LocalSettings
from fedretain.engines.schedule import local_batches, local_steps, sample_cohort, schedule
from fedretain.errors import ConfigError


def settings(**keys) -> LocalSettings:
    return LocalSettings.model_validate(keys)


@pytest.mark.parametrize(
    ("examples", "keys", "steps"),
    [
        (450, {"batch_size": 64, "epochs": 1, "drop_last": True}, 7),
        (450, {"batch_size": 64, "epochs": 3, "drop_last": True}, 21),
        (450, {"batch_size": 64, "epochs": 1}, 8),
        (450, {"batch_size": 64, "epochs": 0.5, "drop_last": True}, 4),
        (450, {"batch_size": 64, "epochs": 0.01}, 1),
        (10, {"batch_size": 64, "epochs": 5}, 5),
        (64, {"batch_size": 64, "epochs": 2, "drop_last": True}, 2),
        (450, {"batch_size": 64, "steps": 13}, 13),
    ],
)
def test_number_of_steps(examples: int, keys: dict, steps: int) -> None:
    """450 examples in batches of 64: seven whole batches and one of two; wsm-paper drops the last."""
    assert local_steps(examples, settings(**keys)) == steps
    assert len(local_batches(0, 1, 0, examples, settings(**keys))) == steps


def test_batch_larger_than_a_client_with_drop_last_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"batch_size: 64 is larger than a client's 63"):
        local_steps(63, settings(batch_size=64, drop_last=True))


@given(
    examples=st.integers(1, 70),
    batch=st.integers(1, 40),
    epochs=st.integers(1, 3),
    client=st.integers(0, 5),
)
def test_every_epoch_is_a_permutation(examples: int, batch: int, epochs: int, client: int) -> None:
    local = settings(batch_size=batch, epochs=epochs)
    batches = local_batches(3, 2, client, examples, local)
    per_epoch = len(batches) // epochs
    for epoch in range(epochs):
        seen = np.concatenate(batches[epoch * per_epoch : (epoch + 1) * per_epoch])
        assert sorted(seen.tolist()) == list(range(examples))
    again = local_batches(3, 2, client, examples, local)
    assert all(np.array_equal(a, b) for a, b in zip(batches, again, strict=True))


def test_a_larger_batch_than_the_client_is_one_full_batch() -> None:
    batches = local_batches(0, 1, 0, 5, settings(batch_size=100, epochs=2))
    assert [len(batch) for batch in batches] == [5, 5]


def test_cohorts() -> None:
    first = sample_cohort(7, 1, 1000, 10)
    assert len(set(first.tolist())) == 10
    assert np.array_equal(first, np.sort(first))
    assert np.array_equal(first, sample_cohort(7, 1, 1000, 10))
    assert not np.array_equal(first, sample_cohort(7, 2, 1000, 10))
    assert not np.array_equal(first, sample_cohort(8, 1, 1000, 10))
    assert sample_cohort(7, 1, 5, 5).tolist() == [0, 1, 2, 3, 4]


def test_every_client_is_equally_likely() -> None:
    """500 rounds, 3 of 10: each client expects 150 rounds, σ = √(500·0.3·0.7) ≈ 10.2; six σ are allowed."""
    counts = np.bincount(np.concatenate([sample_cohort(1, t, 10, 3) for t in range(500)]), minlength=10)
    assert np.abs(counts - 150).max() < 62


@given(
    sizes=st.lists(st.integers(1, 40), min_size=1, max_size=6),
    batch=st.integers(1, 30),
    work=st.one_of(st.builds(dict, epochs=st.floats(0.01, 3)), st.builds(dict, steps=st.integers(1, 9))),
    drop_last=st.booleans(),
    seed=st.integers(0, 3),
    many=st.sampled_from([1, 100]),
)
def test_the_schedule_of_many_is_that_of_each(
    sizes: list[int], batch: int, work: dict, drop_last: bool, seed: int, many: int
) -> None:
    """Side by side: the same examples in the same order, 0 in length once a client has done all its steps.

    Both drawn by NumPy and by the kernel, which is for ``many`` clients and more.
    """
    drop_last = drop_last and batch <= min(sizes)
    local = settings(batch_size=batch, drop_last=drop_last, **work)
    room = min(batch, max(sizes)) + 1
    streams = [(seed + index % 2, 10 * index) for index in range(len(sizes))]
    with mock.patch("fedretain.engines.schedule.MANY", many):
        plan = schedule(streams, 3, sizes, local, room)
    assert plan.positions.shape == (max(plan.steps), len(sizes), room)
    for column, (size, (own_seed, client)) in enumerate(zip(sizes, streams, strict=True)):
        batches = local_batches(own_seed, 3, client, size, local)
        assert plan.steps[column] == len(batches)
        assert plan.lengths[:, column].tolist() == [len(at) for at in batches] + [0] * (max(plan.steps) - len(batches))
        for step, at in enumerate(batches):
            assert plan.positions[step, column, : len(at)].tolist() == at.tolist()
            assert not plan.positions[step, column, len(at) :].any()
