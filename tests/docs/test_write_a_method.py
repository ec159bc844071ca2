"""The methods that the page writes: run by import path, and held against their identities."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import fedretain
from fedretain.config import make_experiment
from fedretain.errors import ConfigError
from fedretain.experiment import build_world

PAGE = (Path(__file__).parents[2] / "docs" / "write-a-method.md").read_text(encoding="utf-8")

Write = Callable[[str], dict[str, str]]


@pytest.fixture
def files(write_files: Write) -> dict[str, str]:
    return write_files("write-a-method.md")


def test_a_method_takes_about_twenty_lines(files: dict[str, str]) -> None:
    """From the decorator on, without empty lines."""
    for name in ("mimelite.py", "sparse.py"):
        code = [line for line in files[name].split("@dataclass")[1].splitlines() if line.strip()]
        assert len(code) <= 26, name


def test_the_experiment_file_runs_from_the_command_line(files: dict[str, str], workshop: Path) -> None:
    """In a process of its own: the command line itself finds the module beside the experiment file."""
    text = re.findall(r"^```yaml\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)[0]
    (workshop / "experiment.yaml").write_text(text, encoding="utf-8")
    command = "from fedretain.cli import main; main()"
    subprocess.run(
        [sys.executable, "-c", command, "run", "experiment.yaml", "--out", "run", "--quiet"],
        check=True,
        cwd=workshop,
        capture_output=True,
    )
    run = fedretain.Run(workshop / "run")
    assert len(run.metrics) == 5
    assert run.experiment.as_dict()["method"] == {"name": "mimelite:MimeLite", "beta": 0.8}


def test_the_identities_on_the_page_hold(files: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> None:
    checks = importlib.import_module("test_mimelite")
    names = [name for name in vars(checks) if name.startswith("test_")]
    assert len(names) == 2
    for name in names:
        getattr(checks, name)(tmp_path_factory.mktemp(name))


def test_mime_lite_imitates_momentum_on_the_pooled_data(files: dict[str, str], tmp_path: Path) -> None:
    """One step on all data by all clients: m ← (1 − β)·∇f(w) + β·m, w ← w − η·m, f the mean over all examples.

    Three rounds in float64 beside plain PyTorch, so that neither chain nor the server optimiser vouches for itself.
    """
    method = importlib.import_module("mimelite").MimeLite(beta=0.8)
    settings: dict[str, Any] = {
        "rounds": 3,
        "method": ["fedsgd", method],
        "precision": "float64",
        "local": {"lr": 0.3},
        "forgetting": {"every": 0},
    }
    found = dict(fedretain.run(settings, out=tmp_path / "run").model().named_parameters())

    world = build_world(make_experiment(settings))
    inputs, labels = world.federation.examples(world.federation.train.indices)
    model = world.model.train()
    momentum = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    for _ in range(3):
        model.zero_grad()
        torch.nn.functional.cross_entropy(model(inputs), labels).backward()
        with torch.no_grad():
            for name, p in model.named_parameters():
                momentum[name] = 0.2 * p.grad + 0.8 * momentum[name]
                p -= 0.3 * momentum[name]
    for name, p in model.named_parameters():
        torch.testing.assert_close(found[name], p, rtol=1e-11, atol=1e-13)


def test_a_local_optimiser_that_mime_lite_cannot_have_is_refused(files: dict[str, str]) -> None:
    for local in ({"optimizer": "adam"}, {"momentum": 0.9}):
        with pytest.raises(ConfigError, match="mimelite brings its own momentum"):
            make_experiment({"method": "mimelite:MimeLite", "local": local}).build_method()
    for beta in (1.5, float("nan")):
        with pytest.raises(ConfigError, match=r"method\.beta"):
            make_experiment({"method": {"name": "mimelite:MimeLite", "beta": beta}})


def test_nothing_is_lost_by_sending_the_largest_entries(files: dict[str, str], tmp_path: Path) -> None:
    """Δ_k = s_k + e_k after the first round; all clients take part and weigh the same, so the server moves by mean s_k.

    Hence w_1 + mean_k e_k is FedAvg's w_1. A share of 1 is FedAvg for all rounds, bit for bit.
    """
    sparse = importlib.import_module("sparse").Sparse
    settings: dict[str, Any] = {
        "rounds": 1,
        "precision": "float64",
        "server": {"weights": "uniform"},
        "forgetting": {"every": 0},
    }
    run = fedretain.run({**settings, "method": sparse(share=0.1)}, out=tmp_path / "sparse")
    memories = [load_file(path) for path in (run.path / "clients").iterdir()]
    assert len(memories) == 10
    fedavg = dict(fedretain.run(settings, out=tmp_path / "fedavg").model().named_parameters())
    for name, p in run.model().named_parameters():
        left = torch.stack([memory[name] for memory in memories]).mean(0)
        assert left.abs().max() > 0
        torch.testing.assert_close(p + left, fedavg[name], rtol=1e-11, atol=1e-13)

    settings["rounds"] = 3
    whole = fedretain.run({**settings, "method": sparse(share=1.0)}, out=tmp_path / "whole")
    fedavg = dict(fedretain.run(settings, out=tmp_path / "longer").model().named_parameters())
    assert all(torch.equal(p, fedavg[name]) for name, p in whole.model().named_parameters())


def test_a_resumed_run_of_a_stateful_method_of_ones_own_has_the_same_bits(
    files: dict[str, str], tmp_path: Path
) -> None:
    method = importlib.import_module("sparse").Sparse(share=0.2)
    settings: dict[str, Any] = {"rounds": 4, "participation": 3, "method": method, "forgetting": {"every": 0}}
    whole = fedretain.run(settings, out=tmp_path / "whole")
    fedretain.run({**settings, "rounds": 2}, out=tmp_path / "parts")
    parts = fedretain.run(settings, out=tmp_path / "parts", resume=True)
    for one, two in zip(whole.model().parameters(), parts.model().parameters(), strict=True):
        assert torch.equal(one, two)
