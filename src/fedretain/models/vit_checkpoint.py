"""Pretrained vision transformers: from a checkpoint in the naming of ``transformers`` to our parameters."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from math import isqrt
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from fedretain.errors import ConfigError, MissingExtraError

WEIGHTS = "model.safetensors"
CONFIG = "config.json"
# Parts of a checkpoint that are no part of the encoder: its own heads and the token for masked pre-training.
IGNORED = ("classifier.", "pooler.", "embeddings.mask_token", "decoder.")
# Ours <- theirs, within one encoder layer; queries, keys and values are fused separately.
BLOCK_NAMES = {
    "norm_attention": "layernorm_before",
    "project": "attention.output.dense",
    "norm_mlp": "layernorm_after",
    "expand": "intermediate.dense",
    "contract": "output.dense",
}


@dataclass(frozen=True)
class ViTSizes:
    """Everything that fixes the shapes and the arithmetic of the encoder, apart from the image size."""

    channels: int
    patch: int
    dim: int
    depth: int
    heads: int
    hidden: int
    eps: float


@dataclass(frozen=True)
class ViTCheckpoint:
    """A pretrained encoder: its sizes and its tensors under our names (no classifier)."""

    source: str
    sizes: ViTSizes
    image_size: int
    tensors: Mapping[str, Tensor]

    def load_into(self, model: nn.Module, rows: int, columns: int) -> None:
        """Copy the tensors into ``model``, positions interpolated to rows × columns; no classifier."""
        positions = interpolate_positions(self.tensors["positions"], rows, columns)
        try:
            result = model.load_state_dict({**self.tensors, "positions": positions}, strict=False)
        except RuntimeError as error:
            raise ConfigError(f"{self.source}: the tensors do not fit together: {error}") from error
        absent = [name for name in result.missing_keys if not name.startswith("classifier.")]
        if absent or result.unexpected_keys:
            raise ConfigError(
                f"{self.source} is not a vision transformer as 'transformers' names it (model_type 'vit'): "
                f"missing {absent}, not understood {result.unexpected_keys}"
            )


def interpolate_positions(positions: Tensor, rows: int, columns: int) -> Tensor:
    """Position embeddings [1, 1 + side², dim] of a square grid, resampled (bicubic) to rows × columns.

    The class token's embedding stays as it is. Dosovitskiy et al. 2021, §3.2.
    """
    dim = positions.shape[-1]
    side = isqrt(positions.shape[1] - 1)
    if (rows, columns) == (side, side):
        return positions
    grid = positions[:, 1:].float().reshape(1, side, side, dim).permute(0, 3, 1, 2)
    grid = F.interpolate(grid, size=(rows, columns), mode="bicubic", align_corners=False)
    return torch.cat((positions[:, :1].float(), grid.flatten(2).transpose(1, 2)), dim=1)


def read_checkpoint(pretrained: str) -> ViTCheckpoint:
    """Read a pretrained encoder from a folder, a ``.safetensors`` file, or the Hugging Face hub."""
    weights, config = _locate(pretrained)
    try:
        settings: dict[str, Any] = json.loads(config.read_text(encoding="utf-8"))
        raw: dict[str, Tensor] = load_file(weights)
    except (OSError, ValueError, SafetensorError) as error:
        raise ConfigError(f"pretrained = {pretrained!r}: cannot read the checkpoint: {error}") from error
    source = f"pretrained = {pretrained!r}"
    for key, allowed in (("model_type", "vit"), ("hidden_act", "gelu")):
        if settings.get(key) != allowed:
            raise ConfigError(f"{source}: {CONFIG} says {key} = {settings.get(key)!r}; only {allowed!r} is supported")
    try:
        tensors = _renamed(_without_prefix(raw))
        sizes = _sizes(tensors, heads=int(settings["num_attention_heads"]), eps=float(settings["layer_norm_eps"]))
    except KeyError as error:
        raise ConfigError(
            f"{source}: no {error.args[0]!r} in the checkpoint or its {CONFIG}; "
            "give a vision transformer saved by 'transformers' (ViTModel or ViTForImageClassification)"
        ) from error
    except (RuntimeError, TypeError, ValueError) as error:
        raise ConfigError(f"{source}: the checkpoint or its {CONFIG} is malformed: {error}") from error
    side = isqrt(tensors["positions"].shape[1] - 1)
    if 1 + side * side != tensors["positions"].shape[1]:
        raise ConfigError(
            f"{source}: {tensors['positions'].shape[1]} position embeddings are not a class token and a "
            "square grid; only square images without further tokens are supported"
        )
    return ViTCheckpoint(source, sizes, side * sizes.patch, tensors)


def _locate(pretrained: str) -> tuple[Path, Path]:
    """The weights and the configuration as local files."""
    path = Path(pretrained).expanduser()
    if path.is_dir():
        weights = path / WEIGHTS
    elif path.is_file():
        weights = path
    elif re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", pretrained) and path.suffix != ".safetensors":
        return _download(pretrained)
    else:
        raise ConfigError(
            f"pretrained = {pretrained!r}: no such file or folder; give a folder with {WEIGHTS} and "
            f"{CONFIG}, a .safetensors file, or a hub id such as 'google/vit-base-patch16-224-in21k'"
        )
    config = weights.with_name(CONFIG)
    for file in (weights, config):
        if not file.is_file():
            raise ConfigError(
                f"pretrained = {pretrained!r}: {file} is missing; both {WEIGHTS} and {CONFIG} are needed "
                "(the number of heads stands only in the latter)"
            )
    return weights, config


def _download(hub_id: str) -> tuple[Path, Path]:
    try:
        from huggingface_hub import hf_hub_download
        from huggingface_hub.errors import EntryNotFoundError
    except ImportError as error:
        raise MissingExtraError("huggingface_hub", "hub", f"pretrained = {hub_id!r}") from error
    try:
        return Path(hf_hub_download(hub_id, WEIGHTS)), Path(hf_hub_download(hub_id, CONFIG))
    except (OSError, ValueError, EntryNotFoundError) as error:
        raise ConfigError(
            f"pretrained = {hub_id!r} is neither a local file or folder nor could it be fetched from the "
            f"hub: {error}; check the id and the network, or download the model and give its folder"
        ) from error


def _without_prefix(raw: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Encoder tensors alone; a classifier's checkpoint has them under ``vit.``, a bare encoder's not."""
    named = {name.removeprefix("vit."): tensor for name, tensor in raw.items()}
    return {name: tensor for name, tensor in named.items() if not name.startswith(IGNORED)}


