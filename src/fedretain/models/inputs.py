"""What a model takes: the shape of one example and the number of classes."""

from __future__ import annotations

from fedretain.errors import ConfigError

Shape = tuple[int, int, int]
"""One example as (channels, height, width); a feature vector of length D is (D, 1, 1)."""


def check_task(model: str, shape: Shape, classes: int, *, smallest: int = 1) -> None:
    """Refuse a task that the architecture cannot take.

    ``smallest`` is the least height and width whose last feature map still holds a pixel.
    """
    if len(shape) != 3 or min(shape) < 1:
        raise ConfigError(
            f"model {model!r}: an example has the shape (channels, height, width), all positive, "
            f"got {shape}; give a feature vector of length D as (D, 1, 1)"
        )
    if classes < 1:
        raise ConfigError(f"model {model!r}: classes = {classes} is not allowed; it must be at least 1")
    if min(shape[1:]) < smallest:
        hint = (
            "feature vectors need the model 'mlp'"
            if shape[1:] == (1, 1)
            else "enlarge the images or use a model for small inputs, such as 'mlp'"
        )
        raise ConfigError(
            f"model {model!r} needs images of shape (channels, height, width) with height and width "
            f"of at least {smallest}, got {shape}; {hint}"
        )
