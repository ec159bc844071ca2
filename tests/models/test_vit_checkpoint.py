"""Checkpoints in the naming of ``transformers``, built here tensor by tensor."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from fedretain.errors import ConfigError, MissingExtraError
from fedretain.models import build_model
from fedretain.models.vit_checkpoint import interpolate_positions, read_checkpoint

DIM, HEADS, DEPTH, HIDDEN, PATCH, GRID, CHANNELS, EPS = 6, 2, 2, 10, 2, 3, 3, 1e-3
SIDE = PATCH * GRID
CLASSES = 4

CONFIG = {"model_type": "vit", "hidden_act": "gelu", "num_attention_heads": HEADS, "layer_norm_eps": EPS}


def encoder() -> dict[str, Tensor]:
    """Random float64 tensors under the names of ViTModel; no bias or gain at its usual 0 or 1."""
    generator = torch.Generator().manual_seed(0)
    shapes: dict[str, tuple[int, ...]] = {
        "embeddings.cls_token": (1, 1, DIM),
        "embeddings.position_embeddings": (1, 1 + GRID * GRID, DIM),
        "embeddings.patch_embeddings.projection.weight": (DIM, CHANNELS, PATCH, PATCH),
        "embeddings.patch_embeddings.projection.bias": (DIM,),
        "layernorm.weight": (DIM,),
        "layernorm.bias": (DIM,),
    }
    for layer in range(DEPTH):
        matrices = {
            "attention.attention.query": (DIM, DIM),
            "attention.attention.key": (DIM, DIM),
            "attention.attention.value": (DIM, DIM),
            "attention.output.dense": (DIM, DIM),
            "intermediate.dense": (HIDDEN, DIM),
            "output.dense": (DIM, HIDDEN),
            "layernorm_before": (DIM,),
            "layernorm_after": (DIM,),
        }
        for name, shape in matrices.items():
            shapes[f"encoder.layer.{layer}.{name}.weight"] = shape
            shapes[f"encoder.layer.{layer}.{name}.bias"] = shape[:1]
    return {name: torch.randn(shape, generator=generator, dtype=torch.float64) for name, shape in shapes.items()}


def expected_features(tensors: dict[str, Tensor], image: Tensor) -> Tensor:
    """The class token after the last norm, for one image, patch by patch and head by head."""

    def affine(name: str, x: Tensor) -> Tensor:
        return x @ tensors[f"{name}.weight"].T + tensors[f"{name}.bias"]

    def norm(name: str, x: Tensor) -> Tensor:
        centred = x - x.mean(-1, keepdim=True)
        scale = (centred.pow(2).mean(-1, keepdim=True) + EPS).sqrt()
        return centred / scale * tensors[f"{name}.weight"] + tensors[f"{name}.bias"]

    kernel = tensors["embeddings.patch_embeddings.projection.weight"].reshape(DIM, -1)
    rows = [tensors["embeddings.cls_token"][0, 0]]
    for top in range(0, SIDE, PATCH):
        for left in range(0, SIDE, PATCH):
            pixels = image[:, top : top + PATCH, left : left + PATCH].reshape(-1)
            rows.append(kernel @ pixels + tensors["embeddings.patch_embeddings.projection.bias"])
    x = torch.stack(rows) + tensors["embeddings.position_embeddings"][0]
    size = DIM // HEADS
    for layer in range(DEPTH):
        block = f"encoder.layer.{layer}"
        normed = norm(f"{block}.layernorm_before", x)
        q, k, v = (affine(f"{block}.attention.attention.{part}", normed) for part in ("query", "key", "value"))
        outputs = []
        for head in range(HEADS):
            own = slice(head * size, (head + 1) * size)
            scores = torch.exp(q[:, own] @ k[:, own].T / math.sqrt(size))
            outputs.append(scores / scores.sum(1, keepdim=True) @ v[:, own])
        x = x + affine(f"{block}.attention.output.dense", torch.cat(outputs, 1))
        inner = affine(f"{block}.intermediate.dense", norm(f"{block}.layernorm_after", x))
        inner = inner * 0.5 * (1 + torch.erf(inner / math.sqrt(2)))
        x = x + affine(f"{block}.output.dense", inner)
    return norm("layernorm", x)[0]


def write(folder: Path, tensors: dict[str, Tensor], **config: Any) -> str:
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({**CONFIG, **config}))
    return str(folder)


def classifier_checkpoint(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """As ViTForImageClassification saves it: the encoder under ``vit.``, its own head beside it."""
    head = {"classifier.weight": torch.zeros(7, DIM), "classifier.bias": torch.zeros(7)}
    return {**{f"vit.{name}": tensor for name, tensor in tensors.items()}, **head}


def encoder_checkpoint(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """As ViTModel saves it: no prefix, with a pooler."""
    return {**tensors, "pooler.dense.weight": torch.zeros(DIM, DIM), "pooler.dense.bias": torch.zeros(DIM)}


@pytest.mark.parametrize("layout", [classifier_checkpoint, encoder_checkpoint])
def test_logits_against_a_direct_computation(tmp_path: Path, layout: Any) -> None:
    """Loaded from either layout, logits = W·features + b with our own fresh classifier (W, b)."""
    tensors = encoder()
    pretrained = write(tmp_path / "checkpoint", layout(tensors))
    model = build_model("vit", (CHANNELS, SIDE, SIDE), CLASSES, seed=0, pretrained=pretrained).double()
    # Parameters are float32: the reference computes with the same rounded tensors.
    rounded = {name: tensor.float().double() for name, tensor in tensors.items()}
    shape = (3, CHANNELS, SIDE, SIDE)
    images = torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    features = torch.stack([expected_features(rounded, image) for image in images])
    weight, bias = model.get_parameter("classifier.weight"), model.get_parameter("classifier.bias")
    assert weight.shape == (CLASSES, DIM)
    torch.testing.assert_close(model(images), features @ weight.T + bias, rtol=1e-10, atol=1e-10)


def test_a_file_is_as_good_as_its_folder_and_the_seed_draws_the_classifier(tmp_path: Path) -> None:
    folder = write(tmp_path / "checkpoint", encoder())
    file = str(Path(folder) / "model.safetensors")
    one, two = (
        build_model("vit", (CHANNELS, SIDE, SIDE), CLASSES, seed=seed, pretrained=path)
        for seed, path in ((0, folder), (1, file))
    )
    differing = {name for name, value in one.state_dict().items() if not torch.equal(value, two.state_dict()[name])}
    assert differing == {"classifier.weight"}


def test_small_and_grey_images_are_resized_and_repeated(tmp_path: Path) -> None:
    """A grey 4×4 image gives what its bilinear 6×6 enlargement, copied to three channels, gives."""
    pretrained = write(tmp_path / "checkpoint", encoder())
    grey = build_model("vit", (1, 4, 4), CLASSES, seed=0, pretrained=pretrained)
    full = build_model("vit", (CHANNELS, SIDE, SIDE), CLASSES, seed=0, pretrained=pretrained)
    image = torch.randn(2, 1, 4, 4, generator=torch.Generator().manual_seed(1))
    enlarged = torch.nn.functional.interpolate(image, size=(SIDE, SIDE), mode="bilinear").repeat(1, 3, 1, 1)
    torch.testing.assert_close(grey(image), full(enlarged))


def test_resize_changes_the_grid_and_interpolates_positions(tmp_path: Path) -> None:
    pretrained = write(tmp_path / "checkpoint", encoder())
    model = build_model("vit", (CHANNELS, 12, 12), CLASSES, seed=0, pretrained=pretrained, resize=10)
    positions = model.get_parameter("positions")
    assert positions.shape == (1, 1 + 5 * 5, DIM)
    torch.testing.assert_close(
        positions, interpolate_positions(encoder()["embeddings.position_embeddings"], 5, 5).float()
    )
    assert model(torch.zeros(2, CHANNELS, 12, 12)).shape == (2, CLASSES)


def test_interpolated_positions_keep_the_class_token_and_the_directions_of_the_grid() -> None:
    """A grid that holds its own row number grows along rows only, between the values of the ends."""
    rows = torch.arange(4.0).repeat_interleave(4).reshape(1, 16, 1)
    positions = torch.cat((torch.full((1, 1, 1), 9.0), rows), dim=1)
    assert torch.equal(interpolate_positions(positions, 4, 4), positions)
    larger = interpolate_positions(positions, 8, 5)
    assert larger[0, 0, 0] == 9.0
    grid = larger[0, 1:, 0].reshape(8, 5)
    torch.testing.assert_close(grid, grid[:, :1].expand(8, 5))
    assert (grid[1:, 0] > grid[:-1, 0]).all()
    assert grid.mean().item() == pytest.approx(1.5)


def test_half_precision_checkpoints_become_float32(tmp_path: Path) -> None:
    tensors = {name: tensor.half() for name, tensor in encoder().items()}
    pretrained = write(tmp_path / "checkpoint", tensors)
    model = build_model("vit", (CHANNELS, 8, 8), CLASSES, seed=0, pretrained=pretrained, resize=8)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}


@pytest.mark.parametrize(
    ("change", "config", "message"),
    [
        ({}, {"model_type": "deit"}, r"model_type = 'deit'; only 'vit' is supported"),
        ({}, {"hidden_act": "relu"}, r"hidden_act = 'relu'; only 'gelu' is supported"),
        ({"layernorm.bias": None}, {}, r"no 'layernorm\.bias' in the checkpoint"),
        ({"encoder.layer.1.output.dense.weight": None}, {}, r"no 'encoder\.layer\.1\.output\.dense\.weight'"),
        ({"encoder.layer.0.extra": torch.zeros(1)}, {}, r"not understood \['encoder\.layer\.0\.extra'\]"),
        ({"embeddings.position_embeddings": torch.zeros(1, 9, DIM)}, {}, r"9 position embeddings"),
        ({"layernorm.bias": torch.zeros(DIM + 1)}, {}, r"the tensors do not fit together"),
        ({}, {"num_attention_heads": "many"}, r"config\.json is malformed"),
        ({"encoder.layer.0.attention.attention.key.weight": torch.zeros(DIM, 1)}, {}, r"is malformed"),
        ({}, {"num_attention_heads": 4}, r"heads = 4 does not divide dim = 6"),
    ],
)
def test_unfit_checkpoints_are_refused(
    tmp_path: Path, change: dict[str, Tensor | None], config: dict[str, Any], message: str
) -> None:
    changed = {**encoder(), **change}
    tensors = {name: tensor for name, tensor in changed.items() if tensor is not None}
    pretrained = write(tmp_path / "checkpoint", tensors, **config)
    with pytest.raises(ConfigError, match=message):
        build_model("vit", (CHANNELS, SIDE, SIDE), CLASSES, seed=0, pretrained=pretrained)


def test_the_channels_must_fit(tmp_path: Path) -> None:
    pretrained = write(tmp_path / "checkpoint", encoder())
    with pytest.raises(ConfigError, match="the pretrained weights take 3 channels, the data has 2"):
        build_model("vit", (2, SIDE, SIDE), CLASSES, seed=0, pretrained=pretrained)


def test_missing_and_broken_files(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such file or folder"):
        read_checkpoint(str(tmp_path / "nowhere"))
    folder = Path(write(tmp_path / "checkpoint", encoder()))
    (folder / "model.safetensors").write_bytes(b"no tensors here")
    with pytest.raises(ConfigError, match="cannot read the checkpoint"):
        read_checkpoint(str(folder))
    (folder / "config.json").unlink()
    with pytest.raises(ConfigError, match=r"config\.json is missing.*number of heads"):
        read_checkpoint(str(folder))


def install_hub(monkeypatch: pytest.MonkeyPatch, download: Any) -> None:
    """A stand-in for ``huggingface_hub``: no test may need the network."""
    hub, errors = ModuleType("huggingface_hub"), ModuleType("huggingface_hub.errors")
    hub.hf_hub_download = download  # type: ignore[attr-defined]
    errors.EntryNotFoundError = type("EntryNotFoundError", (Exception,), {})  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "huggingface_hub", hub)
    monkeypatch.setitem(sys.modules, "huggingface_hub.errors", errors)


def test_hub_ids_are_downloaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = Path(write(tmp_path / "checkpoint", encoder()))
    asked = []

    def download(repository: str, file: str) -> str:
        asked.append((repository, file))
        return str(folder / file)

    install_hub(monkeypatch, download)
    checkpoint = read_checkpoint("someone/tiny-vit")
    assert asked == [("someone/tiny-vit", "model.safetensors"), ("someone/tiny-vit", "config.json")]
    assert (checkpoint.sizes.dim, checkpoint.image_size) == (DIM, SIDE)


def test_hub_failures_say_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    def download(repository: str, file: str) -> str:
        raise ConnectionError("no route to host")

    install_hub(monkeypatch, download)
    with pytest.raises(ConfigError, match=r"fetched from the hub: no route to host; check the id"):
        read_checkpoint("someone/tiny-vit")


def test_without_the_extra_the_error_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(MissingExtraError, match=r"huggingface_hub.*pip install 'fedretain\[hub\]'"):
        read_checkpoint("google/vit-base-patch16-224-in21k")
