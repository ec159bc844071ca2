"""Architectures: one file each, plain PyTorch, built by name.

Every architecture is built by ``Class(shape, classes, *, …)``, takes normalised inputs [B, C, H, W],
returns logits [B, classes], names its last layer ``classifier``, and draws nothing at random after its
construction.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from fedretain.components import complete, find
from fedretain.errors import ConfigError
from fedretain.models.cnn import CNN
from fedretain.models.cnn10 import CNN10
from fedretain.models.densenet121 import DenseNet121
from fedretain.models.fedavg_cnn import FedAvgCNN
from fedretain.models.inputs import Shape
from fedretain.models.lenet import LeNet
from fedretain.models.mlp import MLP
from fedretain.models.norm import norm_layer
from fedretain.models.resnet9 import ResNet9
from fedretain.models.resnet18 import ResNet18
from fedretain.models.shallow_resnet import ShallowResNet
from fedretain.models.vit import ViT
from fedretain.randomness import drawing_from

__all__ = ["MODELS", "SUPPLIED", "Shape", "build_model", "norm_layer"]

SUPPLIED = ("self", "shape", "classes")
"""What the data decides; all other parameters of a constructor are keys of the experiment file."""

MODELS: Mapping[str, type[nn.Module]] = MappingProxyType(
    {
        "mlp": MLP,
        "lenet": LeNet,
        "cnn": CNN,
        "fedavg_cnn": FedAvgCNN,
        "cnn10": CNN10,
        "resnet18": ResNet18,
        "shallow_resnet": ShallowResNet,
        "resnet9": ResNet9,
        "densenet121": DenseNet121,
        "vit": ViT,
    }
)


def build_model(name_or_import_path: str, shape: Shape, classes: int, *, seed: int, **hyper: Any) -> nn.Module:
    """Build a model on the CPU; the same seed gives the same initial parameters, bit for bit."""
    architecture = find("model", MODELS, name_or_import_path)
    if not (inspect.isclass(architecture) and issubclass(architecture, nn.Module)):
        raise ConfigError(f"model {name_or_import_path!r} is no torch.nn.Module class")
    arguments = complete("model", architecture, hyper, SUPPLIED)
    with torch.device("cpu"), drawing_from(seed, "model"):
        return architecture(shape, classes, **arguments)
