"""Sums over uploads do not depend on who sums them, nor do the bytes that clients sent."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from fedretain.engines.chunks import in_order, part_of, summed_up
from fedretain.engines.engine import Uploads
from fedretain.engines.sums import Sums, upload_bytes
from fedretain.randomness import stream

WEIGHTS = torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=torch.float64)


def uploads() -> Uploads:
    """Four clients; the weights w lie transposed in memory, as recorded steps leave them."""
    rng = stream(0, "sums")

    def draw(*shape: int) -> Tensor:
        return torch.from_numpy(rng.normal(size=(4, *shape)))

    return Uploads(
        clients=np.array([7, 2, 5, 3]),
        params={},
        delta={"w": draw(3, 2).mT, "b": draw(3)},
        buffers={"running_mean": draw(3), "num_batches_tracked": torch.tensor([3, 9, 4, 1])},
        extras={"norm": draw(), "count": torch.tensor([1, 2, 3, 4])},
        state={},
        train_loss=draw(),
        steps=np.array([1, 2, 3, 4]),
    )


def close(one: Sums, other: Sums) -> None:
    for kind in ("delta", "mean", "total", "buffers"):
        torch.testing.assert_close(getattr(one, kind), getattr(other, kind))
    assert one.bytes_up == other.bytes_up


def test_sums_by_hand() -> None:
    """Σ p_k·w_k entry by entry; of the counter 9 is the largest; Σ p_k·count_k = 0.1 + 0.4 + 0.9 + 1.6 = 3."""
    whole = uploads()
    sums = summed_up(whole, WEIGHTS).sums
    assert sums is not None
    for name, value in whole.delta.items():
        expected = sum(float(p) * value[k] for k, p in enumerate(WEIGHTS))
        torch.testing.assert_close(sums.delta[name], expected)
    assert sums.buffers["num_batches_tracked"] == 9
    assert list(sums.buffers) == ["running_mean", "num_batches_tracked"]
    assert abs(float(sums.mean["count"]) - 3) < 1e-12
    assert sums.total["count"] == 10
    assert sums.bytes_up == upload_bytes(whole) == 4 * (6 + 3 + 3 + 1 + 1 + 1) * 8


def test_parts_add_up_to_the_whole() -> None:
    whole, together = uploads(), Sums()
    for start, end in ((0, 1), (1, 4)):
        part = summed_up(part_of(whole, start, end), WEIGHTS[start:end])
        assert part.delta == part.buffers == part.extras == {}
        assert part.sums is not None
        together.include(part.sums)
    expected = summed_up(whole, WEIGHTS).sums
    assert expected is not None
    close(together, expected)


def test_summed_chunks_in_another_order() -> None:
    """The first chunk holds positions 3 and 0 of the cohort, the second 1 and 2: losses and steps go with them."""
    whole = uploads()
    chunks = [summed_up(part_of(whole, a, a + 2), WEIGHTS[a : a + 2]) for a in (0, 2)]
    (joined,) = in_order(chunks, np.array([3, 0, 1, 2]))
    assert joined.clients.tolist() == [2, 5, 3, 7]
    assert joined.steps.tolist() == [2, 3, 4, 1]
    assert torch.equal(joined.train_loss, whole.train_loss[[1, 2, 3, 0]])
    expected = summed_up(whole, WEIGHTS).sums
    assert expected is not None
    assert joined.sums is not None
    close(joined.sums, expected)
