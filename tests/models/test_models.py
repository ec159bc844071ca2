"""What every architecture promises: built by name and seed, pure, and fit for functional transforms."""

from __future__ import annotations

import copy
import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, grad, stack_module_state, vmap

from fedretain.errors import ConfigError
from fedretain.models import MODELS, build_model

CLASSES = 3

# Every architecture and every branch in it, as small as its layout allows.
SMALL: dict[str, tuple[str, tuple[int, int, int], dict[str, Any]]] = {
    "mlp": ("mlp", (2, 4, 4), {"hidden": (5, 4)}),
    "mlp on features": ("mlp", (7, 1, 1), {"hidden": ()}),
    "lenet": ("lenet", (1, 12, 12), {}),
    "lenet unpadded": ("lenet", (1, 32, 32), {}),
    "cnn": ("cnn", (1, 20, 20), {}),
    "fedavg_cnn": ("fedavg_cnn", (1, 8, 8), {}),
    "cnn10": ("cnn10", (1, 6, 6), {"width": 2}),
    "resnet18 batch": ("resnet18", (3, 16, 16), {"width": 4}),
    "resnet18 group": ("resnet18", (3, 16, 16), {"width": 4, "norm": "group"}),
    "resnet18 layer": ("resnet18", (3, 16, 16), {"width": 4, "norm": "layer"}),
    "resnet18 mixed": ("resnet18", (3, 32, 32), {"width": 4, "norm": "mixed"}),
    "shallow_resnet": ("shallow_resnet", (3, 16, 16), {"width": 4}),
    "resnet9": ("resnet9", (3, 16, 16), {"width": 4}),
    "densenet121": ("densenet121", (1, 8, 8), {"growth": 4}),
    "densenet121 large": ("densenet121", (1, 64, 64), {"growth": 4}),
    "densenet121 group": ("densenet121", (1, 8, 8), {"growth": 4, "norm": "group", "groups": 2}),
    "vit": ("vit", (3, 8, 8), {"dim": 12, "depth": 2}),
    "vit enlarging": ("vit", (3, 6, 6), {"dim": 12, "depth": 1, "resize": 8}),
    "vit shrinking": ("vit", (3, 20, 20), {"dim": 12, "depth": 1, "resize": 8}),
}
each_model = pytest.mark.parametrize("small", SMALL)


def build(small: str, seed: int = 0) -> nn.Module:
    name, shape, hyper = SMALL[small]
    return build_model(name, shape, CLASSES, seed=seed, **hyper)


def build_moved(small: str, seed: int = 0) -> nn.Module:
    """A float64 model away from its start, where Fixup's zeros would hide gradients and differences."""
    model = build(small, seed).double()
    generator = torch.Generator().manual_seed(100 + seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64), alpha=0.1)
    return model


def batch(small: str, size: int = 4) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(7)
    inputs = torch.randn(size, *SMALL[small][1], generator=generator, dtype=torch.float64)
    return inputs, torch.arange(size) % CLASSES


def state(model: nn.Module) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Copies of the parameters and the buffers."""
    parameters = {name: value.detach().clone() for name, value in model.named_parameters()}
    return parameters, {name: value.clone() for name, value in model.named_buffers()}


def test_every_name_is_tried() -> None:
    assert {name for name, _, _ in SMALL.values()} == set(MODELS)


@each_model
def test_logits_have_one_column_per_class_and_nothing_is_drawn(small: str) -> None:
    model, (inputs, _) = build_moved(small), batch(small)
    before = torch.get_rng_state()
    with torch.no_grad():
        first, second = model(inputs), model(inputs)
    assert first.shape == (4, CLASSES)
    assert torch.equal(first, second)
    assert torch.equal(torch.get_rng_state(), before)
    assert not any("Dropout" in type(module).__name__ for module in model.modules())


@each_model
def test_forward_leaves_its_input_alone(small: str) -> None:
    model, (inputs, _) = build_moved(small), batch(small)
    given = inputs.clone()
    model(inputs)
    assert torch.equal(inputs, given)


@each_model
def test_the_last_layer_is_called_classifier(small: str) -> None:
    """Frozen-classifier methods find it by that name: one row of weights per class."""
    classifier = build(small).get_submodule("classifier")
    assert isinstance(classifier, nn.Linear)
    assert classifier.out_features == CLASSES


@each_model
def test_same_seed_same_bits(small: str) -> None:
    """The second build must not depend on the global generator (moved by a draw), nor move it."""
    first = build(small, seed=5).state_dict()
    torch.rand(1)
    before = torch.get_rng_state()
    second = build(small, seed=5).state_dict()
    assert torch.equal(torch.get_rng_state(), before)
    assert list(first) == list(second)
    assert all(torch.equal(first[name], second[name]) for name in first)


@each_model
def test_other_seed_other_weights(small: str) -> None:
    """Every weight matrix or kernel that is drawn at all differs; Fixup's constants are the exception."""
    one, two = (dict(build(small, seed=seed).named_parameters()) for seed in (1, 2))
    drawn = [name for name, value in one.items() if value.dim() > 1 and value.unique().numel() > 1]
    assert drawn
    assert not any(torch.equal(one[name], two[name]) for name in drawn)


