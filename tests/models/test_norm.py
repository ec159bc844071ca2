from __future__ import annotations

import pytest
import torch

from fedretain.errors import ConfigError
from fedretain.models.norm import norm_layer

pytestmark = pytest.mark.usefixtures("seeded")


@pytest.mark.parametrize(
    ("kind", "over"),
    [("batch", (0, 2, 3)), ("layer", (1, 2, 3))],
)
def test_mean_0_and_variance_1_over_the_defining_axes(kind: str, over: tuple[int, ...]) -> None:
    """Batch norm: per channel over examples and pixels; layer norm: per example over channels and pixels."""
    maps = torch.randn(5, 4, 6, 6, generator=torch.Generator().manual_seed(0)) * 3 + 1
    output = norm_layer(kind, 4, groups=2)(maps)  # type: ignore[arg-type]
    torch.testing.assert_close(output.mean(over), torch.zeros_like(output.mean(over)), atol=1e-5, rtol=0)
    torch.testing.assert_close(output.var(over, correction=0), torch.ones_like(output.mean(over)))


def test_group_norm_normalises_each_group_of_an_example() -> None:
    """Four channels in two groups: channels 0–1 and 2–3 have mean 0 together; a single channel need not."""
    maps = torch.randn(5, 4, 6, 6, generator=torch.Generator().manual_seed(0)) * 3 + 1
    output = norm_layer("group", 4, groups=2)(maps)
    groups = output.reshape(5, 2, 2 * 36)
    torch.testing.assert_close(groups.mean(2), torch.zeros(5, 2), atol=1e-5, rtol=0)
    torch.testing.assert_close(groups.var(2, correction=0), torch.ones(5, 2))
    assert output.mean((2, 3)).abs().max() > 0.01


def test_groups_must_divide_the_channels() -> None:
    with pytest.raises(ConfigError, match=r"groups = 3 is not allowed: a layer has 4 channels"):
        norm_layer("group", 4, groups=3)


def test_unknown_norm_is_refused() -> None:
    with pytest.raises(ConfigError, match="unknown norm 'instance'"):
        norm_layer("instance", 4, groups=1)  # type: ignore[arg-type]
