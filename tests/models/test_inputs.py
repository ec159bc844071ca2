from __future__ import annotations

import pytest

from fedretain.errors import ConfigError
from fedretain.models.inputs import check_task


def test_a_shape_at_the_limit_passes_and_one_below_fails() -> None:
    check_task("cnn", (1, 20, 20), 10, smallest=20)
    with pytest.raises(ConfigError, match=r"height and width of at least 20, got \(1, 20, 19\); enlarge"):
        check_task("cnn", (1, 20, 19), 10, smallest=20)


@pytest.mark.parametrize("shape", [(28, 28), (0, 28, 28), (1, -1, 28)])
def test_malformed_shapes_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError, match=r"\(channels, height, width\), all positive"):
        check_task("mlp", shape, 10)  # type: ignore[arg-type]


def test_no_classes_are_refused() -> None:
    with pytest.raises(ConfigError, match="classes = 0 is not allowed"):
        check_task("mlp", (1, 28, 28), 0)
