"""Weights & Biases: an offline run in the run directory, or a run on its server."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal
from uuid import uuid4

from fedretain.errors import MissingExtraError
from fedretain.runs.trackers.protocol import RunFacts


@dataclass
class WeightsAndBiases:
    """A W&B run, offline unless ``mode`` or WANDB_MODE says otherwise: ``wandb sync`` uploads it later.

    Offline the run is written anew at every opening, from the first round and under the same id.
    """

    project: str | None = None
    entity: str | None = None
    mode: Literal["offline", "online"] | None = None
    _library: Any = field(init=False, repr=False)
    _run: Any = field(init=False, repr=False, default=None)

    def __post_init__(self) -> None:
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        try:
            import wandb
        except ImportError as error:
            raise MissingExtraError("wandb", "track", "track: wandb") from error
        self._library = wandb

    def open(self, facts: RunFacts) -> int:
        """Go on under the id in the run directory, or under a new one that is kept there."""
        id = facts.recall("wandb")
        if id is None:
            id = uuid4().hex[:8]
            facts.remember("wandb", id)
        mode = self.mode or os.environ.get("WANDB_MODE", "offline")
        offline = mode in ("offline", "dryrun")
        if offline:
            for earlier in (facts.path / "wandb").glob(f"offline-run-*-{id}"):
                shutil.rmtree(earlier)
        self._run = self._library.init(
            id=id,
            name=facts.name,
            group=facts.group,
            project=self.project or os.environ.get("WANDB_PROJECT", "fedretain"),
            entity=self.entity,
            mode=mode,
            dir=str(facts.path.absolute()),
            config=dict(facts.config),
            allow_val_change=True,
            resume=None if offline else "allow",
            reinit="create_new",
            settings=self._library.Settings(
                silent=True,
                console="off",
                disable_git=True,
                disable_code=True,
                x_disable_meta=True,
                x_disable_stats=True,
                x_disable_machine_info=True,
                x_save_requirements=False,
            ),
        )
        first_missing: int = self._run.starting_step
        return max(first_missing - 1, 0)

    def log(self, round: int, numbers: Mapping[str, float], clients: Mapping[str, list[float]]) -> None:
        """One row of the history, with histograms over the clients."""
        histograms = {key: self._library.Histogram(values) for key, values in clients.items()}
        self._run.log({**numbers, **histograms}, step=round)

    def close(self, rounds: int, summary: Mapping[str, float] | None) -> None:
        """The summary goes to the run's summary."""
        self._run.summary.update(dict(summary or {}))
        self._run.finish(exit_code=0 if summary is not None else 1)