def _renamed(theirs: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors under our names; what has no counterpart keeps its name, so that loading refuses it."""
    left = dict(theirs)
    ours = {
        "class_token": left.pop("embeddings.cls_token"),
        "positions": left.pop("embeddings.position_embeddings"),
    }
    for kind in ("weight", "bias"):
        ours[f"embed.{kind}"] = left.pop(f"embeddings.patch_embeddings.projection.{kind}")
        ours[f"norm.{kind}"] = left.pop(f"layernorm.{kind}")
        depth = len({name.split(".")[2] for name in theirs if name.startswith("encoder.layer.")})
        for layer in range(depth):
            block = f"encoder.layer.{layer}"
            ours[f"blocks.{layer}.qkv.{kind}"] = torch.cat(
                [left.pop(f"{block}.attention.attention.{part}.{kind}") for part in ("query", "key", "value")]
            )
            for our_name, their_name in BLOCK_NAMES.items():
                ours[f"blocks.{layer}.{our_name}.{kind}"] = left.pop(f"{block}.{their_name}.{kind}")
    return {**ours, **left}


def _sizes(tensors: Mapping[str, Tensor], *, heads: int, eps: float) -> ViTSizes:
    dim, channels, patch, _ = tensors["embed.weight"].shape
    depth = len({name.split(".")[1] for name in tensors if name.startswith("blocks.")})
    return ViTSizes(channels, patch, dim, depth, heads, tensors["blocks.0.expand.weight"].shape[0], eps)
