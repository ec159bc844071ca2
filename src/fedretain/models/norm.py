"""Normalisation of feature maps, chosen by name."""

from __future__ import annotations

from typing import Literal, get_args

from torch import nn

from fedretain.errors import ConfigError, unknown

Norm = Literal["batch", "group", "layer"]


def norm_layer(kind: Norm, channels: int, groups: int) -> nn.Module:
    """Normalisation over ``channels`` feature maps.

    y = (x − mean) / sqrt(var + 1e-5) · weight + bias, with mean and var over

    - ``batch``: the examples and pixels of each channel (Ioffe & Szegedy 2015); keeps running statistics;
    - ``group``: the channels and pixels of each of ``groups`` groups, per example (Wu & He 2018);
    - ``layer``: all channels and pixels of an example, that is, group normalisation with one group.
    """
    if kind not in get_args(Norm):
        raise ConfigError(unknown("norm", kind, get_args(Norm)))
    if kind == "batch":
        return nn.BatchNorm2d(channels)
    groups = 1 if kind == "layer" else groups
    if channels % groups:
        raise ConfigError(
            f"groups = {groups} is not allowed: a layer has {channels} channels, and the number of groups "
            "must divide the channels of every layer; choose another number of groups or another width"
        )
    return nn.GroupNorm(groups, channels)