@each_model
@pytest.mark.parametrize("training", [False, True])
def test_functional_call_equals_the_module(small: str, training: bool) -> None:
    model, (inputs, _) = build_moved(small).train(training), batch(small)
    parameters, buffers = state(model)
    with torch.no_grad():
        functional = functional_call(model, (parameters, buffers), (inputs,))
        direct = model(inputs)
    assert torch.equal(functional, direct)
    # Running statistics were updated in the buffers that were passed, as the module updates its own.
    assert all(torch.equal(buffers[name], value) for name, value in model.named_buffers())


@each_model
@pytest.mark.parametrize("training", [False, True])
def test_stacked_clients_equal_one_after_another(small: str, training: bool) -> None:
    """vmap(grad) over two clients' parameters, buffers and batches against plain backward passes."""
    inputs, labels = batch(small, size=8)
    client_inputs, client_labels = inputs.reshape(2, 4, *inputs.shape[1:]), labels.reshape(2, 4)
    clients = [build_moved(small, seed).train(training) for seed in (0, 1)]
    skeleton = copy.deepcopy(clients[0]).to("meta")
    parameters, buffers = stack_module_state(clients)

    def loss(parameters: Any, buffers: Any, inputs: Tensor, labels: Tensor) -> tuple[Tensor, Any]:
        logits = functional_call(skeleton, (parameters, buffers), (inputs,))
        return F.cross_entropy(logits, labels), buffers

    detached = {name: value.detach() for name, value in parameters.items()}
    stacked, stacked_buffers = vmap(grad(loss, has_aux=True))(detached, buffers, client_inputs, client_labels)
    for client, model in enumerate(clients):
        F.cross_entropy(model(client_inputs[client]), client_labels[client]).backward()
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(stacked[name][client], parameter.grad, rtol=1e-7, atol=1e-9)
        for name, buffer in model.named_buffers():
            torch.testing.assert_close(stacked_buffers[name][client], buffer)


@each_model
def test_gradients_of_single_examples_sum_to_the_batch_gradient(small: str) -> None:
    """vmap over examples in evaluation mode, as Fisher diagonals and per-example clipping need it."""
    model, (inputs, labels) = build_moved(small).eval(), batch(small)
    parameters, buffers = state(model)

    def loss(parameters: Any, example: Tensor, label: Tensor) -> Tensor:
        logits = functional_call(model, (parameters, buffers), (example.unsqueeze(0),))
        return F.cross_entropy(logits, label.unsqueeze(0))

    per_example = vmap(grad(loss), in_dims=(None, 0, 0))(parameters, inputs, labels)
    F.cross_entropy(model(inputs), labels, reduction="sum").backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(per_example[name].sum(0), parameter.grad, rtol=1e-7, atol=1e-9)


@each_model
def test_every_parameter_gets_a_gradient_and_gradients_can_be_differentiated(small: str) -> None:
    """In evaluation mode (a bias before batch norm has no gradient in training: the batch mean removes it).

    The models are moved away from their start because Fixup begins with a zero classifier and zero
    branches, behind which gradients are 0 by design (tested in test_resnet9.py). The second derivative is
    what gradient inversion descends: d‖∇_θ loss‖² / d input.
    """
    model, (inputs, labels) = build_moved(small).eval(), batch(small)
    inputs.requires_grad_()
    loss = F.cross_entropy(model(inputs), labels)
    gradients = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
    silent = [name for (name, _), g in zip(model.named_parameters(), gradients, strict=True) if not g.abs().max() > 0]
    assert silent == []
    squared = torch.stack([g.square().sum() for g in gradients]).sum()
    (second,) = torch.autograd.grad(squared, inputs)
    assert second.isfinite().all()
    assert second.abs().max() > 0


