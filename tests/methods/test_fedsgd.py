"""FedSGD: a round by hand, and what it refuses."""

from __future__ import annotations

from typing import Any

import pytest

from fedretain.errors import ConfigError

A, B = [((1, 0), 0)], [((0, 1), 1), ((0, 1), 1)]


def test_two_clients_by_hand(play: Any, model: Any, assert_close: Any) -> None:
    """From zero all softmaxes are ½; η = ½, p = (1/3, 2/3), and local.batch_size: 1 is not used.

    a: gradient −½·(1, 0; 1), so w_a = (¼, 0; ¼). b: gradient ½·(0, 1; 1), so w_b = (0, −¼; −¼): one step although
    batches of one example would be two. w = w_a/3 + 2·w_b/3 = (1/12, −1/6; 1/12 − 1/6).
    """
    end = play(A, B, method="fedsgd", local={"lr": 0.5, "steps": None, "batch_size": 1})
    assert_close(end.params, model(1 / 12, -1 / 6, -1 / 12))
    assert end.rows[0]["clients"]["steps"] == [1, 1]


@pytest.mark.parametrize("local", [{"epochs": 3}, {"epochs": 0.5}, {"steps": 2}])
def test_more_local_work_is_refused(local: dict[str, Any], play: Any) -> None:
    with pytest.raises(ConfigError, match=r"fedsgd takes one full-batch step a round; remove local\.epochs"):
        play(A, B, method="fedsgd", local={"steps": None, **local})
