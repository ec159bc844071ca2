"""A run as its user sees it: metrics, summary, model; all read from the run directory."""

from __future__ import annotations

import json
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml
from torch import nn

from fedretain.config import Experiment, make_experiment
from fedretain.errors import RunError
from fedretain.models import build_model
from fedretain.runs.checkpoint import Checkpoint, load_checkpoints
from fedretain.runs.clients import ClientStore
from fedretain.runs.metrics import Metrics, read_rows


class Run:
    """A finished or stopped run."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        if not (self.path / "config.yaml").exists():
            raise RunError(f"{self.path}: no run directory (it has no config.yaml)")

    def __repr__(self) -> str:
        return f"Run({str(self.path)!r})"

    @cached_property
    def experiment(self) -> Experiment:
        """The experiment with every default."""
        return make_experiment(yaml.safe_load((self.path / "config.yaml").read_text(encoding="utf-8")))

    @cached_property
    def metrics(self) -> Metrics:
        """One row a round."""
        return Metrics(read_rows(self.path / "metrics.jsonl"))

    @cached_property
    def summary(self) -> dict[str, Any]:
        """Final accuracy, mean forgetting, seconds, bytes."""
        return self._json("summary.json", "the run is not finished; go on with --resume")

    @cached_property
    def environment(self) -> dict[str, Any]:
        """What the run was made with."""
        return self._json("environment.json", "the run had not begun; start it again with --resume")

    def checkpoint(self) -> Checkpoint:
        """The newest saved state."""
        found = load_checkpoints(self.path / "checkpoint", at_most=len(self.metrics), store=self.client_states)
        if not found:
            raise RunError(f"{self.path}: has no whole checkpoint; run it again with --resume")
        return found[0]

    @property
    def client_states(self) -> ClientStore:
        """What a stateful method keeps for each client."""
        return ClientStore(self.path / "clients")

    def model(self) -> nn.Module:
        """The global model after the last saved round, in evaluation mode, on the CPU."""
        experiment, facts, state = self.experiment, self.environment["data"], self.checkpoint().state
        channels, height, width = facts["shape"]
        model = build_model(
            experiment.model.name,
            (channels, height, width),
            facts["classes"],
            seed=experiment.seed,
            **experiment.model.parameters,
        )
        model.to(next(iter(state.params.values())).dtype)
        model.load_state_dict({**state.params, **state.buffers})
        return model.eval()

    def _json(self, name: str, otherwise: str) -> dict[str, Any]:
        try:
            content: dict[str, Any] = json.loads((self.path / name).read_bytes())
        except FileNotFoundError:
            raise RunError(f"{self.path}: has no {name}: {otherwise}") from None
        except (OSError, ValueError) as error:
            raise RunError(f"{self.path / name}: cannot be read ({error})") from None
        return content