@pytest.mark.parametrize("name", sorted(set(MODELS) - {"mlp"}))
def test_image_models_refuse_feature_vectors_and_tiny_images(name: str) -> None:
    with pytest.raises(ConfigError, match=r"\(64, 1, 1\); feature vectors need the model 'mlp'"):
        build_model(name, (64, 1, 1), 10, seed=0)
    with pytest.raises(ConfigError, match=rf"model '{name}' needs images .* at least \d+, got \(1, 2, 2\)"):
        build_model(name, (1, 2, 2), 10, seed=0)


@pytest.mark.parametrize("name", MODELS)
def test_help_and_hyper_parameters_can_be_listed(name: str) -> None:
    """The command line prints the first docstring line and the keyword-only parameters with defaults."""
    architecture = MODELS[name]
    assert (architecture.__doc__ or "").splitlines()[0].endswith(".")
    _, *parameters = inspect.signature(architecture.__init__).parameters.values()
    assert [p.name for p in parameters[:2]] == ["shape", "classes"]
    for parameter in parameters[2:]:
        assert parameter.kind is inspect.Parameter.KEYWORD_ONLY
        assert parameter.default is not inspect.Parameter.empty


def test_unknown_model_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"unknown model 'resnet_18'; did you mean 'resnet18'\?"):
        build_model("resnet_18", (3, 32, 32), 10, seed=0)


def test_unknown_hyper_parameter_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"unknown key 'model.widht'; did you mean 'model.width'\?"):
        build_model("resnet18", (3, 32, 32), 10, seed=0, widht=8)


@pytest.mark.parametrize(
    ("name", "hyper"),
    [
        ("resnet18", {"norm": "instance"}),
        ("resnet18", {"width": 0}),
        ("mlp", {"hidden": [64, -1]}),
        ("densenet121", {"norm": "layer"}),
        ("vit", {"mlp_ratio": 0.0}),
    ],
)
def test_values_out_of_range_are_refused(name: str, hyper: dict[str, Any]) -> None:
    (key,) = hyper
    with pytest.raises(ConfigError, match=rf"model\.{key}.*: must be "):
        build_model(name, (3, 32, 32), 10, seed=0, **hyper)


def test_lists_from_yaml_are_accepted() -> None:
    model = build_model("mlp", (4, 1, 1), 2, seed=0, hidden=[3])
    assert model.get_submodule("hidden.0").weight.shape == (3, 4)


def test_models_are_built_on_the_cpu_whatever_the_default_device() -> None:
    with torch.device("meta"):
        model = build_model("mlp", (4, 1, 1), 2, seed=0)
    assert {parameter.device.type for parameter in model.parameters()} == {"cpu"}


@pytest.fixture
def own_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A user's module with a model of the common signature."""
    (tmp_path / "own_models.py").write_text(
        "from torch import nn\n"
        "class Tiny(nn.Module):\n"
        "    'A tiny model.'\n"
        "    def __init__(self, shape, classes, *, bias: bool):\n"
        "        super().__init__()\n"
        "        self.classifier = nn.Linear(shape[0], classes, bias=bias)\n"
        "    def forward(self, inputs):\n"
        "        return self.classifier(inputs.flatten(1))\n"
        "class NoModel:\n"
        "    pass\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    return "own_models"


def test_own_model_by_import_path(own_module: str) -> None:
    path = f"{own_module}:Tiny"
    models = [build_model(path, (6, 1, 1), 2, seed=seed, bias=False) for seed in (0, 0, 1)]
    weights = [model.get_parameter("classifier.weight") for model in models]
    assert weights[0].shape == (2, 6)
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])


def test_own_model_errors(own_module: str) -> None:
    with pytest.raises(ConfigError, match=r"model\.bias: missing"):
        build_model(f"{own_module}:Tiny", (6, 1, 1), 2, seed=0)
    with pytest.raises(ConfigError, match="own_models:Tyny' cannot be imported"):
        build_model(f"{own_module}:Tyny", (6, 1, 1), 2, seed=0)
    with pytest.raises(ConfigError, match=r"own_models:NoModel' is no torch\.nn\.Module class"):
        build_model(f"{own_module}:NoModel", (6, 1, 1), 2, seed=0)
    with pytest.raises(ConfigError, match=r"no_such_module.*PYTHONPATH"):
        build_model("no_such_module:Tiny", (6, 1, 1), 2, seed=0)
